"""FedVARP. Jhunjhunwala et al., "FedVARP: Tackling the Variance Due to Partial Client Participation in Federated
Learning", UAI 2022 (arXiv:2207.14130).

Choices and deviations: docs/methods/fedvarp.md.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.method import Cohort, FedAvg, Params, ServerTree, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree

LARGE = 4 << 30  # bytes of y from which on a run warns

log = logging.getLogger("fedkeep")


@dataclass(frozen=True)
class FedVARP(FedAvg):
    """FedVARP: the last update of every absent client stands in for the one that it would have sent."""

    name: ClassVar[str] = "fedvarp"
    paper: ClassVar[str] = "Jhunjhunwala et al., UAI 2022"
    averaged: ClassVar[tuple[str, ...]] = ()  # each client's own update is kept
    eta_s: float = hyper(1.0, "the server's step size", search=(0.5, 1.5), above=0, test_value=0.5)

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with y_k = 0 for every client k; y is one model per client, stacked."""
        size = task.n_clients * tree.nbytes(params)
        if size > LARGE:
            log.warning("fedvarp keeps a model for each of %d clients: %.1f GiB", task.n_clients, size / 2**30)
        return {"params": params, "y": tree.map(lambda w: w.new_zeros(task.n_clients, *w.shape), params)}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """w <- w + eta_s (mean over the cohort of (Delta_k - y_k) + mean over all clients of y); y_k <- Delta_k."""
        ids = torch.tensor(cohort.ids, device=uploads["n"].device)
        delta = tree.map(lambda w_k, w: w_k - w, uploads["params"], server["params"])

        def step(w: Tensor, d: Tensor, y: Tensor) -> Any:
            return w + self.eta_s * ((d - y[ids]).mean(0) + y.mean(0))

        y = tree.map(lambda y, d: y.index_copy(0, ids, d), server["y"], delta)
        return {"params": tree.map(step, server["params"], delta, server["y"]), "y": y}
