"""Checks for a method of your own: does it keep the contract, so that every runtime gives the same result?

>>> from fedkeep.methods import FedNTD
>>> check_method(FedNTD())
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fedkeep import models, tree
from fedkeep.data.dataset import Dataset, from_arrays
from fedkeep.engine.loop import Loop
from fedkeep.engine.settings import Settings
from fedkeep.engine.simulation import Simulation
from fedkeep.errors import MethodError
from fedkeep.method import FedAvg
from fedkeep.models import Network
from fedkeep.tree import Tree

TOLERANCE = 1e-11


def check_method(method: FedAvg) -> None:
    """Run three small rounds in every runtime in float64, and raise MethodError at the first rule that is broken.

    Checked: stacked gives what the loop gives (no padding used, nothing random, no shapes that depend on data); sending
    every tree through bytes changes nothing; no hook writes into what it was given; trees keep their structure; every
    hyperparameter that says how it is tested moves the weights, and at its neutral value the method is FedAvg.
    """
    loop = _run(method, "loop")
    try:
        stacked = _run(method, "stacked")
    except RuntimeError as error:
        raise MethodError(f"{method.name}: it cannot be stacked: {str(error).splitlines()[0]}") from error
    _same(method, "stacked gives other weights than the loop", loop.server, stacked.server)
    wired = _simulation(method, "loop")
    wired.engine = Loop(wired.local, wired.x, wired.y, wire=True)
    wired.run()
    _same(method, "trees sent through bytes give other weights", loop.server, wired.server, exact=True)
    _same(method, "a second run gives other weights", loop.server, _run(method, "loop").server, exact=True)
    _check_purity(method)
    for name, known in method.hyperparameters().items():
        if known.neutral is not None:
            neutral = _run(dataclasses.replace(method, **{name: known.neutral}), "loop")
            _same(
                method, f"at {name} = {known.neutral} it is not FedAvg", _run(FedAvg(), "loop").params, neutral.params
            )
        if known.other is not None:
            base = dataclasses.replace(method, **known.within)
            moved = dataclasses.replace(base, **{name: known.other})
            if _gap(_run(base, "loop").params, _run(moved, "loop").params) < 1e-9:
                raise MethodError(f"{method.name}: {name} = {known.other!r} changes nothing: is it used?")


def _check_purity(method: FedAvg) -> None:
    simulation = _simulation(method, "loop")
    shared = method.broadcast(simulation.server)
    jobs = [simulation._job(k, 1, shared) for k in range(3)]
    given = {"server": simulation.server, "shared": shared, "clients": {str(j.id): j.client for j in jobs}}
    before = tree.map(lambda t: t.clone(), given)
    simulation.engine.train(shared, jobs, lr=0.05)
    _same(method, "a client hook wrote into what it was given", before, given, exact=True)
    simulation.step()
    if _shapes(simulation.server) != _shapes(before["server"]):
        raise MethodError(f"{method.name}: the server's tree changed its structure, shapes or types in a round")


def _run(method: FedAvg, engine: str) -> Simulation:
    simulation = _simulation(method, engine)
    simulation.run()
    return simulation


def _simulation(method: FedAvg, engine: str) -> Simulation:
    model, data, clients, settings = small_problem()
    return Simulation(method, model, data, clients, Settings(**{**settings, "engine": engine}))


def small_problem() -> tuple[Network, Dataset, list[np.ndarray], dict[str, Any]]:
    """Make the problem on which every runtime must agree: model, data, clients and settings.

    Six clients of unequal size, sorted by class, one smaller than a batch; a public set; float64.
    """
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
    return models.build("mlp", (1, 4, 4), 4, seed=3), data, clients, settings


def _shapes(value: Tree) -> list[Any]:
    return [(path, leaf.shape, leaf.dtype) for path, leaf in tree.items(value)]


def _gap(a: Tree, b: Tree) -> float:
    gaps = tree.leaves(tree.map(lambda x, y: float((x - y).abs().max() / x.abs().max().clamp(min=1e-30)), a, b))
    return max(float(gap) for gap in gaps)


def _same(method: FedAvg, broken: str, a: Tree, b: Tree, exact: bool = False) -> None:
    try:
        gap = _gap(a, b)
    except (KeyError, RuntimeError) as error:
        raise MethodError(f"{method.name}: {broken} ({error})") from error
    if not gap <= (0.0 if exact else TOLERANCE):
        raise MethodError(f"{method.name}: {broken} (relative difference {gap:.2g})")
