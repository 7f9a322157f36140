"""Resuming a run from its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedkeep import losses, methods
from fedkeep.data import Dataset, Partition
from fedkeep.engine.federation import Federation
from fedkeep.engine.settings import Settings
from fedkeep.engine.simulate import continue_run
from fedkeep.engine.simulation import Callback
from fedkeep.errors import ConfigError, DataError, FedkeepError, RunError
from fedkeep.method import FedAvg
from fedkeep.runs.history import History
from fedkeep.runs.reading import read_experiment


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
    """Go on with an interrupted run, to the same final weights, bit for bit, as if nothing had happened.

    A run started from an experiment file needs nothing more. One started with `simulate` needs the same model, data
    and clients again (and the method and the criterion, if they are your own): a file cannot hold them.
    """
    path = Path(run_dir)
    given = federation_from_arguments(read_experiment(path), method, model, data, clients, criterion)
    if given is None:
        return resume_from_file(path, callbacks)
    return continue_run(path, given, callbacks)


def federation_from_arguments(
    about: Mapping[str, Any],
    method: FedAvg | None,
    model: nn.Module | None,
    data: Dataset | None,
    clients: Partition | Iterable[Any] | None,
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
) -> Federation | None:
    """Put together what a run was started from, of its file and of what a file cannot hold.

    None where nothing was given: then the file has to say it all.
    """
    if model is None and data is None and clients is None:
        return None
    if model is None or data is None or clients is None:
        raise RunError("give all three of model, data and clients, or none of them")
    if not isinstance(data, Dataset):
        raise DataError("data must come from fedkeep.data.load or from_arrays", key="data", value=data)
    clients = Partition.of(clients, len(data.y_train))
    settings = Settings.of({**about["train"], "seed": about["seed"]})
    return Federation(method or methods.make(about["method"]), model, data, clients, settings, criterion)


def resume_from_file(path: Path, callbacks: Iterable[Callback] = ()) -> History:
    """Resume the run in a folder, from its own experiment file."""
    from fedkeep.experiments.experiment import Experiment

    about = read_experiment(path)
    if about.get("made_by", {}).get("engine") == "flower":
        raise ConfigError(f"{path} is a federation's: start its app again (flwr run) with this folder as its run-dir")
    try:
        experiment = Experiment.from_dict(about)
    except FedkeepError as error:
        raise ConfigError(
            f"{path} cannot be gone on with from its file alone ({error}); from Python: fedkeep.resume(run_dir, "
            "method=..., model=..., data=..., clients=...)"
        ) from error
    return experiment.resume(path, callbacks)
