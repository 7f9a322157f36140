"""A small federation on which every runtime must agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from fedkeep import models, tree
from fedkeep.data.dataset import Dataset, from_arrays
from fedkeep.engine.loop import Loop
from fedkeep.engine.settings import Settings
from fedkeep.engine.simulation import Simulation
from fedkeep.method import FedAvg
from fedkeep.tree import Tree


@dataclass(frozen=True)
class Problem:
    """Everything of a federation but the method."""

    model: nn.Module
    data: Dataset
    clients: list[np.ndarray]
    settings: dict[str, Any]
    _finished: dict[tuple[int, str], Simulation] = field(default_factory=dict, init=False, repr=False, compare=False)

    def simulation(self, method: FedAvg, *, wire: bool = False, **changes: Any) -> Simulation:
        """Return a simulation with these changes of the settings; with `wire`, all messages go through bytes."""
        settings = Settings(**{**self.settings, **changes})
        simulation = Simulation(method, self.model, self.data, self.clients, settings)
        if wire:
            simulation.engine = Loop(simulation.local, simulation.x, simulation.y, wire=True)
        return simulation

    def run(self, method: FedAvg, **changes: Any) -> Simulation:
        """Return a finished simulation with these changes of the settings."""
        simulation = self.simulation(method, **changes)
        simulation.run()
        return simulation

    def finished(self, method: FedAvg, **changes: Any) -> Simulation:
        """Return what `run` returns, trained only once for the same method object and settings; do not change it."""
        key = id(method), repr(Settings(**{**self.settings, **changes}))  # no other method can have this id: it is kept
        if key not in self._finished:
            self._finished[key] = self.run(method, **changes)
        return self._finished[key]


def small_problem(**changes: Any) -> Problem:
    """Return six clients of unequal size, sorted by class, one smaller than a batch; a public set; float64."""
    rng = np.random.default_rng(7)
    y = np.concatenate([np.arange(60) % 4, np.full(5, 2)])
    x = rng.normal(size=(65, 1, 4, 4)) + np.eye(4)[y][:, None, :, None]
    data = from_arrays(x[:55], y[:55], x[40:], y[40:], n_classes=4).with_public(2, validation=0.25)
    order = np.argsort(data.y_train.numpy(), kind="stable")
    clients = np.split(order, [3, 14, 20, 30, 41])
    settings = {
        "rounds": 3,
        "participation": 4,
        "epochs": 2,
        "batch_size": 4,
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 1e-3,
        "lr_decay": 0.9,
        "dtype": "float64",
        "engine": "loop",
        "device": "cpu",
        "seed": 5,
    }
    return Problem(models.build("mlp", (1, 4, 4), 4, seed=3), data, clients, {**settings, **changes})


def difference(a: Tree, b: Tree) -> float:
    """Return the largest relative difference between the leaves of two trees; infinite if their structure differs."""
    leaves_a, leaves_b = list(tree.items(a)), list(tree.items(b))
    if [(path, t.shape) for path, t in leaves_a] != [(path, t.shape) for path, t in leaves_b]:
        return float("inf")
    worst = 0.0
    for (_, x), (_, y) in zip(leaves_a, leaves_b, strict=True):
        if x.numel():
            x, y = x.double(), y.double()
            gap = float((x - y).abs().max()) / max(float(x.abs().max()), 1e-30)
            worst = max(worst, gap if gap == gap else float("inf"))
    return worst
