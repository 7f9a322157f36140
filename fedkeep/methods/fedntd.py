"""FedNTD. Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022 (arXiv:2106.03097), eq. 10-11 and algorithm 1; ablations: eq. 17-18 (table 12), appendix L (table 14).

Choices and deviations: docs/methods/fedntd.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedkeep.errors import MethodError
from fedkeep.losses import kl, masked_mean, mse, not_true, not_true_kl
from fedkeep.method import Batch, FedAvg, Note, Params, ServerTree, Visit, hyper
from fedkeep.task import Task


@dataclass(frozen=True)
class FedNTD(FedAvg):
    """FedNTD: distil the global model into local training, over all classes but the true one."""

    name: ClassVar[str] = "fedntd"
    paper: ClassVar[str] = "Lee et al., NeurIPS 2022"
    beta: float = hyper(1.0, "weight of not-true distillation", search=(0.1, 10.0), low=0, fedavg_at=0.0,
                        test_value=0.3,
                        warning='with distance="mse" keep beta small: 0.3 fails in the paper\'s table 14')  # fmt: skip
    tau: float = hyper(1.0, "temperature of both softmaxes", search=(1.0, 4.0), above=0, test_value=3.0)
    lam: float = hyper(1.0, "from distillation over all classes (0) to not-true distillation (1)", low=0, high=1,
                       test_value=0.0)  # fmt: skip
    distance: str = hyper("kl", "between logits: KL divergence or MSE", choices=("kl", "mse"), test_value="mse")

    def annotate(self, visit: Visit, x: Any, y: Tensor) -> Note:
        """Note the global model's logits z_g."""
        return {"z_g": visit.task.apply(visit.shared["params"], x)}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of CE(z, y) + beta tau^2 KL(q_g || q_l), the softmaxes over the not-true classes."""
        z, y, z_g = visit.task.apply(params, batch["x"], train=True), batch["y"], batch["note"]["z_g"]
        if self.distance == "kl":
            distilled = not_true_kl(z, z_g, y, self.tau)
        else:
            distilled = self.distance_to_teacher(not_true(z, y), not_true(z_g, y))
        if self.lam < 1:
            distilled = self.lam * distilled + (1 - self.lam) * self.distance_to_teacher(z, z_g)
        return masked_mean(visit.task.criterion(z, y) + self.beta * distilled, batch["mask"])

    def distance_to_teacher(self, z: Tensor, z_g: Tensor) -> Tensor:
        """Return the distance between these logits and the global model's, [B]."""
        return kl(z, z_g, self.tau) if self.distance == "kl" else mse(z, z_g)

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Raise for two classes: a softmax over one not-true class teaches nothing."""
        if task.n_classes < 3 and self.beta and self.lam and self.distance == "kl":
            raise MethodError(
                f"fedntd needs at least three classes, not {task.n_classes}: with two it equals FedAvg",
                key="n_classes",
                value=task.n_classes,
            )
        return super().init_server(task, params)
