"""A network with BatchNorm, and clients of unequal sizes, so that the batches of the stacked engine are padded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.problems import Problem, make_problem


class Net(nn.Module):
    """Two kinds of BatchNorm; with features, for MOON, and a last stage, for FedAlign."""

    last_stage = ("conv", "first")

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv, self.first = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4, **options)
        self.dense, self.second = nn.Linear(4 * 16, 6), nn.BatchNorm1d(6, **{**options, "affine": False})
        self.classifier = nn.Linear(6, 4)

    def features(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(self.conv(x))).flatten(1)
        return F.relu(self.second(self.dense(h)))

    def head(self, h: Tensor) -> Tensor:
        return self.classifier(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def with_unequal_clients(problem: Problem, model: nn.Module) -> Problem:
    """Return the problem with another model, and clients of 11, 6, 3, 8 and all other examples."""
    pooled = np.concatenate([np.asarray(own) for own in problem.clients])
    return dataclasses.replace(problem, model=model, clients=np.split(pooled, np.cumsum([11, 6, 3, 8])))


def problem(model: nn.Module | None = None, **changes: Any) -> Problem:
    """Return a problem with padded batches, down to one example, by default for `Net`."""
    small = make_problem(batch_size=5, rounds=2, epochs=2, participation=1.0, **changes)
    torch.manual_seed(0)
    return with_unequal_clients(small, model or Net(track_running_stats=False))
