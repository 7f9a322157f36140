"""What a method needs of a run, checked before anything is trained or written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fedkeep.engine import privacy, robust
from fedkeep.engine.settings import Settings
from fedkeep.errors import MethodError
from fedkeep.method import FedAvg
from fedkeep.models import TEXT_MODELS


def require_settings(method: FedAvg, settings: Settings) -> None:
    """Raise if this method cannot be trained or aggregated with these settings, whatever the data and the clients."""
    if settings.optimizer not in method.optimizers:
        raise MethodError(
            f"{method.name} is defined for clients that train with {' or '.join(method.optimizers)}, not with "
            f'{settings.optimizer}: set optimizer = "{method.optimizers[0]}"',
            key="optimizer",
            value=settings.optimizer,
            valid=method.optimizers,
        )
    if settings.accumulate > 1:
        require_need(method, "whole_batches", "accumulate", settings.accumulate)
    robust.require_averaged(method, settings)
    if settings.private:
        privacy.require_averaged(method)


def require_model(method: FedAvg, model: Mapping[str, Any]) -> None:
    """Raise if this method cannot train the model that an experiment names, as far as its name and options say."""
    if model.get("name") in TEXT_MODELS:
        require_need(method, "real_inputs", "name", model["name"])
    if model.get("head") == "etf":
        require_need(method, "classifier", "head", "etf")


def require_inputs(method: FedAvg, x: Any) -> None:
    """Raise if this method cannot train on such examples, given some of them as the model gets them."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        require_need(method, "real_inputs", "data", None)


_MESSAGES: dict[str, Callable[[str], str]] = {
    "whole_batches": lambda name: (
        f"{name} adds up sums over batches, which accumulate would divide: use accumulate = 1"
    ),
    "real_inputs": lambda name: (
        f"{name} computes with the inputs themselves, which must be one tensor of real numbers: it does not work for "
        "tokens or several inputs"
    ),
    "classifier": lambda name: (
        f'{name} needs a classifier that is trained, and with head = "etf" it is fixed: use head = "linear"'
    ),
}


def require_need(method: FedAvg, need: str, key: str, value: Any) -> None:
    """Raise if the method needs this; `key` and `value` are what the run has instead."""
    if need in method.needs:
        advice = method.needs[need]
        message = _MESSAGES[need](method.name)
        raise MethodError(f"{message}, or {advice}" if advice else message, key=key, value=value)
