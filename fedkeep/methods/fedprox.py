"""FedProx. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020 (arXiv:1812.06127), eq. 2.

Choices and deviations: docs/methods/fedprox.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep import tree
from fedkeep.method import Batch, FedAvg, Params, Visit, hyper


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedProx: keep every client near the global weights with the penalty mu/2 ||w - w_g||^2."""

    name: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "Li et al., MLSys 2020"
    mu: float = hyper(0.1, "weight of the proximal term", search=(0.001, 1.0), low=0, fedavg_at=0.0, test_value=1.0)

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return mean CE + mu/2 ||w - w_g||^2."""
        distance = tree.squared_distance(params, visit.shared["params"])
        return super().loss(visit, params, batch) + self.mu / 2 * distance
