"""FedLMD. Lu et al., "Federated Learning with Label-Masking Distillation", ACM Multimedia 2023 (arXiv:2409.13136);
with `teacher="none"` its variant FedLMD-Tf.

Choices and deviations: docs/methods/fedlmd.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep.errors import MethodError
from fedkeep.losses import masked_kl, masked_mean
from fedkeep.method import Batch, FedAvg, Note, Params, ServerTree, Visit, hyper
from fedkeep.task import Task


@dataclass(frozen=True)
class FedLMD(FedAvg):
    """FedLMD: distil the global model's probabilities of the classes of which the client has few examples."""

    name: ClassVar[str] = "fedlmd"
    paper: ClassVar[str] = "Lu et al., ACM MM 2023"
    beta: float = hyper(1.0, "weight of distillation", search=(0.1, 10.0), low=0, fedavg_at=0.0, test_value=0.3)
    tau: float = hyper(1.0, "temperature of both softmaxes", search=(1.0, 4.0), above=0, test_value=3.0)
    teacher: str = hyper("global", "the global model, or none: equal probabilities (FedLMD-Tf)",
                         choices=("global", "none"), test_value="none")  # fmt: skip

    def annotate(self, visit: Visit, x: Any, y: Tensor) -> Note:
        """Note the global model's logits z_g, if it is the teacher."""
        return {"z_g": visit.task.apply(visit.shared["params"], x)} if self.teacher == "global" else {}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of CE(z, y) + beta tau^2 KL(p_T over the minority classes but y || q over all but y)."""
        z, y, counts = visit.task.apply(params, batch["x"], train=True), batch["y"], visit.facts["label_counts"]
        z_g = batch["note"]["z_g"] if self.teacher == "global" else torch.zeros_like(z)
        others = torch.arange(visit.task.n_classes, device=y.device) != y.unsqueeze(-1)
        minority = counts * visit.task.n_classes <= counts.sum()  # at most the mean, without the rounding of a mean
        distilled = masked_kl(z, z_g, others, others & minority, self.tau)
        return masked_mean(visit.task.criterion(z, y) + self.beta * distilled, batch["mask"])

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Raise for two classes: a softmax over one not-true class teaches nothing."""
        if task.n_classes < 3 and self.beta:
            raise MethodError(
                f"fedlmd needs at least three classes, not {task.n_classes}: with two it equals FedAvg",
                key="n_classes",
                value=task.n_classes,
            )
        return super().init_server(task, params)
