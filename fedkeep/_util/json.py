"""JSON that every program can read: no NaN, no infinity."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any


def without_nan(value: Any) -> Any:
    """Replace every NaN and infinity by None, at any depth; tuples and numpy arrays become lists.

    >>> without_nan({"a": [1.0, float("nan")], "b": (float("inf"),)})
    {'a': [1.0, None], 'b': [None]}
    """
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if _is_from_numpy(value):
        return without_nan(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_from_numpy(value: Any) -> bool:
    """Return whether a value is an array or a number of numpy, which is not imported for this."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts; keys are joined with dots.

    >>> flatten({"seed": 0, "train": {"lr": 0.1}})
    {'seed': 0, 'train.lr': 0.1}
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat


def to_json(value: Any, indent: int | None = None) -> str:
    """Return the value as JSON; NaN and infinity become null."""
    return json.dumps(without_nan(value), indent=indent, allow_nan=False)
