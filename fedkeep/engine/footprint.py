"""Footprint of a method: what it moves, stores and discloses, measured in one round that is actually run.

Those of the methods of this package are stored in footprints.json. To measure them again and write the file:

    python -m fedkeep.engine.footprint
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from fedkeep import methods, models, tree
from fedkeep.data.dataset import from_arrays
from fedkeep.engine.settings import Settings
from fedkeep.engine.simulation import Simulation
from fedkeep.errors import MethodError
from fedkeep.method import FedAvg


@dataclass(frozen=True)
class Footprint:
    """Sizes are in models: 1.0 is as many bytes as the weights."""

    down: float  # to each client in each round
    up: float  # from each client in each round
    state: float  # kept by each client between its visits
    sends: tuple[str, ...]  # names of what goes down
    uploads: tuple[str, ...]  # names of what goes up: all that the server learns of a client
    keeps: tuple[str, ...]  # names of what a client keeps
    public: str  # the public set that the server needs: "no", "unlabelled" or "labelled"
    teacher: bool  # whether local training also evaluates a model that it does not train
    min_classes: int  # the least number of classes with which it trains


STORED = Path(__file__).with_name("footprints.json")


def default_footprint(cls: type[FedAvg]) -> Footprint:
    """Return the footprint of a method with its defaults: stored for those of this package, measured for others."""
    stored = _stored().get(cls.name) if methods.is_built_in(cls) else None
    return footprint(cls()) if stored is None else stored


@functools.cache
def _stored() -> dict[str, Footprint]:
    def from_json(entry: dict[str, Any]) -> Footprint:
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()}
        return Footprint(**values)

    return {name: from_json(entry) for name, entry in json.loads(STORED.read_text()).items()}


def footprint(method: FedAvg) -> Footprint:
    """Train one round of a small problem and measure what was moved."""
    simulation, public = _small_simulation(method)
    result = simulation.train_round(keep_models=True)
    upload, client = (tree.take(result.clients[key], 0) for key in ("upload", "client"))
    model, sent = tree.nbytes(simulation.params), simulation.job(0, 1).sent
    return Footprint(
        down=(tree.nbytes(result.shared) + tree.nbytes(sent)) / model,
        up=tree.nbytes(upload) / model,
        state=tree.nbytes(client) / model,
        sends=(*result.shared, *sent),
        uploads=tuple(upload),
        keeps=tuple(client),
        public=public,
        teacher=method.uses("annotate"),
        min_classes=3 if _refuses_two_classes(method) else 2,
    )


def _refuses_two_classes(method: FedAvg) -> bool:
    """Return whether the method raises an error about the number of classes when there are two."""
    try:
        _small_simulation(method, n_classes=2)
    except MethodError as error:
        return error.key == "n_classes"
    return False


def _small_simulation(method: FedAvg, n_classes: int = 3) -> tuple[Simulation, str]:
    """Return a simulation of a few clients, with a model as large as ResNet-8 and as many features, and the public set.

    Which public set the method needs is found by trial: first without examples, then without their labels.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 16)).astype(np.float32), np.arange(90) % n_classes
    data = from_arrays(x, y, x, y)
    clients = np.array_split(np.arange(30), 6 if method.uses("broadcast_to") else 2)  # others' models may be sent
    settings = Settings(rounds=1, participation=2, epochs=1, engine="loop", device="cpu")
    model = models.build("mlp", (16,), n_classes, hidden=(1024, 64))
    try:
        return Simulation(method, model, data, clients, settings), "no"
    except MethodError as error:
        if error.key == "n_classes":
            raise
    data = data.with_public(8)
    simulation = Simulation(method, model, data, clients, settings)
    public = simulation.task.public
    assert public is not None
    simulation.task.public = replace(public, y=cast(Tensor, None), y_val=cast(Tensor, None))
    try:
        simulation.state.server = method.init_server(simulation.task, simulation.task.init)
        simulation.step()
        needs = "unlabelled"
    except (TypeError, AttributeError, MethodError):
        needs = "labelled"
    return Simulation(method, model, data, clients, settings), needs


def write_stored() -> None:
    """Measure every method of this package and write `STORED`, a line per method."""
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(footprint(cls())))}" for name, cls in methods.REGISTRY.items()]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write_stored()
