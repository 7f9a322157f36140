"""FedDecorr. Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
Learning", ICLR 2023 (arXiv:2210.00226).

Choices and deviations: docs/methods/feddecorr.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedkeep.losses import masked_mean
from fedkeep.method import Batch, FedAvg, Params, Visit, hyper

_EPSILON = 1e-8  # added to the variances, as in the released code: a constant feature is correlated with none


@dataclass(frozen=True)
class FedDecorr(FedAvg):
    """FedDecorr: penalise correlations between features, so that they do not collapse into few dimensions."""

    name: ClassVar[str] = "feddecorr"
    paper: ClassVar[str] = "Shi et al., ICLR 2023"
    beta: float = hyper(0.1, "weight of the correlations", search=(0.01, 1.0), low=0, fedavg_at=0.0, test_value=1.0)
    form: str = hyper("released", "the penalty of the released code, or of the paper", choices=("released", "printed"),
                      test_value="printed", test_with={"beta": 1.0})  # fmt: skip

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return mean CE + beta times the mean of squared correlations between features, times about B (released)."""
        h, z = visit.task.outputs(params, batch["x"], train=True)
        correlated = self.penalty(h.flatten(1), batch["mask"])
        return masked_mean(visit.task.criterion(z, batch["y"]), batch["mask"]) + self.beta * correlated

    def penalty(self, h: Tensor, mask: Tensor) -> Tensor:
        """Return the penalty of features [B, d]; only the real examples of the batch count."""
        n, real, d = mask.sum(), mask.unsqueeze(-1), h.shape[-1]
        freedom = (n - 1).clamp(min=1)
        h = torch.where(real, h, 0)
        h = torch.where(real, h - h.sum(0) / n.clamp(min=1), 0)
        h = h / (h.square().sum(0) / freedom + _EPSILON).sqrt()
        products = (h.mT @ h).square()  # of correlations, times (n - 1)^2
        between = products.sum() - products.diagonal().sum()
        if self.form == "printed":
            return between / freedom**2 / d**2
        return between / max(d * (d - 1), 1) / n.clamp(min=1)
