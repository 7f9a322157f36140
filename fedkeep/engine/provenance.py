"""What a run records about itself: the experiment, versions and fingerprints."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeep._util.structure import is_own, layer_names, structure_hash
from fedkeep._util.text_form import TextForm
from fedkeep._util.version import __version__
from fedkeep.data.dataset import Dataset
from fedkeep.data.partition import Partition
from fedkeep.engine.scores import Scorer
from fedkeep.engine.settings import Settings
from fedkeep.engine.user_metrics import describe_metric
from fedkeep.errors import RunError
from fedkeep.method import FedAvg
from fedkeep.runs.files import fingerprint
from fedkeep.task import Task, describe_criterion

log = logging.getLogger("fedkeep")

MAX_INPUTS = 500


def experiment_dict(
    method: FedAvg, settings: Settings, task: Task, source: str, n_clients: int, normalise: str | None = None
) -> dict[str, Any]:
    """Return the experiment as data, as far as the objects themselves show it."""
    train = asdict(settings)
    return {
        "seed": train.pop("seed"),
        "method": method.to_dict(),
        "model": {"class": type(task.module(task.init)).__name__},
        "data": {"source": source, **({} if normalise is None else {"normalise": normalise})},
        "split": {"n_clients": n_clients},
        "train": train,
    }


def made_by(engine: str, task: Task, threads: int) -> dict[str, Any]:
    """Return versions and everything else that can affect the last bit of a result."""
    return {
        **versions(),
        "engine": engine,
        "device": task.device.type,
        "threads": threads,
        "model": model_fingerprint(task),
    }


def versions() -> dict[str, str]:
    """Return the versions of the software that a run depends on."""
    return {
        "fedkeep": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def warn_about_changes(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Log, in one line, what differs from the start of a run that is resumed and can affect the last bits."""
    compared = ("fedkeep", "torch", "device", "threads", "ranks")
    changed = [key for key in compared if key in before and key in now and before[key] != now[key]]
    if changed:
        differences = ", ".join(f"{key} {before[key]} -> {now[key]}" for key in changed)
        log.warning("%s is resumed with other software or hardware: %s; the last bits may differ", path, differences)


def model_fingerprint(task: Task) -> str:
    """Return a checksum of the weights' names and shapes."""
    return fingerprint({name: np.array(w.shape) for name, w in task.init.items()})


def fingerprints(task: Task, data: Dataset, clients: Partition) -> dict[str, str]:
    """Return checksums that recognise the criterion, data, split and model of a run."""
    public, frozen = data.public, task.frozen
    public_arrays = (public.x, public.y, public.x_val, public.y_val) if public else ()
    arrays = (data.x_train, data.y_train, data.x_test, data.y_test, data.mean, data.std, *public_arrays)
    return {
        "criterion": describe_criterion(task.criterion),
        "data": fingerprint(*(part for part in arrays if part is not None)),
        "split": fingerprint(clients.indices, clients.offsets),
        "model": model_fingerprint(task),
        **({"base_model": fingerprint(frozen)} if frozen else {}),
    }


def same_fingerprint(key: str, value: str, made_by: Mapping[str, Any]) -> bool:
    """Return whether a fingerprint is the one that a run recorded.

    A criterion is compared by its name alone where its checksum cannot be: with another version of Python, and in runs
    that recorded only the name. Earlier versions did not record the frozen weights (`base_model`).
    """
    if key == "base_model" and key not in made_by:
        return True
    recorded = made_by.get(key, "")
    if key != "criterion" or value == recorded or "cross_entropy" in (value, recorded):
        return bool(value == recorded)
    return _same_code(value, recorded, made_by)


def _same_code(value: str, recorded: str, made_by: Mapping[str, Any]) -> bool:
    """Return whether NAME#HASH is that of a run; without the hash, if that was made by another version of Python."""
    names_only = "#" not in recorded or not same_python(made_by)
    return value == recorded or (names_only and value.partition("#")[0] == recorded.partition("#")[0])


def tested(scorer: Scorer) -> dict[str, Any]:
    """Return what a run records about its test set: the sites, and the user's metrics with a hash of their code."""
    metrics = {name: describe_metric(metric) for name, metric in scorer.metrics.items()}
    sites = list(scorer.sites.names) if scorer.sites else None
    return {"sites": sites, "metrics": metrics or None}


def require_same_tests(path: Path, made_by: Mapping[str, Any], scorer: Scorer) -> None:
    """Raise unless the sites and the user's metrics are those that a run was started with."""
    now = tested(scorer)
    if "sites" in made_by and now["sites"] != made_by["sites"]:
        raise RunError(f"{path} was started with other test_ids", key="test_ids", value=now["sites"])
    before, metrics = made_by.get("metrics", {}), now["metrics"] or {}
    if before.keys() != metrics.keys():
        names = ", ".join(before) or "none"
        raise RunError(
            f"{path} was started with other metrics: {names}; pass the same functions as metrics",
            key="metrics",
            value=list(metrics),
            valid=list(before),
        )
    for name, value in metrics.items():
        if not _same_code(value, before[name], made_by):
            raise RunError(
                f"the metric {name} is not the one that {path} was started with", key=f"metrics.{name}", value=value
            )


def same_python(made_by: Mapping[str, Any]) -> bool:
    """Return whether a run was made with this version of Python, whose hashes of code can be compared."""
    return str(made_by.get("python")).rsplit(".", 1)[0] == platform.python_version().rsplit(".", 1)[0]


def identity(method: FedAvg, task: Task, data: Dataset | None) -> dict[str, Any]:
    """Return what distinguishes two experiments with the same tables: what models and methods compute.

    `structure` is a hash of the model without its weights, `layers` names its layers, `test` is a hash of the test set,
    `init` one of the initial weights, `pretrained` one of the weights that were read from files. `tokenizer` is that of
    the texts. `algorithm` is a hash of the method's code, if the method is the user's own. `input_shape` and
    `n_classes` are what a model is built for, `inputs` what its inputs are.
    """
    model = task.module(task.init)
    shape = data.input_shape if data is not None else None
    return {
        "input_shape": list(shape) if isinstance(shape, tuple) and shape else None,
        "n_classes": task.n_classes,
        "inputs": describe_inputs(data) if data is not None else None,
        "structure": structure_hash(model),
        "layers": layer_names(model),
        "init": fingerprint(task.init),
        "pretrained": getattr(model, "pretrained", None),
        "test": fingerprint(data.x_test, data.y_test) if data is not None else None,
        "tokenizer": data.input_shape.tokenizer if data and isinstance(data.input_shape, TextForm) else None,
        "algorithm": structure_hash(type(method)) if is_own(type(method)) else None,
    }


def describe_inputs(data: Dataset) -> dict[str, Any] | None:
    """Return the names of the inputs, and the mean and std that they are normalised with; None if it has none.

    Whoever uses the model without the data needs them. Lists of more than `MAX_INPUTS` are left out.
    """
    features = data.feature_names
    found = {
        "features": list(features) if features is not None and len(features) <= MAX_INPUTS else None,
        "mean": data.mean.tolist() if data.mean is not None and data.mean.numel() <= MAX_INPUTS else None,
        "std": data.std.tolist() if data.std is not None and data.std.numel() <= MAX_INPUTS else None,
    }
    return found if any(value is not None for value in found.values()) else None
