"""FedVLS. Guo et al., "Exploring Vacant Classes in Label-Skewed Federated Learning", AAAI 2025 (arXiv:2401.02329).

Choices and deviations: docs/methods/fedvls.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep.losses import keep_classes, masked_kl, masked_mean
from fedkeep.method import Batch, FedAvg, Local, Note, Params, Visit, hyper

_FLOOR = 1e-9  # of class shares, in the released code


@dataclass(frozen=True)
class FedVLS(FedAvg):
    """FedVLS: distil the global model over the classes that the client lacks, and suppress the logits of the others."""

    name: ClassVar[str] = "fedvls"
    paper: ClassVar[str] = "Guo et al., AAAI 2025"
    lam: float = hyper(0.1, "weight of vacant-class distillation", search=(0.01, 1.0), low=0, test_value=1.0)
    mu: float = hyper(0.005, "weight of logit suppression: 0.005 in the released code, 1 as printed",
                      search=(0.0005, 0.05), low=0,
                      test_value=1.0, warning="1 with form=\"printed\" can make training fail")  # fmt: skip
    form: str = hyper("released", "the loss of the released code, or of the paper", choices=("released", "printed"),
                      test_value="printed", test_with={"mu": 1.0})  # fmt: skip

    def prepare(self, visit: Visit) -> Local:
        """Compute the share p of every class and its log, and which classes are vacant."""
        share, vacant = visit.facts["label_counts"] / visit.facts["n"], visit.facts["label_counts"] == 0
        log_share = (share + _FLOOR if self.form == "released" else torch.where(vacant, 1, share)).log()
        return {"share": share, "log_share": log_share, "vacant": vacant}

    def annotate(self, visit: Visit, x: Any, y: Tensor) -> Note:
        """Note the global model's logits z_g."""
        return {"z_g": visit.task.apply(visit.shared["params"], x)}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return mean CE(z + log p, y) + lam mean KL(vacant classes) + mu sum_c p_c log mean exp(z_c [y != c])."""
        z, y, local = visit.task.apply(params, batch["x"], train=True), batch["y"], visit.local
        calibrated = z + local["log_share"]
        if self.form == "printed":
            calibrated = keep_classes(calibrated, ~local["vacant"])
        distilled = masked_kl(z, batch["note"]["z_g"], local["vacant"], local["vacant"])
        value = masked_mean(visit.task.criterion(calibrated, y) + self.lam * distilled, batch["mask"])
        return value + self.mu * self.suppression(visit, z, batch)

    def suppression(self, visit: Visit, z: Tensor, batch: Batch) -> Tensor:
        """Return sum_c p_c log mean exp(z_c [y != c]), the mean over the examples of the batch."""
        local, C = visit.local, visit.task.n_classes
        if self.form == "released":
            z = z - local["log_share"] - math.log(C)
        others = torch.arange(C, device=z.device) != batch["y"].unsqueeze(-1)
        logits = torch.where(batch["mask"].unsqueeze(-1), torch.where(others, z, 0), -1e4)
        log_mean: Tensor = logits.logsumexp(0) - batch["mask"].sum().clamp(min=1).log()
        suppressed: Tensor = (local["share"] * log_mean).sum()
        return suppressed
