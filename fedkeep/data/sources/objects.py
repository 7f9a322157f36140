"""Data sets from objects: DataFrames of pandas and polars, Arrow tables, data sets of Hugging Face and torch.

No package is imported for them: an object of a package exists only where that package has been imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from fedkeep._util.text import one_line
from fedkeep.data.sources import hub, items, tables
from fedkeep.data.sources.common import Options, Raw, require_package
from fedkeep.errors import DataError

KINDS = "a pandas or polars DataFrame, an Arrow table, a Hugging Face Dataset or DatasetDict, or a torch Dataset"


def recognises(source: Any) -> bool:
    """Return whether a source is one of these objects, or a pair or dict with one."""
    return _is_object(source) or has_parts(source)


def has_parts(source: Any) -> bool:
    """Return whether a source is a DatasetDict, or a pair or dict with one of these objects."""
    values = source.values() if isinstance(source, Mapping) else source if isinstance(source, tuple | list) else ()
    return any(_is_object(value) for value in values)


def read(source: Any, options: Options) -> Raw:
    """Return the examples of an object, or of objects to train and to test on; of one alone there is no test set."""
    if _is_splits(source):
        train, test = hub.choose_splits(list(source), options, type(source).__name__)
        parts = {train: source[train]} | ({test: source[test]} if test else {})
    else:
        parts = _pair(source) if has_parts(source) else {"": source}
    kinds = [_kind(value, part) for part, value in parts.items()]
    if len({kind is TorchDataset for kind in kinds}) > 1:
        names = [type(value).__name__ for value in parts.values()]
        raise DataError(
            f"source: train and test must be of one kind, not {' and '.join(names)}", key="source", value=names
        )
    if kinds[0] is TorchDataset:
        return items.read(list(parts.values()), options)
    splits = ("splits",) if _is_splits(source) else ()
    options.reject_except(f"a {_name(source)}", *tables.OPTIONS, *splits, "test", "first_label")
    named = [_to_table(value, part) for part, value in parts.items()]
    return tables.from_tables(named[0], named[1] if len(named) > 1 else None, options, _name(source))


def _pair(source: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    parts = dict(source) if isinstance(source, Mapping) else dict(zip(("train", "test"), source, strict=False))
    if set(parts) != {"train", "test"} or len(source) != 2:
        shown = list(source) if isinstance(source, Mapping) else [type(value).__name__ for value in source]
        raise DataError(
            f"source must be a pair (train, test) or a dict {{'train': ..., 'test': ...}}, not {shown}",
            key="source",
            value=shown,
            valid=("train", "test"),
        )
    return {part: parts[part] for part in ("train", "test")}


def _is_object(value: Any) -> bool:
    if isinstance(value, TorchDataset | DataLoader):
        return True
    return any(
        _is(value, *kind) for kind in (*_TABLES, *_REFUSED, ("datasets", "Dataset"), ("datasets", "DatasetDict"))
    )


def _is_splits(value: Any) -> bool:
    return _is(value, "datasets", "DatasetDict")


def _is(value: Any, package: str, name: str) -> bool:
    """Return whether a value is of a class of a package, which is not imported for it."""
    kind = getattr(sys.modules.get(package), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


_TABLES = (("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table"), ("datasets", "Dataset"))
_REFUSED = {
    ("polars", "LazyFrame"): "it is not read yet: pass frame.collect()",
    ("datasets", "IterableDataset"): "its examples cannot be counted: load it without streaming=True",
    ("datasets", "IterableDatasetDict"): "its examples cannot be counted: load it without streaming=True",
    ("pandas", "Series"): "it is one column: pass a DataFrame with the classes too, or use fk.data.from_arrays",
}


def _kind(value: Any, part: str) -> type:
    """Return torch's Dataset for such an object, and object for a table; raise for what cannot be read."""
    name = type(value).__name__
    for (package, refused), reason in _REFUSED.items():
        if _is(value, package, refused):
            raise DataError(f"source: {_where(part, name)} cannot be loaded: {reason}", key="source", value=name)
    if any(_is(value, *kind) for kind in _TABLES):
        return object
    if isinstance(value, DataLoader):
        raise DataError("source: a DataLoader cannot be loaded: pass loader.dataset", key="source", value=name)
    if isinstance(value, IterableDataset) or not isinstance(value, TorchDataset) or not hasattr(value, "__len__"):
        raise DataError(
            f"source: {_where(part, name)} must be {KINDS} with a length and examples by number",
            key="source",
            value=name,
        )
    return TorchDataset


def _to_table(value: Any, part: str) -> tables.Table:
    where = _where(part, _name(value))
    arrow = require_package("pyarrow", "reading tables")
    try:
        if _is(value, "pandas", "DataFrame"):
            table = arrow.Table.from_pandas(value, preserve_index=False)
        elif _is(value, "polars", "DataFrame"):
            table = value.to_arrow()
        elif _is(value, "datasets", "Dataset"):
            table = value.with_format("arrow")[:]
        else:
            table = value
    except (arrow.ArrowException, ValueError, TypeError) as error:
        raise DataError(f"{where} cannot be read as a table: {one_line(error)}", key="source") from error
    return tables.Table(table, where)


def _name(value: Any) -> str:
    if isinstance(value, Mapping | tuple | list) and not _is_splits(value):
        value = value["train"] if isinstance(value, Mapping) else value[0]
    return type(value).__name__


def _where(part: str, name: str) -> str:
    return f"{name} ({part})" if part else name
