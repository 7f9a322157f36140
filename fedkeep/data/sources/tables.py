"""Tables: parquet and csv files, with the columns of examples, classes and ids named or guessed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep._util.text import list_some, one_line
from fedkeep.data.sources import columns
from fedkeep.data.sources.common import Missing, Options, Part, Raw, require_package
from fedkeep.data.sources.images import same_channels
from fedkeep.errors import DataError

SUFFIXES = (".parquet", ".csv", ".csv.gz")
_TEST = ("test", "val", "dev")
_SHARD = re.compile(r"[a-z]+[-_.]?\d+", re.IGNORECASE)


@dataclass(frozen=True)
class Table:
    """An Arrow table, its name for messages, and the folder that paths to images in it start from."""

    arrow: Any
    name: str
    folder: Path = Path()


def is_table(path: Path) -> bool:
    """Say whether a file is read as a table."""
    return path.name.lower().endswith(SUFFIXES)


def holds(folder: Path) -> bool:
    """Say whether a folder holds tables for training, in itself or in data/."""
    return bool(_shards(folder, "train"))


def folder(path: Path, options: Options) -> Raw:
    """Read the tables of a folder that begin with train, and with test (or val or dev); shards are put together."""
    tests = (_shards(path, word) for word in _TEST)
    return files(_shards(path, "train"), next((found for found in tests if found), None), options, path.name)


def files(train: Sequence[Path], test: Sequence[Path] | None, options: Options, name: str | None = None) -> Raw:
    """Read training and test tables from files, each from one or several."""
    options.only("a table", "x", "y", "ids", "size", "tokenizer", "test", "first_label")
    table = _read(train, options)
    fixed = _fix(table, options)  # what was guessed for training holds for the test too
    return raw(table, None if test is None else _read(test, fixed), fixed, name or train[0].name.partition(".")[0])


def raw(train: Table, test: Table | None, options: Options, name: str) -> Raw:
    """Turn tables into examples and classes. Classes that are words are numbered in the order of the words."""
    if test is not None:
        options.no_share(name)
    for table in (train, test):
        if table is not None and not table.arrow.num_rows:
            raise DataError(f"{table.name} holds no rows")
    chosen = columns.choose(train.arrow.schema, options, train.name)
    if test is not None:
        columns.check(test.arrow.schema, chosen, test.name)
    classes = _declared(train.arrow.schema, chosen.y)
    y = columns.labels(train, chosen.y)
    y_test = None if test is None else columns.labels(test, chosen.y)
    if y.dtype.kind in "UO":
        classes = classes or np.unique(y).tolist()
        y = _number(y, classes, train.name)
        y_test = None if test is None or y_test is None else _number(y_test, classes, test.name)
    x = columns.inputs(train, chosen, options)
    ids = None if chosen.ids is None else columns.id_column(train, chosen.ids)
    n_classes = len(classes) if classes else None
    if test is None or y_test is None:
        return Raw(Part(x, y, ids), None, name, n_classes)
    x_test = columns.inputs(test, chosen, options, like=x)
    if isinstance(x, np.ndarray) and isinstance(x_test, np.ndarray) and x.ndim == x_test.ndim == 4:
        x, x_test = same_channels(x, x_test)
    return Raw(Part(x, y, ids), Part(x_test, y_test), name, n_classes)


def _shards(folder: Path, word: str) -> list[Path]:
    """List the tables that begin with a word: one, or numbered ones; parquet before csv, in the folder or in data/."""
    for place in (folder, folder / "data"):
        tables = [p for p in sorted(place.iterdir()) if p.is_file() and is_table(p)] if place.is_dir() else []
        found = [p for p in tables if p.name.lower().startswith(word)]
        found = [p for p in found if p.suffix.lower() == ".parquet"] or found
        if len(found) > 1 and not all(_SHARD.match(p.name) for p in found):
            raise DataError(
                f"{place} holds several tables that begin with {word}: {list_some([p.name for p in found])}; name the "
                "files: load((train, test))"
            )
        if found:
            return found
    return []


def _fix(table: Table, options: Options) -> Options:
    chosen = columns.choose(table.arrow.schema, options, table.name)
    return replace(options, x=chosen.x, y=chosen.y)


def _read(paths: Sequence[Path], options: Options) -> Table:
    arrow = require_package("pyarrow", "reading parquet and csv files")
    tables = [_read_one(path, options) for path in paths]
    if len({tuple(table.schema.names) for table in tables}) > 1:
        raise DataError(
            f"{list_some([str(p) for p in paths])} have different columns: they are not shards of one table"
        )
    whole = tables[0] if len(tables) == 1 else arrow.concat_tables(tables, promote_options="permissive")
    return Table(whole, str(paths[0]), paths[0].parent)


def _read_one(path: Path, options: Options) -> Any:
    if not path.is_file():
        raise Missing(f"there is no file {path}")
    if not is_table(path):
        raise DataError(f"{path} is not a table that can be read (valid: {', '.join(SUFFIXES)})")
    try:
        table = _parquet(path, options) if path.suffix.lower() == ".parquet" else _csv(path)
        table.validate(full=True)  # or a damaged text would fail only where it is used
        return table
    except DataError:
        raise
    except Exception as error:  # Arrow's errors share no base class with those of the file system
        what = "parquet" if path.suffix.lower() == ".parquet" else "csv"
        raise DataError(f"{path} cannot be read as {what}: {one_line(error)}") from error


def _parquet(path: Path, options: Options) -> Any:
    with require_package("pyarrow.parquet", "reading parquet files").ParquetFile(path) as file:
        chosen = columns.choose(file.schema_arrow, options, str(path))
        return file.read(columns=chosen.names)


def _csv(path: Path) -> Any:
    csv = require_package("pyarrow.csv", "reading csv files")
    table = csv.read_csv(path, parse_options=csv.ParseOptions(newlines_in_values=True))
    return table.rename_columns(list(table.schema.names))  # fails here on a header that is not text


def _declared(schema: Any, y: str) -> list[str]:
    """List the names of the classes where the table carries them, as those written by `datasets` do."""
    stored = (schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(stored)["info"]["features"] if stored else {}
        names = features.get(y, {}).get("names")
    except (ValueError, KeyError, AttributeError, TypeError):  # it is a note in the file: without it we only know less
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


def _number(y: np.ndarray, classes: list[str], where: str) -> np.ndarray:
    index: Mapping[str, int] = {name: c for c, name in enumerate(classes)}
    for row, label in enumerate(y.tolist()):
        if label not in index:
            raise DataError(f"{where}, row {row}: the label {label!r} is none of the classes ({list_some(classes)})")
    return np.array([index[label] for label in y.tolist()], np.int64)
