"""Tables as files: CSV, or Parquet with the extra `data`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from fedkeep.errors import FedkeepError, nearest
from fedkeep.extras import need
from fedkeep.store import write_atomic

SUFFIXES = (".csv", ".parquet")
_TEXT = ("run", "method", "measure")
_WHOLE = ("seed", "round", "class", "client")


def check(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is read."""
    if path.suffix.lower() not in SUFFIXES:
        raise FedkeepError(f"{path.name} is neither CSV nor Parquet: {nearest(path.suffix.lower(), SUFFIXES)}")
    if not path.parent.is_dir():
        raise FedkeepError(f"there is no folder {path.parent} to write {path.name} in")
    if path.suffix.lower() == ".parquet":
        need("pyarrow.parquet", "data", "Parquet")


def write(path: str | Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> int:
    """Write rows into a file, whole or not at all, and return how many there were."""
    path = Path(path)
    check(path)
    rows = list(rows)
    buffer = io.BytesIO()
    if path.suffix.lower() == ".csv":
        text = io.TextIOWrapper(buffer, encoding="utf-8", newline="")
        as_csv(text, columns, rows)
        text.flush()
    else:
        _parquet(buffer, columns, rows)
    write_atomic(path, buffer.getvalue())
    return len(rows)


def as_csv(file: IO[str], columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as CSV into an open file; what a row lacks is empty. Return how many there were."""
    out = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    out.writeheader()
    number = 0
    for row in rows:
        out.writerow(row)
        number += 1
    return number


def _parquet(buffer: io.BytesIO, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    arrow, parquet = need("pyarrow", "data", "Parquet"), need("pyarrow.parquet", "data", "Parquet")

    def kind(name: str) -> Any:
        return arrow.string() if name in _TEXT else arrow.int64() if name in _WHOLE else arrow.float64()

    arrays = [arrow.array([row.get(name) for row in rows], kind(name)) for name in columns]
    parquet.write_table(arrow.table(arrays, names=list(columns)), buffer)
