"""FedAvgM. Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv:1909.06335, 2019: FedAvg with momentum at the server.

Where the paper leaves a choice: the velocity starts at 0, the server's learning rate is 1, and the momentum is the
heavy-ball one (Nesterov's is not used). The field `b` is the paper's beta; 0.7 is what FedNTD's released code sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeep import tree
from fedkeep.method import Cohort, FedAvg, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvgM: the server adds up the rounds' updates in a velocity and moves along it."""

    name: ClassVar[str] = "fedavgm"
    paper: ClassVar[str] = "Hsu et al., arXiv 2019"
    b: float = hyper(0.7, "share of the velocity kept from round to round", low=0, high=0.999, neutral=0.0, other=0.3)

    def init_server(self, task: Task, params: Tree) -> Tree:
        """Start with the velocity v = 0."""
        return {"params": params, "v": tree.zeros_like(params)}

    def aggregate(self, task: Task, server: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """v <- b v + (w_g - mean w); w_g <- w_g - v."""
        average = tree.mean(uploads["params"], uploads["n"])
        v = tree.map(lambda v, w, a: self.b * v + (w - a), server["v"], server["params"], average)
        return {"params": tree.sub(server["params"], v), "v": v}
