"""Federation: everything a run is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from fedkeep import losses
from fedkeep.data.dataset import Dataset
from fedkeep.data.partition import Partition
from fedkeep.engine.settings import Settings
from fedkeep.engine.user_metrics import Metrics
from fedkeep.method import FedAvg


@dataclass(frozen=True, repr=False)
class Federation:
    """Everything a run is built from."""

    method: FedAvg
    model: nn.Module
    data: Dataset
    clients: Partition
    settings: Settings
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy
    metrics: Metrics = None  # the user's own
    model_name: str | None = None  # of `fedkeep.models`, if the model was given by it

    def __repr__(self) -> str:
        model = type(self.model).__name__
        return f"<Federation: {self.method.name} trains {model} on {self.data.name}, {len(self.clients)} clients>"
