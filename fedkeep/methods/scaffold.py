"""SCAFFOLD. Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020
(arXiv:1910.06378), algorithm 1 with option II.

Choices and deviations: docs/methods/scaffold.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep import tree
from fedkeep.bounds import Received, tolerance
from fedkeep.method import (
    Bound,
    ClientState,
    Cohort,
    FedAvg,
    Grads,
    Local,
    Params,
    ServerTree,
    Shared,
    Upload,
    Visit,
    hyper,
)  # fmt: skip
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """SCAFFOLD: correct every local gradient by c - c_k, the client's drift away from the average."""

    name: ClassVar[str] = "scaffold"
    title: ClassVar[str] = "SCAFFOLD"
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    averaged: ClassVar[tuple[str, ...]] = ("params", "dc")
    bounds: ClassVar[Mapping[str, Bound]] = {
        **FedAvg.bounds,
        "dc": Bound(low=lambda r: _dc(r, -1.0), high=lambda r: _dc(r, 1.0)),  # it follows from the weights and n
    }
    eta_g: float = hyper(1.0, "global step size", search=(0.5, 1.5), above=0, test_value=0.5)

    def init_client(self, task: Task, params: Params) -> ClientState:
        """Start with c_k = 0."""
        return {"c_k": tree.zeros_like(params)}

    def prepare(self, visit: Visit) -> Local:
        """Compute the correction c - c_k."""
        return {"correction": tree.sub(visit.shared["c"], visit.client["c_k"])}

    def correct(self, visit: Visit, params: Params, grads: Grads) -> Grads:
        """Return g + c - c_k."""
        return tree.add(grads, visit.local["correction"])

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Option II: c_k' = c_k - c + (w_g - w) / (effective steps * lr); upload the change of c_k."""
        shared, facts = visit.shared, visit.facts
        gradient = tree.scale(tree.sub(shared["params"], params), 1 / (facts["effective_steps"] * facts["lr"]))
        dc = tree.sub(gradient, shared["c"])
        return {"params": params, "n": facts["n"], "dc": dc}, {"c_k": tree.add(visit.client["c_k"], dc)}

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with c = 0."""
        return {"params": params, "c": tree.zeros_like(params)}

    def broadcast(self, server: ServerTree) -> Shared:
        """Send the weights and c."""
        return {"params": server["params"], "c": server["c"]}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Move by eta_g towards the average, and c by K/N of the mean change."""
        average = tree.mean(uploads["params"], uploads["n"])
        params = tree.map(lambda w, a: w + self.eta_g * (a - w), server["params"], average)
        share = len(cohort.ids) / task.n_clients
        c = tree.map(lambda c, dc: c + share * dc, server["c"], tree.mean(uploads["dc"]))
        return {"params": params, "c": c}


def _dc(received: Received, sign: float) -> Tree:
    """Return the dc that the uploaded weights and n imply, plus or minus the error of rounding."""
    scale = 1 / (received.effective_steps * received.lr)

    def limit(w: Tensor, w_g: Tensor, c: Tensor) -> Tensor:
        slack = scale * tolerance(w, w_g) + tolerance(c)
        return scale * (w_g.double() - w.double()) - c.double() + sign * slack

    return tree.map(limit, received.upload["params"], received.server["params"], received.server["c"])
