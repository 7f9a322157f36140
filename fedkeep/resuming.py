"""Going on with a run, from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedkeep import losses, methods
from fedkeep.data import Augment, Dataset, Partition
from fedkeep.engine.rounds import Callback
from fedkeep.engine.settings import Settings
from fedkeep.engine.simulate import go_on
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
    if model is None and data is None and clients is None:
        from fedkeep import config

        return config.resume(path, callbacks)
    if model is None or data is None or clients is None:
        raise RunError("give resume all three of model, data and clients, or none of them")
    about = read_experiment(path)
    hypers = {key: value for key, value in about["method"].items() if key != "name"}
    train = dict(about["train"])
    if "augment" in train:
        train["augment"] = Augment(**train["augment"])
    settings = Settings(**train, seed=about["seed"])
    method = method or methods.get(about["method"]["name"])(**hypers)
    return go_on(path, method, model, data, clients, settings, callbacks, criterion)
