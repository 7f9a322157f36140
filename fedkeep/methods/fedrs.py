"""FedRS. Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data",
KDD 2021.

Choices and deviations: docs/methods/fedrs.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep.losses import masked_mean
from fedkeep.method import Batch, FedAvg, Local, Params, Visit, hyper


@dataclass(frozen=True)
class FedRS(FedAvg):
    """FedRS: scale down the logits of the classes that the client lacks, so that they are pushed down less."""

    name: ClassVar[str] = "fedrs"
    paper: ClassVar[str] = "Li and Zhan, KDD 2021"
    alpha: float = hyper(0.5, "factor of the logits of missing classes",
                         search=(0.3, 0.95), low=0, high=1, fedavg_at=1.0, test_value=0.1)  # fmt: skip
    form: str = hyper("printed", "factor of the classes a client has: 1 (printed), or between alpha and 1 by their "
                      "share of its examples (released)", choices=("printed", "released"),
                      test_value="released")  # fmt: skip

    def prepare(self, visit: Visit) -> Local:
        """Compute the factor of every logit."""
        counts = visit.facts["label_counts"]
        share = counts / counts.max() if self.form == "released" else (counts > 0).to(counts.dtype)
        return {"factor": self.alpha + (1 - self.alpha) * share}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of CE(factor * z, y)."""
        z = visit.task.apply(params, batch["x"], train=True)
        return masked_mean(visit.task.criterion(visit.local["factor"] * z, batch["y"]), batch["mask"])
