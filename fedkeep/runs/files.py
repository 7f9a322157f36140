"""Files of a run folder: their names, atomic writes, and what makes them survive a power cut. Never a pickle.

A file is written next to its final place, synced, and renamed into it. A process killed at any time leaves either the
old file or the new one. A folder is synced when one of its entries has changed. Nothing here follows a symbolic link
in order to write or to delete.
"""

from __future__ import annotations

import contextlib
import numbers
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from fedkeep import tree
from fedkeep.errors import RunError

FORMAT, READABLE_FORMATS = 2, (1, 2)
EXPERIMENT, ROUNDS, CLIENTS, ABANDONED = "experiment.toml", "rounds.jsonl", "clients", "abandoned"
FEDERATION, EXTENDED = "federation.json", "extended.json"
LOG_CSV, TENSORBOARD, WANDB, TRACE = "log.csv", "tensorboard", "wandb", "trace.json.gz"  # of loggers, if there are any
DIVERGED, INSTRUMENTS, SPLIT, LOCK, ENDED = "diverged.txt", "instruments.jsonl", "split.json", ".lock", "ended.json"

_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
PARTIAL = r"\.fedkeep-[0-9a-f]{16}\.part"  # temporary files
_PARTIAL = re.compile(  # also those of format 1, which have the names of its files
    PARTIAL + r"|\.(experiment\.toml|(rounds|instruments)\.jsonl|split\.json|diverged\.txt"
    r"|(checkpoint|\d+(-\d+)?)\.safetensors)\.part"
)


def write_atomic(path: Path, data: bytes, private: bool = False) -> None:
    """Write a file so that it exists completely or not at all. A link, folder or device in its place is refused.

    Every output of fedkeep is written by this function. A private file can be read by its owner alone.
    """
    require_replaceable(path)
    partial = path.with_name(f".fedkeep-{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _CLOEXEC
    try:
        handle = os.open(partial, flags, _PRIVATE_FILE if private else 0o666)
        try:
            write_all(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise RunError(
            f"{path} could not be written ({error.strerror}); a previous file is intact", key=path.name
        ) from error
    sync_folder(path.parent)


def require_replaceable(path: Path) -> None:
    """Raise if an output's path is a link, a folder, a device or a pipe; a missing or regular file may be replaced."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"{path} could not be written ({error.strerror})", key=path.name, value=str(path)) from error
    if not stat.S_ISREG(mode):
        raise RunError(
            f"{path} is {_kind(mode)}, not a regular file: it is not overwritten; choose another path",
            key=path.name,
            value=str(path),
        )


def write_all(handle: int, data: bytes) -> None:
    """Write all bytes to an open file, even if the system takes them in parts."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def open_to_append(path: Path) -> int:
    """Open a file for appending and return its handle; a link, folder, device or pipe is refused."""
    require_replaceable(path)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | _NOFOLLOW | _CLOEXEC | _NONBLOCK
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        raise RunError(f"{path} could not be opened for writing ({error.strerror})", key=path.name) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise RunError(f"{path} is not a regular file", key=path.name, value=str(path))
    return handle


def read_bytes(path: Path) -> bytes:
    """Return a file's contents; raise `RunError` if it is missing, unreadable, or no regular file."""
    require_regular(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}", key=path.name, value=str(path)) from error


def require_regular(path: Path) -> None:
    """Raise unless the path is a regular file, or a link to one. A pipe would make a reader wait forever."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise RunError(f"{path} does not exist", key=path.name, value=str(path)) from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}", key=path.name, value=str(path)) from error
    if not stat.S_ISREG(mode):
        raise RunError(f"{path} is {_kind(mode)}, not a file", key=path.name, value=str(path))


def is_there(path: Path) -> bool:
    """Return whether anything has this name: a file, a folder, or a link, even one that leads nowhere."""
    try:
        os.lstat(path)
    except OSError:
        return False
    return True


def make_folder(path: Path, private: bool = False) -> None:
    """Create a folder and its parents where they are missing, so that they survive a power cut.

    A link in its place is refused if the folder is private.
    """
    if private:
        require_real_folder(path)
    missing = []
    while not path.exists() and not path.is_symlink():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, _PRIVATE_FOLDER if private else 0o777)
        sync_folder(folder.parent)


def make_private(path: Path) -> None:
    """Let the folder's owner alone into it, where the system supports that."""
    with contextlib.suppress(OSError):
        os.chmod(path, _PRIVATE_FOLDER)


def require_real_folder(path: Path) -> None:
    """Raise if a folder inside a run is a link or no folder: what is below would lie outside the run."""
    if is_there(path) and not stat.S_ISDIR(os.lstat(path).st_mode):
        kind = _kind(os.lstat(path).st_mode)
        raise RunError(f"{path} is {kind}, not a folder of this run: it is not used", key=path.name, value=str(path))


def remove(path: Path) -> None:
    """Delete a file or link if there is one; a folder of that name is reported."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RunError(f"{path} could not be deleted ({error.strerror})", key=path.name, value=str(path)) from error


def remove_partial_files(folder: Path) -> None:
    """Delete the temporary files that a killed process left in a folder; no other process may be writing there."""
    for entry in entries(folder):
        if _PARTIAL.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


def entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder; none if it is missing or cannot be read."""
    try:
        with os.scandir(folder) as found:
            yield from sorted(found, key=lambda entry: entry.name)
    except OSError:
        return


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a new, renamed or deleted entry survives a power cut, where the system supports it."""
    try:
        handle = os.open(folder, os.O_RDONLY | _CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass  # some network file systems cannot sync a folder
    finally:
        os.close(handle)


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
            array, dtype = _as_array(leaf)
            total = zlib.crc32(f"{path}{array.shape}{dtype}".encode(), total)
            total = zlib.crc32(array.reshape(-1).view(np.uint8).data, total)
    return f"{total:08x}"


def _as_array(leaf: Any) -> tuple[np.ndarray, str]:
    """Return a leaf as an array and the name of its dtype; numpy has no bfloat16, so its bits stand for it."""
    if isinstance(leaf, torch.Tensor):
        name = str(leaf.dtype).removeprefix("torch.")
        leaf = leaf.detach().cpu()
        return np.ascontiguousarray((leaf.view(torch.int16) if name == "bfloat16" else leaf).numpy()), name
    array = np.ascontiguousarray(leaf)
    return array, str(array.dtype)


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


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISREG, "a file"),
    )
    return next((name for check, name in kinds if check(mode)), "a device")


_NOFOLLOW, _CLOEXEC, _NONBLOCK = (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK"))
