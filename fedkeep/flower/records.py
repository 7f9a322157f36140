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

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor

from fedkeep import tree
from fedkeep.errors import FedkeepError
from fedkeep.tree import Tree

CONFIG, LEAVES = "fedkeep", "leaves"
_NUMPY = "numpy.ndarray"


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
    """Return the size in bytes of a message's arrays and config values, without unpacking them."""
    arrays = sum(len(a.data) for record in content.array_records.values() for a in record.values())
    config = sum(
        len(v) for record in content.config_records.values() for v in record.values() if isinstance(v, bytes | str)
    )
    return arrays + config


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
    buffer = io.BytesIO(array.data)
    try:
        version = npy.read_magic(buffer)
        shape, fortran, dtype = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version](buffer)
    except (ValueError, KeyError, EOFError, SyntaxError) as error:
        raise FedkeepError(f"an array's header cannot be read: {error}", key="header") from error
    body = memoryview(array.data)[buffer.tell() :]
    if dtype.kind not in "biuf" or dtype.itemsize > 8 or len(body) != math.prod(shape) * dtype.itemsize:
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
