"""Checks of single arguments: each returns the value or raises an error that names it.

`label` is what the message calls the argument, if not by its key.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeVar

from fedkeep._util.text import did_you_mean, format_value, printable
from fedkeep.errors import ConfigError, FedkeepError

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")
_INT64 = (-(2**63), 2**63 - 1)
# what a value must be, by how the type of pydantic's error starts
_KINDS = {
    "float_": "a number",
    "int_": "a whole number",
    "finite_number": "a finite number",
    "bool_": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "mapping_type": "a table",
    "dataclass_type": "a table",
    "model_type": "a table",
}
_FLOAT32_MAX = 3.4028234e38  # beyond it, torch computes with infinity


def require_whole(
    key: str,
    value: Any,
    low: int | None = None,
    high: int | None = None,
    *,
    error: type[FedkeepError] = FedkeepError,
    label: str = "",
) -> int:
    """Return the value as an int; raise unless it is a whole number of 64 bits within the bounds (a bool is not).

    >>> require_whole("rounds", 3, low=1)
    3
    >>> require_whole("rounds", 2.5, low=1)
    Traceback (most recent call last):
    fedkeep.errors.FedkeepError: rounds must be a whole number of at least 1, not 2.5
    """
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or not _within(value, low, high) or not _within(value, *_INT64):
        bounds = _bounds(low, high)
        raise error(f"{label or key} must be a whole number{bounds}, not {format_value(value)}", key=key, value=value)
    return int(value)


def require_number(
    key: str,
    value: Any,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    *,
    error: type[FedkeepError] = FedkeepError,
    label: str = "",
) -> float:
    """Return the value; raise unless it is a number within the bounds (a bool is not) and finite, also in float32.

    >>> require_number("lr", 0.1, above=0)
    0.1
    >>> require_number("lr", 0, above=0)
    Traceback (most recent call last):
    fedkeep.errors.FedkeepError: lr must be a number above 0, not 0
    """
    number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else _as_float(value)
    if not math.isfinite(number) or not _within(number, low, high, above, below):
        bounds = _bounds(low, high, above, below)
        huge = " that float32 can hold" if isinstance(value, numbers.Real) and _is_huge(value) else ""
        raise error(f"{label or key} must be a number{bounds}{huge}, not {format_value(value)}", key=key, value=value)
    return value  # type: ignore[no-any-return]


def require_bool(key: str, value: Any, error: type[FedkeepError] = FedkeepError) -> bool:
    """Return the value; raise unless it is True or False."""
    if not isinstance(value, bool):
        raise error(f"{key} must be True or False, not {format_value(value)}", key=key, value=value)
    return value


def require_choice(
    key: str, value: T, valid: Collection[T], what: str = "", error: type[FedkeepError] = FedkeepError
) -> T:
    """Return the value; raise unless it is one of the valid ones, and suggest the closest.

    `what` is what the message calls the value; by default the key.

    >>> require_choice("engine", "lop", ("auto", "loop", "stacked"))
    Traceback (most recent call last):
    fedkeep.errors.FedkeepError: unknown engine 'lop': did you mean loop? (valid: auto, loop, stacked)
    """
    if value not in list(valid):  # a list: the value may be of a type that has no hash
        suggestion = did_you_mean(str(value), [str(v) for v in valid])
        raise error(f"unknown {what or key} {format_value(value)}: {suggestion}", key=key, value=value, valid=valid)
    return value


def require_label(value: Any, error: type[FedkeepError] = FedkeepError) -> str:
    """Return the name of a group of runs; raise unless it is a text of 1 to 80 characters that can be shown.

    >>> require_label("large batches")
    'large batches'
    """
    if not isinstance(value, str) or not 1 <= len(value.strip()) <= 80 or printable(value) != value:
        raise error(f"label must be a text of 1 to 80 printable characters, not {value!r}", key="label", value=value)
    return value.strip()


def first_error(section: str, error: ValidationError) -> ConfigError:
    """Return the first of pydantic's errors as one of ours; `section` is put before the key."""
    errors = error.errors()
    first = errors[0]
    reason = first.get("ctx", {}).get("error")
    if isinstance(reason, FedkeepError):
        return reason.converted(ConfigError, str(reason))
    place, failed = first["loc"], [first]
    if place and _is_type(place[-1]):  # the value fits none of a union's types, and there is an error for each
        place = place[:-1]
        failed = [one for one in errors if one["loc"] and one["loc"][:-1] == place and _is_type(one["loc"][-1])]
    key = section + ".".join(str(part) for part in place)
    if first["type"] == "missing":
        return ConfigError(f"{key} is missing", key=key)
    kinds = list(dict.fromkeys(_expected(one["type"], one.get("ctx", {})) for one in failed))
    given = format_value(first["input"])
    if "" in kinds:
        return ConfigError(f"{key} = {given}: {first['msg']}", key=key, value=first["input"])
    if "a number" in kinds and "a whole number" in kinds:
        kinds.remove("a whole number")
    return ConfigError(f"{key} must be {' or '.join(kinds)}, not {given}", key=key, value=first["input"])


def _is_type(part: object) -> bool:
    """Return whether a part of an error's place is a type of a union, not a key."""
    return part in ("int", "float", "str", "bool") or "[" in str(part)


def _expected(kind: str, bounds: dict[str, Any]) -> str:
    """Return what a value must be, for a type of pydantic's errors; "" for other types."""
    if kind == "greater_than_equal":
        return f"at least {bounds['ge']}"
    return next((text for start, text in _KINDS.items() if kind.startswith(start)), "")


def _is_huge(value: Any) -> bool:
    return not abs(value) <= _FLOAT32_MAX and value == value and abs(value) != math.inf


def _as_float(value: Any) -> float:
    """Return a number as a float; NaN if torch cannot compute with it."""
    if isinstance(value, numbers.Integral):
        return float(value) if _within(value, *_INT64) else math.nan
    number = float(value)
    return number if abs(number) <= _FLOAT32_MAX else math.nan


def _within(
    value: Any, low: float | None, high: float | None, above: float | None = None, below: float | None = None
) -> bool:
    return (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
        and (below is None or value < below)
    )


def _bounds(low: float | None, high: float | None, above: float | None = None, below: float | None = None) -> str:
    parts = [
        f"of at least {low}" if low is not None else "",
        f"above {above}" if above is not None else "",
        f"of at most {high}" if high is not None else "",
        f"below {below}" if below is not None else "",
    ]
    text = " and ".join(part for part in parts if part)
    return f" {text}" if text else ""
