"""Files of a run folder: their names, atomic writes, trees with a checksum. Never a pickle.

A file is written next to its final place, synced, and renamed into it. A process killed at any time leaves either the
old file or the new one. Trees carry a checksum, so a damaged file is reported instead of used.
"""

from __future__ import annotations

import json
import numbers
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from fedkeep import tree
from fedkeep.errors import RunError
from fedkeep.tree import Tree

FORMAT = 1
EXPERIMENT, ROUNDS, CHECKPOINT, CLIENTS = "experiment.toml", "rounds.jsonl", "checkpoint.safetensors", "clients"
DIVERGED, INSTRUMENTS, SPLIT, LOCK = "diverged.txt", "instruments.jsonl", "split.json", ".lock"


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it exists completely or not at all."""
    partial = path.with_name(f".{path.name}.part")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(
            f"{path} could not be written ({error.strerror}); the previous file is intact", key=path.name
        ) from error
    _sync_folder(path.parent)


def write_tree(path: Path, value: Tree, metadata: dict[str, Any] | None = None) -> None:
    """Write a tree, with `metadata` stored as JSON in the safetensors header."""
    import safetensors.torch

    flat = tree.to_cpu_copies(value)
    header = {"fedkeep": json.dumps({"about": metadata or {}, "crc32": _checksum(flat)})}
    write_atomic(path, safetensors.torch.save(flat, metadata=header))


def read_tree(path: Path) -> tuple[Tree, dict[str, Any]]:
    """Return the tree and the metadata that `write_tree` wrote; raise if the file is damaged."""
    import safetensors
    import safetensors.torch

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["fedkeep"])
            # Cloned: torch's own memory is aligned, the file's is not, and sums can depend on alignment.
            flat = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise RunError(f"{path} does not exist", key=path.name) from None
    except Exception as error:
        raise RunError(
            f"{path} is damaged or truncated and cannot be read ({error}); it was not changed", key=path.name
        ) from error
    if _checksum(flat) != header["crc32"]:
        raise RunError(f"{path} is damaged: its contents do not match the checksum; it was not changed", key=path.name)
    return tree.unflatten(flat), header["about"]


def to_toml(table: Mapping[str, Any]) -> bytes:
    """Return a table as TOML. None is left out, since TOML has no null; numpy's numbers become Python's.

    >>> print(to_toml({"seed": 0, "clip": None, "train": {"lr": 0.1}}).decode(), end="")
    seed = 0
    <BLANKLINE>
    [train]
    lr = 0.1
    """
    return tomli_w.dumps(_toml_value(table)).encode()


def fingerprint(*values: Any) -> str:
    """Return a short checksum of arrays and trees of tensors, to recognise them later."""
    total = 0
    for value in values:
        for path, leaf in tree.items(value):
            array = np.ascontiguousarray(leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf)
            total = zlib.crc32(f"{path}{array.shape}{array.dtype}".encode(), total)
            total = zlib.crc32(array.reshape(-1).view(np.uint8).data, total)
    return f"{total:08x}"


def _toml_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _toml_value(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_toml_value(item) for item in value]
    if isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"an experiment file cannot store a {type(value).__name__}: {value!r}")


def _checksum(flat: dict[str, torch.Tensor]) -> int:
    """Return the checksum that format 1 stores with a tree: over names and bytes, not shapes."""
    total = 0
    for name in sorted(flat):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(flat[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return total


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that a rename survives a power cut, where the system supports it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
