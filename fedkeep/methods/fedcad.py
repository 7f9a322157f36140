"""FedCAD, unverified. He et al., "Class-wise Adaptive Self Distillation for Heterogeneous Federated Learning",
FL-AAAI workshop 2022: the predecessor of FedSSD.

UNVERIFIED: its formula stands in none of the texts this was written from. FedSSD's paper says only that it "adaptively
controls the degree of self-distillation according to the category of training samples", and its own abstract that a
class-wise weight comes from the global model's performance on each class of an auxiliary data set. Made of that:

- L = CE + beta a[y] tau^2 KL(p_g || p), a[c] the global model's recall of class c on the public set's training part,
  0 for a class absent there, recomputed every round. beta = tau = 1 are choices too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedkeep.losses import kl, masked_mean
from fedkeep.method import Cohort, FedAvg, hyper
from fedkeep.server_training import credibility, require_public
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedCAD(FedAvg):
    """FedCAD (unverified): distil the global model, an example by as much as its class is recognised."""

    name: ClassVar[str] = "fedcad"
    paper: ClassVar[str] = "He et al., FL-AAAI 2022"
    beta: float = hyper(1.0, "weight of distillation", low=0, neutral=0.0, other=0.3)
    tau: float = hyper(1.0, "temperature of both softmaxes", above=0, other=3.0)

    def init_server(self, task: Task, params: Tree) -> Tree:
        """Look at w_0 on the public set: its recall a of every class."""
        return {"params": params, "a": self._recall(task, params)}

    def broadcast(self, server: Tree) -> Tree:
        """Send the weights and a."""
        return {"params": server["params"], "a": server["a"]}

    def annotate(self, task: Task, shared: Tree, local: Tree, x: Any, y: Tensor) -> Tree:
        """Note the global model's logits z_g and the weight a[y]."""
        return {"z_g": task.apply(shared["params"], x), "a": shared["a"][y]}

    def loss(self, task: Task, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tensor:
        """Return the mean of CE(z, y) + beta a[y] tau^2 KL(p_g || p)."""
        z, note = task.apply(params, batch["x"], train=True), batch["note"]
        distilled = self.beta * note["a"] * kl(z, note["z_g"], self.tau)
        return masked_mean(task.criterion(z, batch["y"]) + distilled, batch["mask"])

    def aggregate(self, task: Task, server: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """Average, and look at the new global model."""
        params = super().aggregate(task, server, uploads, cohort)["params"]
        return {"params": params, "a": self._recall(task, params)}

    def _recall(self, task: Task, params: Tree) -> Tensor:
        return credibility(task, params, require_public(task, self.name)).diagonal().clone()
