"""FedExP. Jhunjhunwala et al., "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023
(arXiv:2301.09604).

Choices and deviations: docs/methods/fedexp.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.method import Cohort, FedAvg, ServerTree, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedExP(FedAvg):
    """FedExP: the server steps beyond the average, the further the more the clients' updates disagree."""

    name: ClassVar[str] = "fedexp"
    paper: ClassVar[str] = "Jhunjhunwala et al., ICLR 2023"
    averaged: ClassVar[tuple[str, ...]] = ()  # the norm of each client's update counts
    epsilon: float = hyper(0.001, "keeps the step size small where the mean update is small", above=0, fedavg_at=1e9,
                           test_value=0.1)  # fmt: skip

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """w <- w + eta_g mean Delta, where eta_g = max(1, mean ||Delta_k||^2 / (2 (||mean Delta||^2 + epsilon)))."""
        delta = tree.map(lambda w_k, w: w_k - w, uploads["params"], server["params"])
        mean = tree.mean(delta, uploads["n"])
        of_clients = tree.mean({"squares": _squared_norms(delta)}, uploads["n"])["squares"]
        [of_mean] = _squared_norms(tree.stack([mean]))
        eta_g = (of_clients / (2 * (of_mean + self.epsilon))).clamp(min=1.0)
        return {"params": tree.map(lambda w, d: w + eta_g * d, server["params"], mean)}


def _squared_norms(stacked: Tree) -> Tensor:
    """Return the squared norm of every client's tree, [K], in float32 at least."""
    rows = torch.cat([t.reshape(len(t), -1) for t in tree.leaves(stacked)], dim=1)
    return rows.to(torch.promote_types(rows.dtype, torch.float32)).square().sum(1)
