"""Resuming a run from its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedkeep import losses, methods
from fedkeep.data import Dataset, Partition
from fedkeep.engine import distributed
from fedkeep.engine.federation import Federation
from fedkeep.engine.settings import Settings
from fedkeep.engine.setup import require_dataset
from fedkeep.engine.simulate import continue_run
from fedkeep.engine.simulation import Callback
from fedkeep.errors import ConfigError, FedkeepError, RunError
from fedkeep.experiments.build import build, build_model
from fedkeep.method import FedAvg
from fedkeep.runs.files import ROUNDS
from fedkeep.runs.history import History
from fedkeep.runs.reading import load_run, read_experiment, saved_round

if TYPE_CHECKING:
    from fedkeep.experiments.experiment import Experiment


def resume(
    run_dir: str | Path,
    *,
    method: FedAvg | None = None,
    model: nn.Module | None = None,
    data: Dataset | None = None,
    clients: Partition | Iterable[Any] | None = None,
    callbacks: Iterable[Callback] = (),
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
) -> History:
    """Resume an interrupted run. Its final weights are bit for bit those of an uninterrupted run.

    A run started from an experiment file needs only its folder. A run started with `simulate` needs the same model,
    data and clients again, because a file cannot hold them; and the method and the criterion, if they are your own.
    """
    path = Path(run_dir)
    federation = federation_from_arguments(read_experiment(path), method, model, data, clients, criterion)
    if federation is None:
        return resume_from_file(path, callbacks)
    return continue_run(path, federation, callbacks)


def federation_from_arguments(
    about: Mapping[str, Any],
    method: FedAvg | None,
    model: nn.Module | None,
    data: Dataset | None,
    clients: Partition | Iterable[Any] | None,
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
) -> Federation | None:
    """Build a run's federation from its experiment file (`about`) and the arguments that a file cannot hold.

    Without model, data and clients the result is None: the experiment file must then define everything.
    """
    if model is None and data is None and clients is None:
        return None
    if model is None or data is None or clients is None:
        missing = "model" if model is None else "data" if data is None else "clients"
        raise RunError(f"{missing} is missing: pass all three of model, data and clients, or none of them", key=missing)
    clients = Partition.of(clients, len(require_dataset(data).y_train))
    settings = Settings.of({**about["train"], "seed": about["seed"]})
    return Federation(method or methods.make(about["method"]), model, data, clients, settings, criterion)


def resume_from_file(path: Path, callbacks: Iterable[Callback] = ()) -> History:
    """Resume the run in a folder, using only its experiment file."""
    from fedkeep.experiments.experiment import Experiment

    about = read_experiment(path)
    if about.get("made_by", {}).get("engine") == "flower":
        raise ConfigError(
            f"{path} is a run of a Flower app: start the app again (flwr run) with run-dir set to this folder",
            key="run_dir",
            value=str(path),
        )
    try:
        experiment = Experiment.from_dict(about)
    except FedkeepError as error:
        raise error.converted(
            ConfigError,
            f"{path} cannot be resumed from its file alone ({error}); resume it from Python: "
            "fedkeep.resume(run_dir, method=..., model=..., data=..., clients=...)",
        ) from error
    return resume_experiment(experiment, path, callbacks)


def resume_experiment(experiment: Experiment, path: Path, callbacks: Iterable[Callback] = ()) -> History:
    """Resume an experiment's run in a folder, or load it if it is finished."""
    if distributed.current_ranks().on_rank0(lambda: (saved_round(path) or 0) < experiment.train.rounds):
        return continue_run(path, build(experiment), callbacks)
    history = load_run(path)
    if not history.finished:
        raise RunError(
            f"{path} is finished, but {ROUNDS} is missing its last rounds; start the run again in a new folder",
            key=ROUNDS,
        )
    history.build = partial(build_model, experiment)
    return history
