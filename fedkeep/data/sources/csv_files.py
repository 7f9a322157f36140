"""Csv files: separated by commas, semicolons or tabs, packed or not."""

from __future__ import annotations

import codecs
import gzip
import logging
import zlib
from collections.abc import Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from fedkeep.data.sources.arrow_types import is_number, is_text
from fedkeep.data.sources.common import Options, require_package
from fedkeep.errors import DataError

log = logging.getLogger("fedkeep")

_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_WINDOWS = "windows-1252"  # what Excel writes in Western Europe, and a superset of the letters of Latin-1


def read(path: Path, options: Options, names: Sequence[str] = ()) -> Any:
    """Read a csv file; `names` are those of the columns if the file has no header.

    Where commas do not separate the cells, a column of numbers may have a decimal comma.
    """
    options.require_memory(path.stat().st_size, path)
    encoding = _find_encoding(path, options)
    separator = "," if names else _find_separator(path)
    table = _parse(path, options, names, encoding, separator)
    if separator != "," and (found := _decimal_commas(table)):
        other = _parse(path, options, names, encoding, separator, decimal_point=",")
        for i in found:
            if is_number(other.schema.types[i]):
                table = table.set_column(i, table.schema.names[i], other.column(i))
    return table


def header(path: Path) -> list[str]:
    """Return the first line of a csv file, packed or not, as its cells; at most 1,000 bytes of it are read."""
    return [cell.strip().strip('"') for cell in _first_line(path, 1000).split(",")]


def _parse(
    path: Path, options: Options, names: Sequence[str], encoding: str, separator: str, decimal_point: str = "."
) -> Any:
    csv = require_package("pyarrow.csv", "reading csv files")
    # Arrow's own handlers would replace ours while it reads, with a thread that can still run when the process ends
    require_package("pyarrow", "reading csv files").enable_signal_handlers(False)
    with _open(path, options) as source:
        table = csv.read_csv(
            source,
            csv.ReadOptions(column_names=list(names), encoding=encoding),
            csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            csv.ConvertOptions(decimal_point=decimal_point),
        )
    options.require_memory(table.nbytes, path)
    return table


def _find_encoding(path: Path, options: Options) -> str:
    """Return how the text of a file is encoded: UTF-8, UTF-16 if it begins with its mark, else windows-1252."""
    with _open(path, options) as file:
        start = file.read(2)
        if start in _UTF16_MARKS:
            return "utf-16"
        if _can_decode(file, "utf-8", start):
            return "utf-8"
    with _open(path, options) as file:
        if not _can_decode(file, _WINDOWS):
            raise DataError(f"{path} is neither UTF-8 nor {_WINDOWS} text: save it as UTF-8", key=str(path))
    log.warning("%s is not UTF-8, so it is read as %s; if letters are wrong, save it as UTF-8", path, _WINDOWS)
    return _WINDOWS


def _can_decode(file: BufferedIOBase, encoding: str, start: bytes = b"") -> bool:
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        decoder.decode(start)
        while data := file.read(2**20):
            decoder.decode(data)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _open(path: Path, options: Options) -> BufferedIOBase:
    """Open a csv file, packed or not, to read its bytes."""
    return _LimitedGzip(path, options) if path.name.lower().endswith(".gz") else path.open("rb")


def _first_line(path: Path, most: int) -> str:
    """Return the first line of a csv file, packed or not, as far as it is within the first bytes."""
    with path.open("rb") as file:
        start = file.read(4 * most)
    if path.name.lower().endswith(".gz"):
        try:
            start = zlib.decompressobj(wbits=31).decompress(start, most)
        except zlib.error:  # whoever reads the whole file says so
            return ""
    text = start[:most].decode("utf-16" if start[:2] in _UTF16_MARKS else "utf-8", errors="replace")
    return text.partition("\n")[0]


def _find_separator(path: Path) -> str:
    """Return what separates the cells of a csv file.

    Tabs separate a .tsv file, semicolons a file whose first line has them and no comma: many programs write it so where
    numbers have a decimal comma.
    """
    if path.name.lower().endswith((".tsv", ".tsv.gz")):
        return "\t"
    first = _first_line(path, 16_384)
    if "," in first or not (";" in first or "\t" in first):
        return ","
    return ";" if ";" in first else "\t"


def _decimal_commas(table: Any) -> list[int]:
    """Return the columns of text of which some cell is a number with a decimal comma."""
    compute = require_package("pyarrow.compute", "reading csv files")
    return [
        i
        for i, column in enumerate(table.columns)
        if is_text(column.type) and compute.any(compute.match_substring_regex(column, r"^\s*[+-]?\d*,\d+")).as_py()
    ]


class _LimitedGzip(gzip.GzipFile):
    """A packed file that is read up to the limit on memory."""

    def __init__(self, path: Path, options: Options) -> None:
        super().__init__(path, mode="rb")
        self._options, self._path, self._size = options, path, 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(min(size, 2**24) if size and size > 0 else 2**24)
        self._size += len(data)
        self._options.require_memory(self._size, self._path)
        return data
