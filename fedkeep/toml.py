"""Writing TOML: as much of it as an experiment file needs (Python reads it by itself)."""

from __future__ import annotations

import json
import math
import numbers
import re
from typing import Any


def dumps(table: dict[str, Any], prefix: str = "") -> str:
    """Write a dict of plain values and of such dicts; None is left out.

    >>> print(dumps({"seed": 0, "train": {"lr": 0.1, "augment": {"flip": True}}}), end="")
    seed = 0
    <BLANKLINE>
    [train]
    lr = 0.1
    <BLANKLINE>
    [train.augment]
    flip = true
    """
    lines = [f"{_key(k)} = {value(v)}\n" for k, v in table.items() if v is not None and not isinstance(v, dict)]
    for key, sub in table.items():
        if isinstance(sub, dict):
            inner = dumps(sub, f"{prefix}{_key(key)}.")
            head = "" if inner.startswith("\n[") else f"\n[{prefix}{_key(key)}]\n"
            lines.append(head + inner)
    return "".join(lines)


def value(v: Any) -> str:
    """Write one value."""
    if isinstance(v, bool):
        return "true" if v else "false"
    if isinstance(v, str):
        return _string(v)
    if isinstance(v, numbers.Integral):
        return str(int(v))
    if isinstance(v, numbers.Real):
        v = float(v)
        return repr(v) if math.isfinite(v) else {math.inf: "inf", -math.inf: "-inf"}.get(v, "nan")
    if isinstance(v, list | tuple):
        return f"[{', '.join(value(item) for item in v)}]"
    raise TypeError(f"{type(v).__name__} has no place in an experiment file: {v!r}")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _string(text: str) -> str:
    """Quote as JSON does, which is as TOML does but for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
