"""FedSSD. He et al., "Learning Critically: Selective Self Distillation in Federated Learning on Non-IID Data",
IEEE Transactions on Big Data 2022, eq. 2-6 and algorithm 1.

Choices and deviations: docs/methods/fedssd.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedkeep.losses import credibility_weights, masked_mean
from fedkeep.method import Batch, Cohort, FedAvg, Note, Params, ServerTree, Shared, Visit, hyper
from fedkeep.server_training import credibility, require_public
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedSSD(FedAvg):
    """FedSSD: distil the global model's logits, weighted by its reliability per class and per example."""

    name: ClassVar[str] = "fedssd"
    paper: ClassVar[str] = "He et al., IEEE TBD 2022"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    M_max: float = hyper(0.1, "upper bound of the channels' weights", search=(0.01, 1.0), low=0, fedavg_at=0.0,
                         test_value=0.3,
                         warning="made for learning rates of about 0.01; with 0.1 and momentum 0.9 training can "
                                 "fail from 0.7 on")  # fmt: skip
    form: str = hyper("outside", "where M stands in eq. 3: outside the square, as a coefficient, or inside, as printed",
                      choices=("outside", "inside"), before="inside", test_value="inside")  # fmt: skip
    reduce: str = hyper("sum", "over the channels: their sum, as printed, or their mean", choices=("sum", "mean"),
                        test_value="mean")  # fmt: skip

    def annotate(self, visit: Visit, x: Any, y: Tensor) -> Note:
        """Note the global model's logits z_g and the weights M(x) of its channels (eq. 4)."""
        z_g = visit.task.apply(visit.shared["params"], x)
        p_true = z_g.softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return {"z_g": z_g, "M": credibility_weights(visit.shared["A"], p_true, self.M_max)}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of CE(z, y) + ||M * z_g - M * z||^2 (eq. 3, 5, 6), or of another reading of eq. 3."""
        z, note = visit.task.apply(params, batch["x"], train=True), batch["note"]
        M, gap = note["M"], note["z_g"] - z
        squared = (M * gap) ** 2 if self.form == "inside" else M * gap**2
        distilled = squared.sum(-1) if self.reduce == "sum" else squared.mean(-1)
        return masked_mean(visit.task.criterion(z, batch["y"]) + distilled, batch["mask"])

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Compute A (eq. 2) of w_0 on the public set."""
        return {"params": params, "A": credibility(task, params, require_public(task, self.name))}

    def broadcast(self, server: ServerTree) -> Shared:
        """Send the weights and A."""
        return {"params": server["params"], "A": server["A"]}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average, and compute A of the new global model."""
        params = super().aggregate(task, server, uploads, cohort)["params"]
        return {"params": params, "A": credibility(task, params, require_public(task, self.name))}
