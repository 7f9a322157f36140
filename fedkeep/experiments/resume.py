"""Resuming a run from its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedkeep import losses, methods
from fedkeep._util.own_parts import trust as allow
from fedkeep.data import Dataset, Partition
from fedkeep.engine import distributed
from fedkeep.engine.extend import read_extended
from fedkeep.engine.federation import Federation
from fedkeep.engine.progress import with_progress
from fedkeep.engine.provenance import same_python
from fedkeep.engine.settings import Settings
from fedkeep.engine.setup import require_dataset
from fedkeep.engine.simulate import continue_run
from fedkeep.engine.simulation import Callback
from fedkeep.engine.user_metrics import Metrics
from fedkeep.errors import ConfigError, FedkeepError, RunError
from fedkeep.experiments import own_parts
from fedkeep.experiments.build import build, build_model
from fedkeep.method import FedAvg
from fedkeep.runs.checkpoints import newest_checkpoint, read_checkpoint
from fedkeep.runs.client_store import ClientStore
from fedkeep.runs.experiment_file import read_experiment, read_experiment_file, refuse_observed
from fedkeep.runs.federation_copy import with_own_files
from fedkeep.runs.files import ABANDONED, ENDED, is_there
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.history import History
from fedkeep.runs.reading import load_run, saved_round
from fedkeep.runs.round_logger import RoundLogger
from fedkeep.runs.server_state import global_params

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
    metrics: Metrics = None,
    from_round: int | None = None,
    trust: str | Iterable[str] = (),
    progress: bool | None = None,
    rounds: int | None = None,
) -> History:
    """Resume an interrupted run. Its final weights are bit for bit those of an uninterrupted run.

    A run started from an experiment file needs only its folder. A run started with `simulate` needs the same model,
    data and clients again, because a file cannot hold them; and the method, the criterion and the metrics, if they are
    your own.
    `from_round` goes back to the checkpoint of an earlier round and repeats the later ones. A run that a callback
    stopped is continued to its last round. Code of your own that the run folder names (`package.module:name`) is
    imported only if `trust` has its name, or its module. `rounds` extends the run, finished or not, to more rounds: its
    result is then that of a run with so many rounds from the start. `progress` is as in `simulate`.
    """
    path, callbacks = Path(run_dir), with_progress(callbacks, progress)
    allow(trust)
    about = with_own_files(read_extended(path, rounds), path)
    federation = federation_from_arguments(about, method, model, data, clients, criterion, metrics)
    if federation is None:
        return resume_from_file(path, callbacks, from_round, rounds)
    return continue_run(path, federation, callbacks, from_round)


def federation_from_arguments(
    about: Mapping[str, Any],
    method: FedAvg | None,
    model: nn.Module | None,
    data: Dataset | None,
    clients: Partition | Iterable[Any] | None,
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
    metrics: Metrics = None,
) -> Federation | None:
    """Build a run's federation from its experiment file (`about`) and the arguments that a file cannot hold.

    Without model, data and clients the result is None: the experiment file must then define everything.
    """
    if model is None and data is None and clients is None:
        return None
    if model is None or data is None or clients is None:
        missing = "model" if model is None else "data" if data is None else "clients"
        raise RunError(f"{missing} is missing: pass all three of model, data and clients, or none of them", key=missing)
    data = require_dataset(data)
    clients = Partition.of(clients, len(data.y_train))
    settings = Settings.of({**about["train"], "seed": about["seed"]})
    return Federation(method or methods.make(about["method"]), model, data, clients, settings, criterion, metrics)


def resume_from_file(
    path: Path, callbacks: Iterable[Callback] = (), from_round: int | None = None, rounds: int | None = None
) -> History:
    """Resume the run in a folder, using only its experiment file; `rounds` extends it to so many."""
    from fedkeep.experiments.experiment import Experiment

    about = read_extended(path, rounds)
    if about.get("made_by", {}).get("engine") == "flower":
        raise ConfigError(
            f"{path} is a run of a Flower app: start the app again (flwr run) with run-dir set to this folder",
            key="run_dir",
            value=str(path),
        )
    refuse_observed(path, about)
    try:
        experiment = Experiment.from_dict(about)
    except FedkeepError as error:
        raise error.converted(
            ConfigError,
            f"{path} cannot be resumed from its file alone ({error}); resume it from Python: "
            "fedkeep.resume(run_dir, method=..., model=..., data=..., clients=...), or simulate(..., resume=True)",
        ) from error
    return resume_experiment(experiment, path, callbacks, from_round)


def resume_experiment(
    experiment: Experiment, path: Path, callbacks: Iterable[Callback] = (), from_round: int | None = None
) -> History:
    """Resume an experiment's run in a folder, or load it if it reached its last round; its loggers write it then.

    A split and cohorts that were read from files are those that the run was started with: the folder has a copy.
    """
    experiment = _with_own_files(experiment, path)

    def is_complete() -> bool:
        return from_round is None and (saved_round(path) or 0) >= experiment.train.rounds

    complete, callbacks = distributed.current_ranks().on_rank0(is_complete), list(callbacks)
    if complete and not any(isinstance(callback, RoundLogger) for callback in callbacks):
        return load_finished(experiment, path)
    callbacks += own_parts.make_own_callbacks(experiment.callbacks)
    _require_same_code(experiment, path)
    return continue_run(path, build(experiment, with_metrics=True), callbacks, from_round, experiment.keep)


def load_finished(experiment: Experiment, path: Path) -> History:
    """Return the history of a run that has ended, with its weights and its model; raise if anything is damaged."""
    experiment = _with_own_files(experiment, path)
    distributed.current_ranks().on_rank0(lambda: _complete_end(path))
    history = load_run(path, weights=False)
    about = read_experiment_file(path)
    file = newest_checkpoint(path, about.run)
    assert file is not None
    saved = read_checkpoint(file, about)
    history.params, history.saved = global_params(saved.server), saved.round
    history.build = partial(build_model, experiment)
    return history


def _require_same_code(experiment: Experiment, path: Path) -> None:
    """Raise if the model's own code is not what the run was started with: its weights would mean something else.

    Other data is found by its contents, and callbacks do not change a result. Hashes of another version of Python are
    not compared.
    """
    made_by = read_experiment(path).get("made_by", {})
    started = made_by.get("code", {}).get("model")
    if started is None or not same_python(made_by):
        return
    if own_parts.code_hashes(experiment).get("model") != started:
        name = experiment.model["name"]
        raise ConfigError(
            f"model.name = {name!r}: its code has changed since {path} was started; restore it, or choose another "
            "folder",
            key="model.name",
            value=name,
        )


def _with_own_files(experiment: Experiment, path: Path) -> Experiment:
    return type(experiment).from_dict(with_own_files(experiment.to_dict(), path))


def _complete_end(path: Path) -> None:
    """Do what a process did not that was killed after its last checkpoint: delete old files, record the run's end."""
    complete = is_there(path / ENDED) and not is_there(path / ABANDONED)
    if complete or read_experiment_file(path).run is None:
        return
    with RunFolder.open(path) as folder:
        saved = folder.restore(ClientStore(folder.clients, run=folder.run))
        if saved is not None:
            folder.finish(saved.round, saved.header.ended or "finished")
