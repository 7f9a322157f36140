"""What a method moves, keeps and discloses, read off the trees of one round that is actually run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from torch import Tensor

from fedkeep import models, tree
from fedkeep.data.dataset import from_arrays
from fedkeep.engine import Settings, Simulation
from fedkeep.errors import MethodError
from fedkeep.method import FedAvg


@dataclass(frozen=True)
class Footprint:
    """Sizes are in models: 1.0 is as many bytes as the weights."""

    down: float  # to each client, each round
    up: float  # from each client, each round
    state: float  # kept by each client between its visits
    sends: tuple[str, ...]  # what goes down
    uploads: tuple[str, ...]  # what goes up: all that the server can learn of a client
    keeps: tuple[str, ...]
    public: str  # what examples the server needs of its own: "no", "unlabelled" or "labelled"
    teacher: bool  # whether local training also runs a model it does not train


def footprint(method: FedAvg) -> Footprint:
    """Run one round of a small problem and look at what was moved."""
    simulation, public = _small(method)
    shared = method.broadcast(simulation.server)
    jobs = [simulation._job(k, 1, shared) for k in range(2)]
    trained = simulation.engine.train(shared, jobs, lr=0.01)
    upload, client = tree.take(trained.upload, 0), tree.take(trained.client, 0)
    model = tree.nbytes(simulation.params)
    return Footprint(
        down=tree.nbytes(shared) / model,
        up=tree.nbytes(upload) / model,
        state=tree.nbytes(client) / model,
        sends=tuple(shared),
        uploads=tuple(upload),
        keeps=tuple(client),
        public=public,
        teacher=method.uses("annotate"),
    )


def _small(method: FedAvg) -> tuple[Simulation, str]:
    """A problem of two clients, large enough that single numbers weigh next to nothing beside the model.

    What the server needs is found out by trying: without public examples, then without their labels.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 16)).astype(np.float32), np.arange(90) % 3
    data = from_arrays(x, y, x, y)
    clients = np.array_split(np.arange(30), 2)
    settings = Settings(rounds=1, participation=2, epochs=1, engine="loop", device="cpu")
    model = models.build("mlp", (16,), 3, hidden=(256,))
    try:
        return Simulation(method, model, data, clients, settings), "no"
    except MethodError:
        simulation = Simulation(method, model, data.with_public(8), clients, settings)
    public = simulation.task.public
    assert public is not None
    simulation.task.public = replace(public, y=cast(Tensor, None), y_val=cast(Tensor, None))
    try:
        simulation.server = method.init_server(simulation.task, simulation.task.init)
        simulation.step()
        needs = "unlabelled"
    except (TypeError, AttributeError, MethodError):
        needs = "labelled"
    simulation.task.public = public
    simulation.server = method.init_server(simulation.task, simulation.task.init)
    return simulation, needs
