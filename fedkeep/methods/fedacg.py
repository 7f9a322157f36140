"""FedACG. Kim et al., "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR 2024
(arXiv:2201.03172).

Choices and deviations: docs/methods/fedacg.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep import tree
from fedkeep.method import Batch, Cohort, FedAvg, Params, ServerTree, Shared, Visit, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedACG(FedAvg):
    """FedACG: clients start ahead of the global weights, where the server's momentum leads, and stay near there."""

    name: ClassVar[str] = "fedacg"
    paper: ClassVar[str] = "Kim et al., CVPR 2024"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    lam: float = hyper(0.85, "share of the momentum kept from round to round",
                       search=(0.5, 0.95), low=0, high=0.999, test_value=0.3)  # fmt: skip
    beta: float = hyper(0.002, "weight of the proximal term", search=(0.0002, 0.02), low=0, test_value=1.0)

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with the momentum m = 0."""
        return {"params": params, "m": tree.zeros_like(params)}

    def broadcast(self, server: ServerTree) -> Shared:
        """Send w + lam m alone."""
        return {"params": tree.add(server["params"], tree.scale(server["m"], self.lam))}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return mean CE + beta/2 ||w_k - (w + lam m)||^2."""
        distance = tree.squared_distance(params, visit.shared["params"])
        return super().loss(visit, params, batch) + self.beta / 2 * distance

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """m <- lam m + (mean w_k - (w + lam m)); w <- w + m, which is the mean of the clients' weights."""
        average = tree.mean(uploads["params"], uploads["n"])
        return {"params": average, "m": tree.sub(average, server["params"])}
