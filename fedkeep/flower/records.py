"""Trees in Flower's messages, both ways, without a pickle.

A branch of a tree becomes an `ArrayRecord` of its name; loose leaves (a client's number of examples, a learning rate)
travel together as safetensors bytes in the one `ConfigRecord`. So a method that moves the weights alone sends exactly
one `ArrayRecord` and one `ConfigRecord` each way, which is what Flower's own mods expect.

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
    """Put a tree, and what is to be said beside it, into the content of a message."""
    branches: dict[str, dict[str, Array]] = {}
    loose: dict[str, Tensor] = {}
    for path, leaf in sorted(tree.flatten(value).items()):
        name, slash, rest = path.partition("/")
        if slash and rest:
            branches.setdefault(name, {})[rest] = to_array(leaf)
        else:
            loose[path] = leaf
    said = ConfigRecord(dict(config or {}))
    if loose:
        said[LEAVES] = tree.to_bytes(tree.unflatten(loose))
    return RecordDict({**{name: ArrayRecord(arrays) for name, arrays in branches.items()}, CONFIG: said})


def from_records(content: RecordDict) -> Tree:
    """Undo `to_records`; what cannot be a tree is refused with the reason."""
    flat: dict[str, Tensor] = {}
    for name, arrays in content.array_records.items():
        for rest, array in arrays.items():
            flat[f"{name}/{rest}"] = from_array(array)
    leaves = content.config_records[CONFIG].get(LEAVES) if CONFIG in content.config_records else None
    if leaves is not None:
        flat.update(_loose(leaves))
    try:
        return tree.unflatten(flat)
    except ValueError as error:
        raise FedkeepError(f"a message holds no tree: {error}") from error


def size(content: RecordDict) -> int:
    """Count the bytes of a message's arrays and leaves, before anything of it is unpacked."""
    arrays = sum(len(a.data) for record in content.array_records.values() for a in record.values())
    told = sum(
        len(v) for record in content.config_records.values() for v in record.values() if isinstance(v, bytes | str)
    )
    return arrays + told


def to_array(leaf: Tensor) -> Array:
    """Turn a tensor into Flower's array; numpy has no bfloat16, so its bits travel as whole numbers."""
    leaf = leaf.detach().cpu().contiguous()
    half = leaf.dtype == torch.bfloat16
    array = Array((leaf.view(torch.int16) if half else leaf).numpy())
    return Array("bfloat16", array.shape, array.stype, array.data) if half else array


def from_array(array: Array) -> Tensor:
    """Undo `to_array`, in torch's own memory: where it lies elsewhere, sums may round otherwise.

    The bytes are checked against their own header before room is made for them: a header can claim any size.
    """
    if array.stype != _NUMPY:
        raise FedkeepError(f"an array is packed as {array.stype!r}, not as {_NUMPY!r}")
    buffer = io.BytesIO(array.data)
    try:
        version = npy.read_magic(buffer)
        shape, fortran, dtype = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version](buffer)
    except (ValueError, KeyError, EOFError, SyntaxError) as error:
        raise FedkeepError(f"an array's header cannot be read: {error}") from error
    body = memoryview(array.data)[buffer.tell() :]
    if dtype.kind not in "biuf" or dtype.itemsize > 8 or len(body) != math.prod(shape) * dtype.itemsize:
        raise FedkeepError(f"an array claims {dtype} {shape} and holds {len(body)} bytes")
    values = np.frombuffer(body, dtype=dtype.newbyteorder("=") if dtype.isnative else dtype)
    ordered = values.reshape(shape, order="F" if fortran else "C")
    leaf = torch.from_numpy(np.array(ordered, dtype=dtype.newbyteorder("="), order="C")).clone()
    if array.dtype == "bfloat16":
        if leaf.dtype != torch.int16:
            raise FedkeepError("an array claims bfloat16 and holds something else")
        return leaf.view(torch.bfloat16)
    return leaf


def _loose(data: Any) -> dict[str, Tensor]:
    if not isinstance(data, bytes):
        raise FedkeepError(f"the loose leaves of a message are bytes, not {type(data).__name__}")
    try:
        return tree.flatten(tree.from_bytes(data))
    except Exception as error:
        raise FedkeepError(f"the loose leaves of a message cannot be read: {error}") from error
