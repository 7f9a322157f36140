"""Running a federation from Python: to its end, or on from where it was interrupted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedkeep import losses
from fedkeep._util.text import did_you_mean
from fedkeep.data.dataset import Dataset
from fedkeep.data.partition import Partition
from fedkeep.engine import distributed, provenance
from fedkeep.engine.settings import Settings
from fedkeep.engine.simulation import Callback, Simulation
from fedkeep.errors import FedkeepError, RunError
from fedkeep.method import FedAvg
from fedkeep.runs.files import fingerprint
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.history import History
from fedkeep.runs.reading import read_experiment

Parts = tuple[FedAvg, nn.Module, Dataset, Partition | Iterable[Any], Settings]  # what a run is started from


def simulate(
    method: FedAvg | str,
    model: nn.Module | str,
    data: Dataset,
    clients: Partition | Iterable[Any],
    *,
    callbacks: Iterable[Callback] = (),
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
    run_dir: str | Path | None = None,
    checkpoint_every: int | None = None,
    **settings: Any,
) -> History:
    """Run a federation to its end and return what it leaves behind.

    `model` is any `nn.Module` from inputs to logits, or a name of `fedkeep.models`; `clients` a partition, or any
    iterable of index arrays; `criterion` the loss, one value per example. The settings are those of `Settings`. A
    callback is called after every round with the simulation and the round's record. With `run_dir` everything is
    written there, and `fedkeep.resume` goes on with a run that was interrupted: from a checkpoint after every so many
    rounds, or, if nothing is said, from as many as take about a twentieth of the time.
    """
    unknown = [name for name in settings if name not in Settings.__dataclass_fields__]
    if unknown:
        raise FedkeepError(f"unknown setting {unknown[0]!r}: {did_you_mean(unknown[0], Settings.__dataclass_fields__)}")
    simulation = Simulation(method, model, data, clients, Settings(**settings), callbacks, criterion)
    if run_dir is None:
        return simulation.run()
    return start(simulation, Path(run_dir), {"checkpoint_every": checkpoint_every})


def start(simulation: Simulation, path: Path, about: dict[str, Any]) -> History:
    """Run a simulation in a new folder, whose experiment file says `about` it and all else that can be said."""
    s = simulation
    made_by = provenance.made_by(s.engine.name, s.task, s.threads)
    whole = {
        **provenance.experiment_dict(s.method, s.settings, s.task, s.data.name, len(s.clients)),
        **about,
        "made_by": {**made_by, "ranks": s.ranks.size, **_fingerprints(s)},
    }
    return _in_folder(simulation, lambda: RunFolder.create(path, whole))


def continue_run(
    path: Path,
    given: Parts,
    callbacks: Iterable[Callback] = (),
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
) -> History:
    """Go on with the run in a folder, given the same method, model, data, clients and settings as at its start.

    The engine and the number of threads are those of the start, so that the outcome is the same to the last bit. With
    another number of processes it is the same to rounding.
    """
    made_by = distributed.current_ranks().on_rank0(lambda: read_experiment(path))["made_by"]
    simulation = restore_simulation(path, made_by, given, callbacks, criterion)
    return _in_folder(simulation, lambda: RunFolder.open(path))


def restore_simulation(
    path: Path,
    made_by: Mapping[str, Any],
    given: Parts,
    callbacks: Iterable[Callback] = (),
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
) -> Simulation:
    """Make a run's simulation anew, as it was at its start; parts that are not those of `made_by` are refused."""
    method, model, data, clients, settings = given
    settings = replace(settings, engine=made_by["engine"])
    simulation = Simulation(method, model, data, clients, settings, callbacks, criterion)
    for what, found in _fingerprints(simulation).items():
        if found != made_by[what]:
            raise RunError(f"{path} was started with another {what} than the one given now")
    if simulation.ranks.size == made_by.get("ranks", 1):
        simulation.threads = made_by["threads"]
    return simulation


def _in_folder(simulation: Simulation, make: Callable[[], RunFolder]) -> History:
    """Run in a folder, which rank 0 alone makes and keeps."""
    with ExitStack() as stack:
        simulation.ranks.on_rank0(lambda: simulation.attach(stack.enter_context(make())) and None)
        return simulation.run()


def _fingerprints(simulation: Simulation) -> dict[str, str]:
    data, clients, public = simulation.data, simulation.clients, simulation.data.public
    held = (public.x, public.y, public.x_val, public.y_val) if public else ()
    arrays = (data.x_train, data.y_train, data.x_test, data.y_test, data.mean, data.std, *held)
    return {
        "criterion": getattr(simulation.task.criterion, "__qualname__", repr(simulation.task.criterion)),
        "data": fingerprint(*(part for part in arrays if part is not None)),
        "split": fingerprint(clients.indices, clients.offsets),
        "model": provenance.model_fingerprint(simulation.task),
    }


def _with_settings(function: Callable[..., History]) -> inspect.Signature:
    """Write out `**settings`, so that help() shows every one with its default."""
    own = inspect.signature(function)
    stated = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(Settings)
    ]
    return own.replace(parameters=[*stated, *added])


simulate.__signature__ = _with_settings(simulate)  # type: ignore[attr-defined]
