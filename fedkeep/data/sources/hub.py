"""Hugging Face data sets by name, through `datasets`: from its cache, or downloaded by it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedkeep._util.text import list_some, one_line
from fedkeep.data.sources import tables
from fedkeep.data.sources.common import Options, Raw, require_package
from fedkeep.errors import DataError

PREFIX = "hf:"
_TRAIN = ("train",)
_TEST = ("test", "validation", "valid", "val", "dev")


def load(name: str, options: Options) -> Raw:
    """Load `OWNER/NAME`, `NAME`, or either with `/CONFIG` after it."""
    source = f"{PREFIX}{name}"
    options.only(source, "x", "y", "ids", "size", "tokenizer", "splits", "test", "first_label")
    found = _fetch(name, source)
    splits = found if hasattr(found, "keys") else {"train": found}
    train, test = _splits(splits, options, source)
    read = [None if s is None else tables.Table(_arrow(splits[s]), f"{source} ({s})") for s in (train, test)]
    assert read[0] is not None
    raw = tables.raw(read[0], read[1], options, source)
    if raw.test is not None and len(raw.test.y) and np.all(raw.test.y == -1):
        raise DataError(
            f"{source}: the split {test!r} has no classes (all are -1): name the splits to train and to test with, "
            f"splits=({train!r}, ...) (it has {list_some(list(splits))})"
        )
    return raw


def _readings(name: str) -> list[tuple[str, ...]]:
    """List what a name may mean: a/b is the data set b of a, or the configuration b of the data set a."""
    parts = name.split("/")
    if not all(parts) or len(parts) > 3:
        raise DataError(f"a Hugging Face data set is hf:NAME, hf:OWNER/NAME or one of them with /CONFIG, not hf:{name}")
    if len(parts) == 3:
        return [("/".join(parts[:2]), parts[2])]
    return [(name,)] if len(parts) == 1 else [(name,), tuple(parts)]


def _fetch(name: str, source: str) -> Any:
    readings = _readings(name)
    datasets = require_package("datasets", f"loading {source}")
    failed: Exception | None = None
    for reading in readings:
        try:
            return datasets.load_dataset(*reading)
        except Exception as error:  # the hub, the network and the builders fail in many ways; all mean: not loaded
            failed = failed or error
    assert failed is not None
    raise DataError(f"{source} cannot be loaded: {_reason(failed)}") from failed


def _reason(error: Exception) -> str:
    text = one_line(error)
    if isinstance(error, ConnectionError):
        return f"it is not in the cache and the hub is out of reach ({text})"
    if isinstance(error, FileNotFoundError):
        return f"there is no such data set, or it is private ({text})"
    if "config name is missing" in text.lower():
        return f"add /CONFIG to the name ({text})"
    return text


def _splits(splits: Any, options: Options, source: str) -> tuple[str, str | None]:
    """Find the names of the splits to train and to test with."""
    names = list(splits)
    if options.splits is not None:
        wanted = [options.splits] if isinstance(options.splits, str) else list(options.splits)
        unknown = [name for name in wanted if name not in names]
        if unknown or len(wanted) not in (1, 2):
            raise DataError(f"splits must name one or two of {list_some(names)} of {source}, not {options.splits!r}")
        return wanted[0], wanted[1] if len(wanted) == 2 else None
    train = next((name for name in _TRAIN if name in names), None)
    if train is None:
        raise DataError(f"{source} has no split train: name one with splits=(train, test) (it has {list_some(names)})")
    return train, next((name for name in _TEST if name in names), None)


def _arrow(split: Any) -> Any:
    return split.with_format("arrow")[:]
