"""FedSAM and FedASAM. Caldarola et al., "Improving Generalization in Federated Learning by Seeking Flat Minima", ECCV
2022 (arXiv:2203.11834); Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022.

Choices and deviations: docs/methods/fedsam.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep import tree
from fedkeep.method import Batch, FedAvg, Grads, Params, Visit, hyper
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedSAM(FedAvg):
    """FedSAM: every local step uses the gradient at the worst point near the weights."""

    name: ClassVar[str] = "fedsam"
    paper: ClassVar[str] = "Caldarola et al., ECCV 2022"
    passes: ClassVar[tuple[str, ...]] = ("ascent", "loss")
    rho: float = hyper(0.1, "radius of the neighbourhood", search=(0.01, 1.0), low=0, fedavg_at=0.0, test_value=0.5)
    adaptive: bool = hyper(False, "ASAM: a neighbourhood in proportion to the weights", choices=(False, True),
                           test_value=True)  # fmt: skip
    eta: float = hyper(0.2, "added to the size of a weight by ASAM", low=0, test_value=1.0,
                       only_with={"adaptive": True})  # fmt: skip

    def ascent(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the same loss, at the weights."""
        return self.loss(visit, params, batch)

    def gradient_point(self, visit: Visit, params: Params, grads: Mapping[str, Grads]) -> Params:
        """Return w + rho g / ||g||; with ASAM w + rho T^2 g / ||T g||, T = |w| + eta."""
        g = grads["ascent"]
        if not self.adaptive:
            return _ascend(params, g, tree.dot(g, g), self.rho)
        size = {name: w.abs() + self.eta if "weight" in name else w.new_ones(()) for name, w in params.items()}
        scaled = tree.map(lambda t, g: t * g, size, g)
        return _ascend(params, tree.map(lambda t, s: t * s, size, scaled), tree.dot(scaled, scaled), self.rho)


def _ascend(params: Params, direction: Tree, squared_norm: Tensor, rho: float) -> Params:
    scale = rho / (squared_norm.sqrt() + 1e-12)
    return tree.map(lambda w, d: w + scale * d, params, direction)
