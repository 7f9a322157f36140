"""FedGKD. Yao et al., "Local-Global Knowledge Distillation in Heterogeneous Federated Learning with Non-IID Data",
2021 (arXiv:2107.00051), eq. 3-4 and algorithm 1. (Eq. 5 is `fedgkd_vote`; FedGKD+ is this with a projection head.)

Choices and deviations: docs/methods/fedgkd.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.losses import kl, masked_mean, mse
from fedkeep.method import Batch, Cohort, FedAvg, Note, Params, ServerTree, Shared, Visit, hyper
from fedkeep.methods._model_buffer import empty_buffer, push
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedGKD(FedAvg):
    """FedGKD: distil the mean of the last M global models into local training."""

    name: ClassVar[str] = "fedgkd"
    paper: ClassVar[str] = "Yao et al., arXiv 2021"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    gamma: float = hyper(
        0.2, "weight of distillation (halved in the loss)", search=(0.02, 2.0), low=0, fedavg_at=0.0, test_value=1.0
    )
    M: int = hyper(5, "number of past global models averaged", search=(1, 10), low=1, whole=True, test_value=1)
    distance: str = hyper("kl", "between logits: KL divergence or MSE", choices=("kl", "mse"), test_value="mse")

    def annotate(self, visit: Visit, x: Any, y: Tensor) -> Note:
        """Note the teacher's logits."""
        return {"z_bar": visit.task.apply(visit.shared["w_bar" if self.M > 1 else "params"], x)}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of CE + gamma/2 KL(h(w_bar) || h(w))."""
        z = visit.task.apply(params, batch["x"], train=True)
        distance = (kl if self.distance == "kl" else mse)(z, batch["note"]["z_bar"])
        return masked_mean(visit.task.criterion(z, batch["y"]) + visit.shared["gamma"] / 2 * distance, batch["mask"])

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with an empty buffer."""
        return {"params": params, **empty_buffer(task, params, self.M)}

    def broadcast(self, server: ServerTree) -> Shared:
        """Send the weights, gamma (0 in round 1), and w_bar where it differs from the current model."""
        filled = server["filled"]
        shared = {"params": server["params"], "gamma": self.gamma * filled[0]}
        if self.M > 1:
            shared["w_bar"] = tree.mean(server["buffer"], filled if filled.any() else torch.ones_like(filled))
        return shared

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average, and add the average to the buffer."""
        params = tree.mean(uploads["params"], uploads["n"])
        return {"params": params, **push(server, params)}
