"""What several test files share: one small problem on which every runtime must agree."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import fedkeep as fk
from fedkeep import tree
from fedkeep.engine.loop import Loop
from fedkeep.testing import small_problem

torch.set_num_threads(1)
collect_ignore = ["existing_app"]  # an app for a test to change, not tests


@dataclasses.dataclass(frozen=True)
class Problem:
    """Six clients of unequal size, one of one class only, one smaller than a batch; float64."""

    data: fk.data.Dataset
    clients: list[np.ndarray]
    model: torch.nn.Module
    settings: dict

    def simulation(self, method: fk.methods.FedAvg, wire: bool = False, **changes) -> fk.Simulation:
        sim = fk.Simulation(method, self.model, self.data, self.clients, fk.Settings(**{**self.settings, **changes}))
        if wire:
            sim.engine = Loop(sim.local, sim.x, sim.y, wire=True)
        return sim

    def run(self, method: fk.methods.FedAvg, **changes) -> fk.Simulation:
        sim = self.simulation(method, **changes)
        sim.run()
        return sim


def make_problem(**changes) -> Problem:
    model, data, clients, settings = small_problem()
    return Problem(data, clients, model, {**settings, **changes})


@pytest.fixture(scope="session")
def problem() -> Problem:
    return make_problem()


def gap(a: tree.Tree, b: tree.Tree) -> float:
    """The largest relative difference of two trees' leaves."""
    worst = 0.0
    for (path, x), (other, y) in zip(tree.items(a), tree.items(b), strict=True):
        assert path == other
        assert x.shape == y.shape, path
        scale = max(float(x.abs().max()) if x.numel() else 0.0, 1e-30)
        worst = max(worst, float((x - y).abs().max()) / scale if x.numel() else 0.0)
    return worst


def same(a: tree.Tree, b: tree.Tree) -> bool:
    """Whether two trees are equal bit for bit."""
    pairs = zip(tree.items(a), tree.items(b), strict=True)
    return all(path == other and torch.equal(x, y) for (path, x), (other, y) in pairs)
