"""Trees as files: safetensors with a checksum over names, types, shapes, values and metadata. Never a pickle."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import torch

from fedkeep import tree
from fedkeep.runs.files import require_regular, write_atomic
from fedkeep.runs.seals import checksum, damaged, foreign
from fedkeep.tree import Tree

_FORMAT_1, _ABOUT, _ABOUT_CHECK, _CHECK = "fedkeep", "fedkeep.about", "fedkeep.about-checksum", "fedkeep.checksum"


def write_tree(path: Path, value: Tree, about: dict[str, Any], run: str | None = None, private: bool = False) -> None:
    """Write a tree of a run, with `about` as JSON in the safetensors header. Without a run's id it has format 1."""
    import safetensors.torch

    flat = tree.to_cpu_copies(value)
    if run is None:
        header = {_FORMAT_1: json.dumps({"about": about, "crc32": _crc32(flat)})}
    else:
        text = json.dumps({"run": run, **about})
        header = {_ABOUT: text, _ABOUT_CHECK: checksum(text.encode()), _CHECK: _checksum(flat, text)}
    write_atomic(path, safetensors.torch.save(flat, metadata=header), private)


def read_tree(path: Path, run: str | None = None) -> tuple[Tree, dict[str, Any]]:
    """Return the tree and the metadata that `write_tree` wrote; raise if the file is damaged or of another run."""
    flat, header = _read(path, with_tensors=True)
    about = _about(path, header, run)
    if run is None:
        intact = _crc32(flat) == _parse(path, header)["crc32"]
    else:
        intact = _checksum(flat, header[_ABOUT]) == header.get(_CHECK)
    if not intact:
        raise damaged(str(path), path.name, "its contents do not match the checksum")
    try:
        return tree.unflatten(flat), about
    except ValueError as error:
        raise damaged(str(path), path.name, str(error)) from error


def read_about(path: Path, run: str | None = None) -> dict[str, Any]:
    """Return the metadata of a tree, without reading the tree; raise if it is damaged or of another run."""
    return _about(path, _read(path, with_tensors=False)[1], run)


def is_format_1(path: Path) -> bool:
    """Return whether a tree was written in format 1, without the id of its run."""
    return _FORMAT_1 in _read(path, with_tensors=False)[1]


def require_whole_numbers(path: Path, about: dict[str, Any], *names: str) -> list[int]:
    """Return these entries of a tree's metadata; raise if one is missing or not a whole number from 0 on."""
    values = [about.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise damaged(str(path), path.name, f"its {name} is {value!r}")
    return values  # type: ignore[return-value]


def _read(path: Path, with_tensors: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    import safetensors

    require_regular(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            # Cloned: torch's own memory is aligned, the file's is not, and sums can depend on alignment.
            names = file.keys() if with_tensors else ()
            return {name: file.get_tensor(name).clone() for name in names}, header
    except Exception as error:
        raise damaged(str(path), path.name, f"it cannot be read ({' '.join(str(error).split())})") from error


def _about(path: Path, header: dict[str, str], run: str | None) -> dict[str, Any]:
    if run is None and _ABOUT not in header:
        return _parse(path, header)["about"]  # type: ignore[no-any-return]
    text = header.get(_ABOUT, "")
    if checksum(text.encode()) != header.get(_ABOUT_CHECK):
        raise damaged(str(path), path.name, "its header was changed or has no checksum")
    about: dict[str, Any] = json.loads(text)
    if (owner := about.pop("run")) != run:
        raise foreign(str(path), path.name, owner, run or "without an id")
    return about


def _parse(path: Path, header: dict[str, str]) -> dict[str, Any]:
    """Return the header of format 1."""
    try:
        value = json.loads(header[_FORMAT_1])
        if isinstance(value["about"], dict) and isinstance(value["crc32"], int):
            return value  # type: ignore[no-any-return]
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    raise damaged(str(path), path.name, "its header has no checksum")


def _checksum(flat: dict[str, torch.Tensor], about: str) -> str:
    total = hashlib.sha256(about.encode())
    for name in sorted(flat):
        total.update(f"\0{name}\0{flat[name].dtype}\0{list(flat[name].shape)}\0".encode())
        total.update(flat[name].reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()[:32]


def _crc32(flat: dict[str, torch.Tensor]) -> int:
    """Return the checksum of format 1: over names and bytes, neither types, shapes nor metadata."""
    total = 0
    for name in sorted(flat):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(flat[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return total
