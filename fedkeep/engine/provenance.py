"""What a run records about itself: the experiment, versions and fingerprints."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from fedkeep._util.version import __version__
from fedkeep.data.dataset import Dataset
from fedkeep.data.partition import Partition
from fedkeep.engine.settings import Settings
from fedkeep.engine.structure import is_own, layer_names, structure_hash
from fedkeep.method import FedAvg
from fedkeep.runs.files import fingerprint
from fedkeep.task import Task


def experiment_dict(method: FedAvg, settings: Settings, task: Task, source: str, n_clients: int) -> dict[str, Any]:
    """Return the experiment as data, as far as the objects themselves show it."""
    train = asdict(settings)
    return {
        "seed": train.pop("seed"),
        "method": method.to_dict(),
        "model": {"class": type(task.module(task.init)).__name__},
        "data": {"source": source},
        "split": {"n_clients": n_clients},
        "train": train,
    }


def made_by(engine: str, task: Task, threads: int) -> dict[str, Any]:
    """Return versions and everything else that can affect the last bit of a result."""
    return {
        "fedkeep": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "engine": engine,
        "device": task.device.type,
        "threads": threads,
        "model": model_fingerprint(task),
    }


def model_fingerprint(task: Task) -> str:
    """Return a checksum of the weights' names and shapes."""
    return fingerprint({name: np.array(w.shape) for name, w in task.init.items()})


def fingerprints(task: Task, data: Dataset, clients: Partition) -> dict[str, str]:
    """Return checksums that recognise the criterion, data, split and model of a run."""
    public = data.public
    public_arrays = (public.x, public.y, public.x_val, public.y_val) if public else ()
    arrays = (data.x_train, data.y_train, data.x_test, data.y_test, data.mean, data.std, *public_arrays)
    return {
        "criterion": getattr(task.criterion, "__qualname__", repr(task.criterion)),
        "data": fingerprint(*(part for part in arrays if part is not None)),
        "split": fingerprint(clients.indices, clients.offsets),
        "model": model_fingerprint(task),
    }


def identity(method: FedAvg, task: Task, data: Dataset | None) -> dict[str, Any]:
    """Return what tells two experiments apart that have the same tables: what models, losses and methods compute.

    `structure` is a hash of the model without its weights, `layers` names its layers, `loss` is a hash of the
    criterion, `test` one of the test set, `init` one of the initial weights. `algorithm` is a hash of the method's
    code, if the method is the user's own.
    """
    model = task.module(task.init)
    return {
        "structure": structure_hash(model),
        "layers": layer_names(model),
        "loss": structure_hash(task.criterion),
        "init": fingerprint(task.init),
        "test": fingerprint(data.x_test, data.y_test) if data is not None else None,
        "algorithm": structure_hash(type(method)) if is_own(type(method)) else None,
    }
