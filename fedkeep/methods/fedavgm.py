"""FedAvgM. Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019 (arXiv:1909.06335): FedAvg with momentum on the server.

Choices and deviations: docs/methods/fedavgm.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeep import tree
from fedkeep.method import Cohort, FedAvg, Params, ServerTree, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvgM: the server sums up the rounds' updates in a velocity and moves along it."""

    name: ClassVar[str] = "fedavgm"
    paper: ClassVar[str] = "Hsu et al., arXiv 2019"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    b: float = hyper(0.7, "share of the velocity kept from round to round", search=(0.3, 0.95), low=0, high=0.999,
                     fedavg_at=0.0, test_value=0.3)  # fmt: skip

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with the velocity v = 0."""
        return {"params": params, "v": tree.zeros_like(params)}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """v <- b v + (w_g - mean w); w_g <- w_g - v."""
        average = tree.mean(uploads["params"], uploads["n"])
        v = tree.map(lambda v, w, a: self.b * v + (w - a), server["v"], server["params"], average)
        return {"params": tree.sub(server["params"], v), "v": v}
