"""FedCAD, unverified. He et al., "Class-wise Adaptive Self Distillation for Heterogeneous Federated Learning",
FL-AAAI workshop 2022: the predecessor of FedSSD.

Unverified: no text with its formula was available. It is built from what FedSSD's paper and its own abstract say of it.
Choices and deviations: docs/methods/fedcad.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedkeep.losses import kl, masked_mean
from fedkeep.method import Batch, Cohort, FedAvg, Note, Params, ServerTree, Shared, Visit, hyper
from fedkeep.server_training import credibility, require_public
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedCAD(FedAvg):
    """FedCAD (unverified): distil the global model, each example weighted by the recall of its class."""

    name: ClassVar[str] = "fedcad"
    paper: ClassVar[str] = "He et al., FL-AAAI 2022"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    beta: float = hyper(1.0, "weight of distillation", search=(0.1, 10.0), low=0, fedavg_at=0.0, test_value=0.3)
    tau: float = hyper(1.0, "temperature of both softmaxes", search=(1.0, 4.0), above=0, test_value=3.0)

    def annotate(self, visit: Visit, x: Any, y: Tensor) -> Note:
        """Note the global model's logits z_g and the weight a[y]."""
        return {"z_g": visit.task.apply(visit.shared["params"], x), "a": visit.shared["a"][y]}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of CE(z, y) + beta a[y] tau^2 KL(p_g || p)."""
        z, note = visit.task.apply(params, batch["x"], train=True), batch["note"]
        distilled = self.beta * note["a"] * kl(z, note["z_g"], self.tau)
        return masked_mean(visit.task.criterion(z, batch["y"]) + distilled, batch["mask"])

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Compute w_0's recall a of every class on the public set."""
        return {"params": params, "a": self._recall(task, params)}

    def broadcast(self, server: ServerTree) -> Shared:
        """Send the weights and a."""
        return {"params": server["params"], "a": server["a"]}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average, and compute the recall of the new global model."""
        params = super().aggregate(task, server, uploads, cohort)["params"]
        return {"params": params, "a": self._recall(task, params)}

    def _recall(self, task: Task, params: Params) -> Tensor:
        return credibility(task, params, require_public(task, self.name)).diagonal().clone()
