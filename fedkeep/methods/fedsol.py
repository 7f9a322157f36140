"""FedSOL. Lee et al., "FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated Learning",
CVPR 2024 (arXiv:2308.12532).

Choices and deviations: docs/methods/fedsol.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedkeep import tree
from fedkeep.losses import kl, masked_mean
from fedkeep.method import Batch, FedAvg, Grads, Note, Params, Visit, hyper


@dataclass(frozen=True)
class FedSOL(FedAvg):
    """FedSOL: the local gradient is taken where the client's model has moved away from the global model's outputs."""

    name: ClassVar[str] = "fedsol"
    paper: ClassVar[str] = "Lee et al., CVPR 2024"
    passes: ClassVar[tuple[str, ...]] = ("proximal", "loss")
    rho: float = hyper(1.0, "length of the perturbation", search=(0.1, 5.0), low=0, fedavg_at=0.0, test_value=3.0)
    tau: float = hyper(3.0, "temperature of both softmaxes", above=0, test_value=1.0)
    adaptive: bool = hyper(True, "perturb a weight in proportion to its distance from the global one",
                           choices=(True, False), test_value=False)  # fmt: skip

    def annotate(self, visit: Visit, x: Any, y: Tensor) -> Note:
        """Note the global model's logits z_g."""
        return {"z_g": visit.task.apply(visit.shared["params"], x)}

    def proximal(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of KL(softmax(z_g / tau) || softmax(z / tau)), up to a factor that the norm removes."""
        z = visit.task.apply(params, batch["x"], train=True)
        return masked_mean(kl(z, batch["note"]["z_g"], self.tau), batch["mask"])

    def gradient_point(self, visit: Visit, params: Params, grads: Mapping[str, Grads]) -> Params:
        """Return w + rho s * g_p / ||g_p||; s = |w - w_g|, each column of a layer at length 1, or s = 1."""
        g_p, w_g = grads["proximal"], visit.shared["params"]
        scale = self.rho / (tree.dot(g_p, g_p).sqrt() + 1e-12)
        if self.adaptive:
            return tree.map(lambda w, g, w_g: w + scale * _share(w - w_g) * g, params, g_p, w_g)
        moved = tree.squared_distance(params, w_g) > 0  # at w_g itself, g_p is nothing but rounding
        return tree.map(lambda w, g: w + scale * moved * g, params, g_p)


def _share(distance: Tensor) -> Tensor:
    """Return |w - w_g|, divided by its norm along the first axis."""
    return F.normalize(distance.abs(), dim=0)
