"""FedLC. Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022
(arXiv:2209.00189), eq. 7.

Choices and deviations: docs/methods/fedlc.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep.losses import keep_classes, masked_mean
from fedkeep.method import Batch, FedAvg, Local, Params, Visit, hyper


@dataclass(frozen=True)
class FedLC(FedAvg):
    """FedLC: lower each logit by tau n_c^(-1/4), so that rare classes need a larger margin; missing ones drop out."""

    name: ClassVar[str] = "fedlc"
    paper: ClassVar[str] = "Zhang et al., ICML 2022"
    tau: float = hyper(0.5, "strength of the calibration", search=(0.1, 2.0), above=0, test_value=3.0)

    def prepare(self, visit: Visit) -> Local:
        """Compute the margin of every class; that of a missing class, infinite, is left to the mask."""
        counts = visit.facts["label_counts"]
        return {"margin": self.tau * counts.clamp(min=1) ** -0.25, "present": counts > 0}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of CE(z - tau n^(-1/4), y), the softmax over the client's own classes."""
        z = visit.task.apply(params, batch["x"], train=True) - visit.local["margin"]
        return masked_mean(visit.task.criterion(keep_classes(z, visit.local["present"]), batch["y"]), batch["mask"])
