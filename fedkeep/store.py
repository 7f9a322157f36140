"""Files that survive: whole or not there at all, checked when read, and never a pickle.

A file is written beside its place, synced, and renamed into it, so that a process killed at any instant leaves either
the old one or the new one. Trees carry a checksum: what is damaged is reported, not used.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from fedkeep import tree
from fedkeep.errors import RunError
from fedkeep.tree import Tree


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it is there in full or not at all."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise RunError(f"{path} could not be written ({error.strerror}); what was there before is intact") from error
    _sync_folder(path.parent)


def write_tree(path: Path, value: Tree, about: dict[str, Any] | None = None) -> None:
    """Write a tree, with what is to be known about it as JSON in the header."""
    import safetensors.torch

    flat = tree.plain(value)
    header = {"fedkeep": json.dumps({"about": about or {}, "crc32": _checksum(flat)})}
    write_atomic(path, safetensors.torch.save(flat, metadata=header))


def read_tree(path: Path) -> tuple[Tree, dict[str, Any]]:
    """Read what `write_tree` wrote, or say what is wrong with it."""
    import safetensors
    import safetensors.torch

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["fedkeep"])
            # Cloned, because torch's own memory is aligned and the file's is not, and sums may depend on that.
            flat = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise RunError(f"there is no file {path}") from None
    except Exception as error:
        raise RunError(f"{path} is damaged or truncated and cannot be read ({error}); it was left as it is") from error
    if _checksum(flat) != header["crc32"]:
        raise RunError(f"{path} is damaged: its contents do not match their checksum; it was left as it is")
    return tree.unflatten(flat), header["about"]


class Lock:
    """Keeps a second process out of a folder. The system releases it when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "a+")  # noqa: SIM115 (held as long as the lock)
        try:
            _lock_file(self.file)
        except OSError:
            self.file.close()
            raise RunError(f"another process is at work on {path.parent}; wait for it, or end it first") from None

    def release(self) -> None:
        """Let others in."""
        self.file.close()


class ClientStore:
    """What clients keep between visits: one file per client and round, and a bounded cache in memory.

    Without a folder everything stays in memory. A state's file is named by the round that made it, so a newer state
    never overwrites the one that the last checkpoint names; `save` and then `prune` make the newer one count.
    """

    def __init__(self, folder: Path | None = None, cache_bytes: int = 256 << 20) -> None:
        self.folder, self.cache_bytes = folder, cache_bytes
        self.rounds: dict[int, int] = {}  # every client that has a state, and the round that made it
        self._cache: OrderedDict[int, Tree] = OrderedDict()
        self._unsaved: set[int] = set()
        self._stale: set[Path] = set()
        self._held = 0

    def __contains__(self, client: object) -> bool:
        return client in self.rounds

    def __iter__(self) -> Iterator[int]:
        return iter(self.rounds)

    def __len__(self) -> int:
        return len(self.rounds)

    def __getitem__(self, client: int) -> Tree:
        if client in self._cache:
            self._cache.move_to_end(client)
            return self._cache[client]
        state, _ = read_tree(self._path(client))
        self._keep(client, state)
        return state

    def get(self, client: int) -> Tree | None:
        """Return a client's state, or None if it has none."""
        known = client in self.rounds
        return self[client] if known else None

    def put(self, client: int, state: Tree, round: int) -> None:
        """Remember a client's new state."""
        if client in self.rounds and client not in self._unsaved and self.folder is not None:
            self._stale.add(self._path(client))
        self._forget(client)
        self.rounds[client] = round
        self._unsaved.add(client)
        self._keep(client, state)

    def save(self) -> Tree:
        """Write what is not on disk yet, and return the index of all states for the checkpoint."""
        if self.folder is not None:
            for client in sorted(self._unsaved):
                self._write(client)
        ids = sorted(self.rounds)
        return {
            "id": torch.tensor(ids, dtype=torch.int64),
            "round": torch.tensor([self.rounds[k] for k in ids], dtype=torch.int64),
        }

    def prune(self) -> None:
        """Remove the files that no checkpoint names any more."""
        for path in self._stale:
            path.unlink(missing_ok=True)
        self._stale.clear()

    def look_at(self, index: Tree) -> None:
        """Go back to the states of a checkpoint; no file is touched."""
        self.rounds = dict(zip(index["id"].tolist(), index["round"].tolist(), strict=True))
        self._cache.clear()
        self._unsaved.clear()
        self._held = 0

    def restore(self, index: Tree) -> None:
        """Go back to the states of a checkpoint, and remove the files of others."""
        self.look_at(index)
        if self.folder is not None and self.folder.exists():
            named = {self._path(client) for client in self.rounds}
            self._stale = {path for path in self.folder.rglob("*.safetensors") if path not in named}
            self.prune()

    def _path(self, client: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{client % 1000:03d}" / f"{client}-{self.rounds[client]}.safetensors"

    def _write(self, client: int) -> None:
        path = self._path(client)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tree(path, self._cache[client], {"client": client, "round": self.rounds[client]})
        self._unsaved.discard(client)

    def _keep(self, client: int, state: Tree) -> None:
        self._cache[client] = state
        self._held += tree.nbytes(state)
        while self.folder is not None and self._held > self.cache_bytes and len(self._cache) > 1:
            oldest = next(iter(self._cache))
            if oldest in self._unsaved:
                self._write(oldest)
            self._forget(oldest)

    def _forget(self, client: int) -> None:
        if client in self._cache:
            self._held -= tree.nbytes(self._cache.pop(client))


def _lock_file(file: IO[str]) -> None:
    """Lock a file for this process, or raise OSError."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _checksum(flat: dict[str, torch.Tensor]) -> int:
    total = 0
    for name in sorted(flat):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(flat[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return total


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
