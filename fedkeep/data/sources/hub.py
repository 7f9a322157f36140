"""Hugging Face data sets by name, read with `datasets`: from its cache, or downloaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedkeep._util.text import list_some, one_line
from fedkeep.data.sources import tables
from fedkeep.data.sources.common import Options, Raw, require_package
from fedkeep.errors import DataError

PREFIX = "hf:"
_TRAIN = "train"
_TEST = ("test", "validation", "valid", "val", "dev")


def read(name: str, options: Options) -> Raw:
    """Read the data set `OWNER/NAME` or `NAME`, either with `/CONFIG` after it."""
    source = f"{PREFIX}{name}"
    options.reject_except(source, *tables.OPTIONS, "splits", "test", "first_label")
    loaded = _load_dataset(name, source)
    splits = loaded if hasattr(loaded, "keys") else {"train": loaded}
    train, test = choose_splits(list(splits), options, source)
    train_table = _table(splits, train, source)
    raw = tables.from_tables(train_table, _table(splits, test, source) if test else None, options, source)
    if raw.test is not None and len(raw.test.y) and np.all(raw.test.y == -1):
        raise DataError(
            f"{source}: the split {test!r} has no classes (all labels are -1); choose the test split with "
            f"splits=({train!r}, ...) (valid: {list_some(list(splits))})",
            key="splits",
            value=test,
            valid=list(splits),
        )
    return raw


def _possible_names(name: str) -> list[tuple[str, ...]]:
    """Return what a name can mean: a/b is the data set b of owner a, or the configuration b of the data set a."""
    parts = name.split("/")
    if not all(parts) or len(parts) > 3:
        raise DataError(
            f"{PREFIX}{name} must be hf:NAME or hf:OWNER/NAME, either with /CONFIG after it",
            key="source",
            value=f"{PREFIX}{name}",
        )
    if len(parts) == 3:
        return [("/".join(parts[:2]), parts[2])]
    return [(name,)] if len(parts) == 1 else [(name,), tuple(parts)]


def _load_dataset(name: str, source: str) -> Any:
    names = _possible_names(name)
    datasets = require_package("datasets", f"loading {source}")
    first_error: Exception | None = None
    for arguments in names:
        try:
            return datasets.load_dataset(*arguments)
        except Exception as error:  # the hub, the network and the builders raise many types
            first_error = first_error or error
    assert first_error is not None
    raise DataError(
        f"{source} cannot be loaded: {_format_reason(first_error)}", key="source", value=source
    ) from first_error


def _format_reason(error: Exception) -> str:
    text = one_line(error)
    if isinstance(error, ConnectionError):
        return f"it is not in the cache and the hub is not reachable ({text})"
    if isinstance(error, FileNotFoundError):
        return f"there is no such data set, or it is private ({text})"
    if "config name is missing" in text.lower():
        return f"add /CONFIG to the name ({text})"
    return text


def choose_splits(names: list[str], options: Options, source: str) -> tuple[str, str | None]:
    """Return the names of the splits to train on and to test on."""
    if options.splits is not None:
        chosen = [options.splits] if isinstance(options.splits, str) else list(options.splits)
        unknown = [name for name in chosen if name not in names]
        if unknown or len(chosen) not in (1, 2):
            raise DataError(
                f"splits must be one or two splits of {source} (valid: {list_some(names)}), not {options.splits!r}",
                key="splits",
                value=options.splits,
                valid=names,
            )
        return chosen[0], chosen[1] if len(chosen) == 2 else None
    if _TRAIN not in names:
        raise DataError(
            f"{source} has no split {_TRAIN!r}: choose with splits=(train, test) (valid: {list_some(names)})",
            key="splits",
            valid=names,
        )
    return _TRAIN, next((name for name in _TEST if name in names), None)


def _table(splits: Any, split: str, source: str) -> tables.Table:
    return tables.Table(splits[split].with_format("arrow")[:], f"{source} ({split})")
