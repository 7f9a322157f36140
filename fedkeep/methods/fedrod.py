"""The generic model of FedRoD. Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image
Classification", ICLR 2022 (arXiv:2107.00778): balanced softmax. The personal head is not part of it.

Choices and deviations: docs/methods/fedrod.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep.losses import keep_classes, masked_mean
from fedkeep.method import Batch, FedAvg, Local, Params, Visit, hyper


@dataclass(frozen=True)
class FedRoD(FedAvg):
    """FedRoD's generic model: balanced softmax, each class weighted by the client's number of its examples."""

    name: ClassVar[str] = "fedrod"
    paper: ClassVar[str] = "Chen and Chao, ICLR 2022"
    gamma: float = hyper(1.0, "exponent of the label counts", search=(0.3, 1.5), low=0, fedavg_at=0.0, test_value=0.3)

    def prepare(self, visit: Visit) -> Local:
        """Compute gamma log n_c; that of a missing class, -infinity, is left to the mask."""
        counts = visit.facts["label_counts"]
        return {"shift": self.gamma * counts.clamp(min=1).log(), "present": (counts > 0) | (self.gamma == 0)}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of -log(n_y^gamma e^{z_y} / sum_c n_c^gamma e^{z_c})."""
        z = visit.task.apply(params, batch["x"], train=True) + visit.local["shift"]
        return masked_mean(visit.task.criterion(keep_classes(z, visit.local["present"]), batch["y"]), batch["mask"])
