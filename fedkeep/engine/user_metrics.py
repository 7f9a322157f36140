"""The user's own metrics: functions of all logits [N, C] and labels [N] of the test set.

A metric returns a number, one number per class, or a dict of numbers. It is tried on made-up examples before the first
round, and called on the CPU after every evaluation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedkeep._util.own_parts import load_object, trust
from fedkeep._util.structure import structure_hash
from fedkeep._util.text import format_value, one_line
from fedkeep.errors import FedkeepError
from fedkeep.runs.round_metrics import require_metric_name, to_metric_value

log = logging.getLogger("fedkeep")

Metric = Callable[[Tensor, Tensor], Any]
Metrics = Mapping[str, Metric | str] | Iterable[Metric | str] | None  # as the user gives them
Value = float | list[float | None] | None
_FORMS = "a number, one number per class, or a dict of numbers"


class _WrongValueError(TypeError):
    """A metric returned something else than numbers."""


def require_metrics(given: Any, n_classes: int) -> dict[str, Metric]:
    """Return metrics by name, each tried on two examples of every class; raise if one cannot be used.

    They are given as a dict of functions, or as functions that go by their own names. A function may also be named, as
    `package.module:function`.
    """
    metrics = {name: _load(name, metric) for name, metric in metrics_by_name(given).items()}
    z, y = _trial_examples(n_classes)
    known: set[str] = set()
    for name, metric in metrics.items():
        try:
            values = _call(name, metric, z, y, known)
        except Exception as error:
            raise _unusable(
                name, f"fails on logits {tuple(z.shape)} and labels {tuple(y.shape)}: {_reason(error)}"
            ) from error
        for key, value in values.items():
            if any(number is None for number in (value if isinstance(value, list) else [value])):
                raise _unusable(key, f"is NaN or infinite on {len(y)} examples, two of each class, half of them right")
        known.update(values)
    return metrics


def metrics_by_name(given: Any, error: type[FedkeepError] = FedkeepError) -> dict[str, Any]:
    """Return metrics by name: a dict as it is; functions, or names of functions, by their own names.

    >>> metrics_by_name(["my_metrics:specificity"])
    {'specificity': 'my_metrics:specificity'}
    """
    if given is None:
        return {}
    listed = [given] if callable(given) or isinstance(given, str) else given
    if not isinstance(listed, Iterable):
        raise error(
            f"metrics = {format_value(given)}: write a table of names (in Python a dict), each with a function or "
            "package.module:function",
            key="metrics",
            value=given,
        )
    pairs = given.items() if isinstance(given, Mapping) else [(_own_name(metric), metric) for metric in listed]
    metrics: dict[str, Any] = {}
    for name, metric in pairs:
        if require_metric_name(name) in metrics:
            message = f"two metrics are called {name}: write a table (in Python a dict), with a name for each"
            raise error(message, key="metrics", value=name)
        metrics[name] = metric
    return metrics


def _own_name(metric: Any) -> str:
    return metric.rpartition(":")[2] if isinstance(metric, str) else getattr(metric, "__name__", repr(metric))


def evaluate_metrics(metrics: Mapping[str, Metric], logits: Tensor, y: Tensor, round: int) -> dict[str, Value]:
    """Return what the metrics are for the logits of a round's global model; NaN becomes None.

    A metric that fails is left out with a warning; before the first round it raises.
    """
    values: dict[str, Value] = {}
    for name, metric in metrics.items():
        try:
            values |= _call(name, metric, logits, y, values)
        except Exception as error:
            if round == 0:
                raise _unusable(name, f"fails on the test set: {_reason(error)}") from error
            log.warning("round %d: the metric %s failed and is not recorded: %s", round, name, _reason(error))
    return values


def describe_metric(metric: Metric) -> str:
    """Return the name of a metric's function, and a hash of what it computes."""
    name = getattr(metric, "__qualname__", type(metric).__qualname__)
    return f"{name}#{structure_hash(metric)}"


def _load(name: str, metric: Any) -> Metric:
    if isinstance(metric, str):
        trust([metric])  # the user has named it, in Python
        metric = load_object(metric, key=f"metrics.{name}", error=FedkeepError)
    if isinstance(metric, type) or not callable(metric):
        raise _unusable(name, f"must be a function (logits, labels) -> {_FORMS}, not {metric!r}")
    return metric  # type: ignore[no-any-return]


@torch.no_grad()
def _call(name: str, metric: Metric, logits: Tensor, y: Tensor, known: Container[str]) -> dict[str, Value]:
    """Return what a metric returns, by name; those of a dict are called NAME_KEY. Names that are `known` raise."""
    z = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    returned = metric(z.clone(), y.clone())  # it may change what it gets
    if not isinstance(returned, Mapping):
        named = [(name, _to_value(returned, z.shape[1]))]
    else:
        named = [(require_metric_name(f"{name}_{key}"), _to_value(value, None)) for key, value in returned.items()]
    if not named:
        raise _WrongValueError("it returns an empty dict")
    values: dict[str, Value] = {}
    for key, value in named:
        if key in known or key in values:
            raise _WrongValueError(f"two metrics would be called {key}: choose another name for one of them")
        values[key] = value
    return values


def _to_value(value: Any, n_classes: int | None) -> Value:
    """Return a number or a list of one number per class; raise if it is anything else. A dict has no lists (None)."""
    try:
        number = to_metric_value(value, n_classes)
    except TypeError as error:
        raise _WrongValueError(f"it must return {_FORMS}, not {error}") from None
    if isinstance(number, list) and n_classes is None:
        raise _WrongValueError(f"it must return {_FORMS}, not a dict with {len(number)} numbers in one entry")
    return number


def _trial_examples(n_classes: int) -> tuple[Tensor, Tensor]:
    """Return logits and labels of two examples of each class: one classified right, and one as the next class."""
    y = torch.arange(n_classes).repeat(2)
    predicted = torch.cat([y[:n_classes], (y[n_classes:] + 1) % n_classes])
    noise = torch.linspace(0, 40, len(y) * n_classes).sin().reshape(len(y), n_classes)
    return noise + 3 * torch.nn.functional.one_hot(predicted, n_classes), y


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, _WrongValueError) else f"{type(error).__name__}: {one_line(error)}"


def _unusable(name: str, why: str) -> FedkeepError:
    return FedkeepError(f"the metric {name} {why}", key=f"metrics.{name}")
