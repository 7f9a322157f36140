"""Csv files: separated by commas, semicolons or tabs, packed or not."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from fedkeep.data.sources.common import Options, require_package


def read(path: Path, options: Options, names: Sequence[str] = ()) -> Any:
    """Read a csv file; `names` are those of the columns if the file has no header."""
    csv = require_package("pyarrow.csv", "reading csv files")
    options.require_memory(path.stat().st_size, path)
    with path.open("rb") as file, ExitStack() as stack:
        packed = path.name.lower().endswith(".gz")
        source = stack.enter_context(_LimitedGzip(file, options, path)) if packed else file
        separator, point = (",", ".") if names else _csv_form(path)
        table = csv.read_csv(
            source,
            csv.ReadOptions(column_names=list(names)),
            csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            csv.ConvertOptions(decimal_point=point),
        )
    options.require_memory(table.nbytes, path)
    return table.rename_columns(list(table.schema.names))  # raises an error here if the header is not text


def header(path: Path) -> list[str]:
    """Return the first line of a csv file, packed or not, as its cells; at most 1,000 bytes of it are read."""
    return [cell.strip().strip('"') for cell in _first_lines(path, 1000).partition("\n")[0].split(",")]


def _first_lines(path: Path, most: int) -> str:
    """Return the first bytes of a csv file, packed or not, as text."""
    with path.open("rb") as file:
        start = file.read(4 * most)
    if path.name.lower().endswith(".gz"):
        try:
            start = zlib.decompressobj(wbits=31).decompress(start, most)
        except zlib.error:  # whoever reads the whole file says so
            return ""
    return start[:most].decode(errors="replace")


def _csv_form(path: Path) -> tuple[str, str]:
    """Return what separates the cells of a csv file, and its decimal point.

    Tabs separate a .tsv file, semicolons a file whose first line has them and no comma: many programs write it so where
    numbers have a decimal comma.
    """
    if path.name.lower().endswith((".tsv", ".tsv.gz")):
        return "\t", "."
    first, _, rest = _first_lines(path, 16_384).partition("\n")
    if "," in first or not (";" in first or "\t" in first):
        return ",", "."
    separator = ";" if ";" in first else "\t"
    has_decimal_comma = re.search(rf"(^|[{separator}\n])-?\d+,\d+([{separator}\r\n]|$)", rest)
    return separator, "," if has_decimal_comma else "."


class _LimitedGzip(gzip.GzipFile):
    """A packed file that is read up to the limit on memory."""

    def __init__(self, file: IO[bytes], options: Options, path: Path) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._options, self._path, self._size = options, path, 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(min(size, 2**24) if size and size > 0 else 2**24)
        self._size += len(data)
        self._options.require_memory(self._size, self._path)
        return data
