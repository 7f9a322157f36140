"""Reading TOML from users: what is nested too deeply or too large is an error like any other."""

from __future__ import annotations

import tomllib
from typing import Any

MAX_DEPTH = 32  # of tables and lists in each other


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text; raise ValueError, which may be a TOMLDecodeError, if it cannot be used.

    >>> parse_toml("seed = 1")
    {'seed': 1}
    >>> parse_toml("a.b = 0xffffffffffffffff")
    Traceback (most recent call last):
    ValueError: a.b is a whole number of more than 64 bits
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError("tables or lists are nested too deeply") from None
    except ValueError:  # int() of thousands of digits
        raise ValueError("a whole number has more than 64 bits") from None
    _check(tables, "", 0)
    return tables


def _check(value: Any, key: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError("tables or lists are nested too deeply")
    if isinstance(value, dict):
        for name, item in value.items():
            _check(item, f"{key}.{name}" if key else name, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check(item, key, depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{key} is a whole number of more than 64 bits")
