"""Large tables of counts in records: numpy arrays in memory, compressed in files.

The confusion matrix of 1,000 classes is three megabytes as JSON text, and mostly zeros. A table of more than 1,024
numbers is stored as {"zlib": base64, "shape": [...], "dtype": "int32"}; smaller ones stay lists, for human readers.
"""

from __future__ import annotations

import base64
import math
import zlib
from typing import Any

import numpy as np

LARGEST_LIST = 1024  # numbers
LARGEST_TABLE = 1 << 30  # bytes, unpacked
_KEYS = {"zlib", "shape", "dtype"}
_DTYPES = ("int32", "int64")


def as_table(counts: Any) -> Any:
    """Return counts as a record holds them: nested lists, or an array if there are many.

    >>> as_table(np.eye(2, dtype=np.int64)), as_table(np.zeros((40, 40), dtype=np.int64)).dtype
    ([[1, 0], [0, 1]], dtype('int32'))
    """
    array = np.asarray(counts)
    if array.size <= LARGEST_LIST:
        return array.tolist()
    return array.astype(np.int32 if array.max() <= np.iinfo(np.int32).max else np.int64)


def pack(value: Any) -> Any:
    """Return a numpy array as JSON data; for `default` of `json.dumps`."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a record cannot hold a {type(value).__name__}")
    table = as_table(value)
    if isinstance(table, list):
        return table
    data = base64.b64encode(zlib.compress(np.ascontiguousarray(table).tobytes())).decode()
    return {"zlib": data, "shape": list(table.shape), "dtype": str(table.dtype)}


def unpack(value: Any) -> Any:
    """Undo `pack`; anything else is returned as it is. Raise `ValueError` if the data is damaged."""
    if not isinstance(value, dict) or value.keys() != _KEYS:
        return value
    shape, dtype = value["shape"], value["dtype"]
    if dtype not in _DTYPES or not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
        raise ValueError(f"a table of type {dtype} and shape {shape}")
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if n_bytes > LARGEST_TABLE:
        raise ValueError(f"a table of {n_bytes} bytes; at most {LARGEST_TABLE} are read")
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(value["zlib"], validate=True), n_bytes + 1)
    except (zlib.error, TypeError, ValueError) as error:
        raise ValueError(f"a table that cannot be decompressed ({error})") from error
    if len(data) != n_bytes:
        raise ValueError(f"a table of {len(data)} bytes instead of {n_bytes}")
    return np.frombuffer(data, dtype=dtype).reshape(shape)
