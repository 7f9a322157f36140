"""Plain data, for other programs and out of files: JSON knows no NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def without_nan(value: Any) -> Any:
    """Put None in the place of every number that is not one, however deep.

    >>> without_nan({"a": [1.0, float("nan")], "b": (float("inf"),)})
    {'a': [1.0, None], 'b': [None]}
    """
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten tables within tables: the keys of one are joined with dots, as Flower does in an app's config.

    >>> flat({"seed": 0, "train": {"lr": 0.1}})
    {'seed': 0, 'train.lr': 0.1}
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        found.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return found


def dumps(value: Any, indent: int | None = None) -> str:
    """Write JSON that every program can read."""
    return json.dumps(without_nan(value), indent=indent, allow_nan=False)
