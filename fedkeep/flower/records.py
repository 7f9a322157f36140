"""Conversion of trees to Flower's messages and back, without pickle.

A branch of a tree becomes an `ArrayRecord` with the branch's name. Leaves at the top of the tree (a client's number of
examples, a learning rate) are sent together as safetensors bytes in the only `ConfigRecord`. So a method that sends
nothing but weights sends one `ArrayRecord` and one `ConfigRecord` each way, which is what Flower's own mods expect.

>>> import torch
>>> content = to_records({"params": {"w": torch.ones(2)}, "n": torch.tensor(5.0)}, {"round": 1})
>>> sorted(content.array_records), sorted(content.config_records[CONFIG])
(['params'], ['leaves', 'round'])
>>> from_records(content)
{'params': {'w': tensor([1., 1.])}, 'n': tensor(5.)}
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedkeep import tree
from fedkeep.errors import FedkeepError
from fedkeep.tree import Tree

CONFIG, LEAVES = "fedkeep", "leaves"
MAX_AXES = 32  # of an array in a message
ENTRY = 64  # bytes that an entry of a record counts besides its key and value: many small entries are large too
_NUMPY = "numpy.ndarray"
_LARGEST_AXIS = 2**40  # an array without elements can claim any size for its other axes
# What numpy writes before an array of numbers. Nothing else is read, so that no other parser sees a message.
_HEADER = re.compile(
    rb"\{'descr': '(\|b1|\|[iu]1|[<>][iu][248]|[<>]f[248])', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,19}, ?)*[0-9]{0,19})\), \} *\n"
)


def to_records(value: Tree, config: Mapping[str, Any] | None = None) -> RecordDict:
    """Return the content of a message with this tree and these config values."""
    branches: dict[str, dict[str, Array]] = {}
    top: dict[str, Tensor] = {}
    for path, leaf in sorted(tree.flatten(value).items()):
        name, slash, rest = path.partition("/")
        if slash and rest:
            branches.setdefault(name, {})[rest] = to_array(leaf)
        else:
            top[path] = leaf
    values = ConfigRecord(dict(config or {}))
    if top:
        values[LEAVES] = tree.to_bytes(tree.unflatten(top))
    return RecordDict({**{name: ArrayRecord(arrays) for name, arrays in branches.items()}, CONFIG: values})


def from_records(content: RecordDict) -> Tree:
    """Undo `to_records`; raise if the content is not a valid tree."""
    flat: dict[str, Tensor] = {}
    for name, arrays in content.array_records.items():
        for rest, array in arrays.items():
            flat[f"{name}/{rest}"] = from_array(array)
    leaves = content.config_records[CONFIG].get(LEAVES) if CONFIG in content.config_records else None
    if leaves is not None:
        flat.update(_top_leaves(leaves))
    try:
        return tree.unflatten(flat)
    except ValueError as error:
        raise FedkeepError(f"a message does not contain a valid tree: {error}") from error


def size(content: RecordDict) -> int:
    """Return the size in bytes of a message's content, without unpacking it: keys, arrays, lists and single values."""
    total = 0
    for name, record in content.items():
        total += ENTRY + len(name) + sum(ENTRY + len(key) + _value_size(value) for key, value in record.items())
    return total


def to_array(leaf: Tensor) -> Array:
    """Return a tensor as Flower's array; numpy has no bfloat16, so its bits are sent as int16."""
    leaf = leaf.detach().cpu().contiguous()
    half = leaf.dtype == torch.bfloat16
    array = Array((leaf.view(torch.int16) if half else leaf).numpy())
    return Array("bfloat16", array.shape, array.stype, array.data) if half else array


def from_array(array: Array) -> Tensor:
    """Undo `to_array`. The tensor is in torch's own aligned memory; elsewhere, sums may round differently.

    The header's size is compared with the bytes before memory is allocated, because a header can claim any size.
    """
    if array.stype != _NUMPY:
        raise FedkeepError(
            f"an array has the type {array.stype!r}, expected {_NUMPY!r}",
            key="stype",
            value=array.stype,
            valid=[_NUMPY],
        )
    shape, fortran, dtype, start = _read_header(array.data)
    body = memoryview(array.data)[start:]
    if len(body) != math.prod(shape) * dtype.itemsize:
        raise FedkeepError(f"an array's header says {dtype} {shape}, but it has {len(body)} bytes", key="header")
    values = np.frombuffer(body, dtype=dtype.newbyteorder("=") if dtype.isnative else dtype)
    ordered = values.reshape(shape, order="F" if fortran else "C")
    leaf = torch.from_numpy(np.array(ordered, dtype=dtype.newbyteorder("="), order="C")).clone()
    if array.dtype == "bfloat16":
        if leaf.dtype != torch.int16:
            raise FedkeepError(f"an array of bfloat16 must be sent as int16, not {leaf.dtype}", key="dtype")
        return leaf.view(torch.bfloat16)
    return leaf


def _top_leaves(data: Any) -> dict[str, Tensor]:
    if not isinstance(data, bytes):
        raise FedkeepError(f"{LEAVES} of a message must be bytes, not {type(data).__name__}", key=LEAVES)
    try:
        return tree.flatten(tree.from_bytes(data))
    except Exception as error:
        raise FedkeepError(f"{LEAVES} of a message cannot be read: {error}", key=LEAVES) from error


def _read_header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return an array's shape, order and dtype, and where its values start; raise unless numpy writes such a header."""
    width = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}.get(data[:8])
    if width is None:
        raise FedkeepError("an array does not start with the header of a numpy array", key="header")
    start = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    header = _HEADER.fullmatch(data[8 + width : min(start, 4096)])
    if header is None:
        raise FedkeepError("an array's header cannot be read", key="header")
    shape = tuple(int(size) for size in header[3].replace(b" ", b"").split(b",") if size)
    if len(shape) > MAX_AXES or max(shape, default=0) > _LARGEST_AXIS:
        raise FedkeepError(
            f"an array has {len(shape)} axes, of up to {max(shape)}: at most {MAX_AXES} of {_LARGEST_AXIS} are read",
            key="header",
        )
    return shape, header[2] == b"True", np.dtype(header[1].decode()), start


def _value_size(value: Any) -> int:
    if isinstance(value, Array):
        return len(value.data) + len(value.dtype) + len(value.stype) + 8 * len(value.shape)
    if isinstance(value, list):
        texts = bool(value) and isinstance(value[0], bytes | str)  # the elements of a record's list have one type
        return sum(map(len, value)) + 8 * len(value) if texts else 8 * len(value)
    return len(value) if isinstance(value, bytes | str) else 8
