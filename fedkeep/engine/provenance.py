"""What a run records about itself: its parts, versions and fingerprints."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from fedkeep._util.version import __version__
from fedkeep.engine.settings import Settings
from fedkeep.method import FedAvg
from fedkeep.runs.files import fingerprint
from fedkeep.task import Task

# What is written down of it


def experiment_dict(method: FedAvg, settings: Settings, task: Task, source: str, n_clients: int) -> dict[str, Any]:
    """Say in plain data what is run, as far as the parts themselves tell."""
    train = asdict(settings)
    return {
        "seed": train.pop("seed"),
        "method": method.described(),
        "model": {"class": type(task.module(task.init)).__name__},
        "data": {"source": source},
        "split": {"n_clients": n_clients},
        "train": train,
    }


def made_by(engine: str, task: Task, threads: int) -> dict[str, Any]:
    """Say in plain data what runs it, down to what the last bit may depend on."""
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
    """Sum up the names and shapes of the weights."""
    return fingerprint({name: np.array(w.shape) for name, w in task.init.items()})
