"""Going on with a run, from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedkeep import losses, methods
from fedkeep.data import Dataset, Partition
from fedkeep.engine.rounds import Callback
from fedkeep.engine.settings import Settings
from fedkeep.engine.simulate import Parts, go_on
from fedkeep.errors import RunError
from fedkeep.history import History
from fedkeep.method import FedAvg
from fedkeep.runs import read_experiment


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
    given = given_again(read_experiment(path), method, model, data, clients)
    if given is None:
        from fedkeep import config

        return config.resume(path, callbacks)
    return go_on(path, given, callbacks, criterion)


def given_again(
    about: Mapping[str, Any],
    method: FedAvg | None,
    model: nn.Module | None,
    data: Dataset | None,
    clients: Partition | Iterable[Any] | None,
) -> Parts | None:
    """Put together what a run was started from, of its file and of what a file cannot hold.

    None where nothing was given: then the file has to say it all.
    """
    if model is None and data is None and clients is None:
        return None
    if model is None or data is None or clients is None:
        raise RunError("give all three of model, data and clients, or none of them")
    settings = Settings.of({**about["train"], "seed": about["seed"]})
    return method or methods.make(about["method"]), model, data, clients, settings
