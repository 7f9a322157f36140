"""FedProx. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, eq. 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep import tree
from fedkeep.method import FedAvg, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedProx: hold every client near the global weights by mu/2 ||w - w_g||^2.

    mu is 0.1 in FedNTD's table 5; FedGKD and FedSSD use 0.01 for CIFAR-10, 0.001 for CIFAR-100 and Tiny-ImageNet.
    """

    name: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "Li et al., MLSys 2020"
    mu: float = hyper(0.1, "weight of the proximal term", low=0, neutral=0.0, other=1.0)

    def loss(self, task: Task, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tensor:
        """Return mean CE + mu/2 ||w - w_g||^2."""
        gap = tree.sub(params, shared["params"])
        return super().loss(task, params, batch, shared, local) + self.mu / 2 * tree.dot(gap, gap)
