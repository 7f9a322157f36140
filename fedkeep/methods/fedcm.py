"""FedCM. Xu et al., "FedCM: Federated Learning with Client-level Momentum", 2021 (arXiv:2106.10874).

Choices and deviations: docs/methods/fedcm.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep import tree
from fedkeep.method import Cohort, FedAvg, Grads, Local, Params, ServerTree, Shared, Visit, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedCM(FedAvg):
    """FedCM: mix the direction of the last round into every local gradient."""

    name: ClassVar[str] = "fedcm"
    paper: ClassVar[str] = "Xu et al., arXiv 2021"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    alpha: float = hyper(0.1, "share of the client's own gradient",
                         search=(0.05, 0.5), above=0, high=1, fedavg_at=1.0, test_value=0.5)  # fmt: skip
    eta_g: float = hyper(1.0, "global step size", above=0, test_value=0.5)

    def prepare(self, visit: Visit) -> Local:
        """Divide the distance of the last round by this client's steps: Delta, the gradient of one step."""
        return {"delta": tree.scale(visit.shared["delta"], 1 / visit.facts["effective_steps"])}

    def correct(self, visit: Visit, params: Params, grads: Grads) -> Grads:
        """Return alpha g + (1 - alpha) Delta."""

        def mixed(g: Tensor, delta: Tensor) -> Tensor:
            return self.alpha * g + (1 - self.alpha) * delta

        return tree.map(mixed, grads, visit.local["delta"])

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with Delta = 0."""
        return {"params": params, "delta": tree.zeros_like(params)}

    def broadcast(self, server: ServerTree) -> Shared:
        """Send the weights and Delta."""
        return {"params": server["params"], "delta": server["delta"]}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Move by eta_g towards the average; Delta is the way back from it, in units of the learning rate."""
        average = tree.mean(uploads["params"], uploads["n"])
        params = tree.map(lambda w, a: w + self.eta_g * (a - w), server["params"], average)
        return {"params": params, "delta": tree.scale(tree.sub(server["params"], average), 1 / task.lr(cohort.round))}
