"""One small problem on which every runtime must agree, and comparisons of trees."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

import fedkeep as fk
from fedkeep import tree
from fedkeep.engine.loop import Loop
from fedkeep.testing import small_problem


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


def three_clients() -> Problem:
    """Three clients of unequal size."""
    problem = make_problem(participation=3, rounds=3)
    clients = [np.concatenate([problem.clients[k], problem.clients[k + 3]][: 1 + (k > 0)]) for k in range(3)]
    return dataclasses.replace(problem, clients=clients)
