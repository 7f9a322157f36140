"""The memory that a parquet file needs, from its metadata, before anything is unpacked."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from fedkeep.data.sources.common import Options

_ROWS = 65_536
_FEW_ROWS = 16
_WIDTH = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}  # bytes of a value; others: 4


def batch_rows(file: Any, names: Collection[str], options: Options, path: Path) -> int:
    """Return how many rows to read at a time; raise if these columns need more memory than allowed.

    A long text that is stored once and repeated in every row needs much more memory than the metadata tells. Where that
    is possible, only a few rows are read at a time, so that the reader can stop.
    """
    total, may_repeat = 0, False
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group)
        for i in range(rows.num_columns):
            chunk = rows.column(i)
            if chunk.path_in_schema.split(".")[0] not in names and chunk.path_in_schema not in names:
                continue
            total += max(chunk.total_uncompressed_size, chunk.num_values * _WIDTH.get(chunk.physical_type, 4))
            repeated = any("DICTIONARY" in encoding for encoding in chunk.encodings)
            if repeated and chunk.physical_type not in _WIDTH:
                may_repeat |= chunk.num_values * max(chunk.total_uncompressed_size, 1) > options.max_gb * 1e9
    options.require_memory(total, path)
    return _FEW_ROWS if may_repeat else _ROWS
