"""Tables: parquet, csv and JSON Lines files, with columns for examples, classes and ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep._util.text import list_some, one_line
from fedkeep.data.labels import number_texts
from fedkeep.data.sources import columns, csv_files, parquet
from fedkeep.data.sources.arrow_types import is_text
from fedkeep.data.sources.categories import feature_names
from fedkeep.data.sources.choice import Chosen, choose, leave_out_by_content, log_choice, require_columns
from fedkeep.data.sources.common import Missing, Options, Part, Raw, require_package
from fedkeep.data.sources.images import same_channels
from fedkeep.errors import DataError

SUFFIXES = (".parquet", ".csv", ".csv.gz", ".tsv", ".tsv.gz", ".jsonl")
OPTIONS = ("x", "y", "classes", "text", "ids", "size", "tokenizer", "max_length")
_TEST_PREFIXES = ("test", "val", "dev")
_SHARD = re.compile(r"[a-z]+[-_.]?\d+", re.IGNORECASE)


@dataclass(frozen=True)
class Table:
    """An Arrow table, its name for messages, and the folder in which the images are that it names.

    Without a folder, the images may be anywhere: those of a Hugging Face data set are in its cache.
    """

    arrow: Any
    name: str
    folder: Path | None = None
    first_line: int | None = None  # of the file, that row 0 is on, if it is one file of text

    def place(self, row: int) -> str:
        """Return where a row is, for a message: its line in a file of text, the first of which is line 1."""
        if self.first_line is None:
            return f"row {row}"
        compute = require_package("pyarrow.compute", "reading tables")
        text = [column.slice(0, row) for column in self.arrow.columns if is_text(column.type)]
        breaks = sum(compute.sum(compute.count_substring(column, "\n")).as_py() or 0 for column in text)
        return f"line {self.first_line + row + breaks}"


def is_table(path: Path) -> bool:
    """Return whether a file is a table, by its suffix."""
    return path.name.lower().endswith(SUFFIXES)


def recognises(path: Path) -> bool:
    """Return whether a folder, or its subfolder data, contains tables for training."""
    return bool(_list_shards(path, "train"))


def read_folder(path: Path, options: Options) -> Raw:
    """Read the tables of a folder whose names begin with train, and with test, val or dev; shards are joined."""
    train, test = find_files(path)
    return read_files(train, test, options, path.name)


def find_files(path: Path) -> tuple[list[Path], list[Path] | None]:
    """Return the tables of a folder to train on, whose names begin with train, and those to test on, if any."""
    tests = (_list_shards(path, prefix) for prefix in _TEST_PREFIXES)
    return _list_shards(path, "train"), next((paths for paths in tests if paths), None)


def read_files(train: Sequence[Path], test: Sequence[Path] | None, options: Options, name: str | None = None) -> Raw:
    """Read the training and the test table, each from one or several files."""
    options.reject_except("a table", *OPTIONS, "test", "first_label")
    table = read(train, options)
    chosen = choose_columns(table, options)  # the test table uses the columns chosen for training
    test_table = None if test is None else _read_test(test, replace(options, x=chosen.x, text=None, y=chosen.y))
    return from_tables(table, test_table, options, name or train[0].name.partition(".")[0], chosen)


def _read_test(paths: Sequence[Path], options: Options) -> Table:
    """Read the test table; the column of the owners may be missing."""
    try:
        return read(paths, options)
    except DataError as error:
        if error.key != "ids" or options.ids in (error.valid or [options.ids]):
            raise
        return read(paths, replace(options, ids=None))


def choose_columns(table: Table, options: Options) -> Chosen:
    """Return the columns that a table is used with."""
    return leave_out_by_content(table, choose(table.arrow.schema, options, table.name))


def from_tables(train: Table, test: Table | None, options: Options, name: str, chosen: Chosen | None = None) -> Raw:
    """Return the examples and classes of tables. Classes that are text are numbered in alphabetical order."""
    if test is not None:
        options.reject_test_share(name)
    for table in (train, test):
        if table is not None and not table.arrow.num_rows:
            raise DataError(f"{table.name} has no rows", key=table.name)
    chosen = chosen or choose_columns(train, options)
    if test is not None:
        owners = chosen.ids if chosen.ids in test.arrow.schema.names else None
        require_columns(test.arrow.schema, replace(chosen, ids=owners), test.name)
    log_choice(chosen, train.name)
    (y, y_test), names = _number_labels(train, test, chosen, options)
    found = columns.categories(train, chosen, options)
    x = columns.inputs(train, chosen, options, found)
    ids = None if chosen.ids is None else columns.id_column(train, chosen.ids)
    is_table = isinstance(x, np.ndarray) and x.ndim == 2 and len(feature_names(chosen.x, found)) == x.shape[1]
    features = feature_names(chosen.x, found) if is_table else None
    raw = Raw(Part(x, y, ids), None, name, names and len(names), class_names=names, feature_names=features)
    if test is None or y_test is None:
        return raw
    x_test = columns.inputs(test, chosen, options, found, like=x)
    if isinstance(x, np.ndarray) and isinstance(x_test, np.ndarray) and x.ndim == x_test.ndim == 4:
        x, x_test = same_channels(x, x_test)
    return replace(raw, train=Part(x, y, ids), test=Part(x_test, y_test, _test_owners(test, chosen.ids, ids)))


def _test_owners(test: Table, name: str | None, ids: np.ndarray | None) -> np.ndarray | None:
    """Return the owners of the test examples; None if the test table does not have them."""
    if name is None or ids is None or name not in test.arrow.schema.names:
        return None
    owners = columns.id_column(test, name)
    if (owners.dtype.kind == "O") != (ids.dtype.kind == "O"):
        kinds = ["texts" if array.dtype.kind == "O" else "numbers" for array in (ids, owners)]
        message = f"{test.name}: the owners {name!r} are {kinds[1]}, but {kinds[0]} in the training table"
        raise DataError(message, key="ids", value=name)
    return owners


def _number_labels(
    train: Table, test: Table | None, chosen: Chosen, options: Options
) -> tuple[tuple[np.ndarray, np.ndarray | None], list[str] | None]:
    """Return the classes of both tables as numbers, and the names of the classes, if the table has them."""
    names = _declared_classes(train.arrow.schema, chosen.y)
    if names and options.classes is not None and list(options.classes) != names:
        raise DataError(
            f"{train.name}: classes does not apply, because the column {chosen.y!r} has its own ({list_some(names)})",
            key="classes",
            value=list(options.classes),
            valid=names,
        )
    names = names or list(options.classes or ())
    y, y_test = columns.labels(train, chosen.y), None if test is None else columns.labels(test, chosen.y)
    if y.dtype.kind in "UO":
        names = names or np.unique(y).tolist()
        y = number_texts(y, names, train.name, train.place).numpy()
        y_test = None if test is None or y_test is None else number_texts(y_test, names, test.name, test.place).numpy()
    elif columns.is_boolean(train, chosen.y):
        names = names or ["False", "True"]
    return (y, y_test), names or None


def _list_shards(path: Path, prefix: str) -> list[Path]:
    """Return the tables whose names begin with a prefix: one file, or numbered shards.

    They are in the folder or else in its subfolder data. Parquet files have precedence over csv.
    """
    for folder in (path, path / "data"):
        tables = [p for p in sorted(folder.iterdir()) if p.is_file() and is_table(p)] if folder.is_dir() else []
        shards = [p for p in tables if p.name.lower().startswith(prefix)]
        shards = [p for p in shards if p.suffix.lower() == ".parquet"] or shards
        if len(shards) > 1 and not all(_SHARD.match(p.name) for p in shards):
            names = [p.name for p in shards]
            raise DataError(
                f"{folder} contains several tables whose names begin with {prefix}: {list_some(names)}; pass the files "
                "themselves: load((train, test))",
                key=str(folder),
                value=names,
            )
        if shards:
            return shards
    return []


def read(paths: Sequence[Path], options: Options, names: Sequence[str] = ()) -> Table:
    """Read a table, from one or several files; `names` are those of the columns of csv files without header."""
    arrow = require_package("pyarrow", "reading parquet and csv files")
    tables = [_read_one(path, options, names) for path in paths]
    if len({tuple(table.schema.names) for table in tables}) > 1:
        raise DataError(
            f"{list_some([str(p) for p in paths])} have different columns, so they are not shards of one table",
            key=str(paths[0]),
            value=[list(table.schema.names) for table in tables],
        )
    try:
        whole = tables[0] if len(tables) == 1 else arrow.concat_tables(tables, promote_options="permissive")
    except (arrow.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"{list_some([str(p) for p in paths])} are not shards of one table: {one_line(error)}", key=str(paths[0])
        ) from error
    is_text_file = len(paths) == 1 and paths[0].suffix.lower() != ".parquet"
    has_header = not names and paths[0].suffix.lower() != ".jsonl"
    return Table(whole, str(paths[0]), paths[0].parent, (2 if has_header else 1) if is_text_file else None)


def from_columns(columns: Mapping[str, Any], name: str) -> Table:
    """Return a table of columns in memory."""
    return Table(require_package("pyarrow", "reading tables").table(dict(columns)), name)


def _read_one(path: Path, options: Options, names: Sequence[str] = ()) -> Any:
    if not path.is_file():
        raise Missing(f"there is no file {path}", key=str(path))
    if not is_table(path):
        raise DataError(
            f"{path} is not a table (valid: {', '.join(SUFFIXES)})", key=str(path), value=path.suffix, valid=SUFFIXES
        )
    try:
        table = _read_kind(path, options, names)
        table.validate(full=True)  # otherwise damaged text would raise an error only where it is used
        return table
    except DataError:
        raise
    except Exception as error:  # Arrow's errors have no base class in common with those of the file system
        kind = {".parquet": "parquet", ".jsonl": "JSON Lines"}.get(path.suffix.lower(), "csv")
        raise DataError(f"{path} cannot be read as {kind}: {one_line(error)}", key=str(path)) from error


def _read_kind(path: Path, options: Options, names: Sequence[str]) -> Any:
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path, options)
    return _read_jsonl(path, options) if path.suffix.lower() == ".jsonl" else csv_files.read(path, options, names)


def _read_parquet(path: Path, options: Options) -> Any:
    with require_package("pyarrow.parquet", "reading parquet files").ParquetFile(path) as file:
        schema = file.schema_arrow
        chosen = choose(schema, options, str(path))
        batches, size = [], 0
        for batch in file.iter_batches(parquet.batch_rows(file, chosen.names, options, path), columns=chosen.names):
            batches.append(batch)
            size += batch.nbytes
            options.require_memory(size, path)
        arrow = require_package("pyarrow", "reading parquet files")
        empty = arrow.schema([field for field in schema if field.name in chosen.names])
        table = arrow.Table.from_batches(batches) if batches else empty.empty_table()
        return table.replace_schema_metadata(schema.metadata)


def _read_jsonl(path: Path, options: Options) -> Any:
    """Read one JSON object per line."""
    json_reader = require_package("pyarrow.json", "reading JSON Lines files")
    size = path.stat().st_size
    options.require_memory(size, path)
    one_block = json_reader.ReadOptions(block_size=min(max(size + 1, 2**20), 2**31 - 1))  # a line may be long
    table = json_reader.read_json(path, one_block)
    options.require_memory(table.nbytes, path)
    return table


def _declared_classes(schema: Any, y: str) -> list[str]:
    """Return the class names stored in the table's metadata, as written by `datasets`; empty if there are none."""
    stored = (schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(stored)["info"]["features"] if stored else {}
        names = features.get(y, {}).get("names")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):  # the metadata is optional
        return []
    return [str(name) for name in names] if isinstance(names, list) else []
