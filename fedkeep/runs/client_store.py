"""Client states between visits: one file per client and round, and a bounded cache in memory."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from fedkeep import tree
from fedkeep.errors import RunError
from fedkeep.runs.files import (
    entries,
    make_folder,
    remove,
    remove_partial_files,
    require_real_folder,
)
from fedkeep.runs.seals import damaged
from fedkeep.runs.trees import read_about, read_tree, require_whole_numbers, write_tree
from fedkeep.tree import Tree

_SUBFOLDER, _STATE = re.compile(r"[0-9]{3}"), re.compile(r"(0|[1-9][0-9]*)-(0|[1-9][0-9]*)\.safetensors")
_CHECKED_COMPLETELY = 256 << 20  # bytes of states whose checksums are verified before a run is resumed


class ClientStore:
    """Client states by client id: one file per client and round, and a bounded cache in memory.

    Without a folder everything stays in memory. The name of a state's file contains the round that made it, so that a
    newer state never overwrites one that a checkpoint refers to. After a checkpoint, `prune` removes the files that no
    checkpoint refers to any more. The folder and its files can be read by their owner alone. `run` is the run's id.
    """

    def __init__(self, folder: Path | None = None, cache_bytes: int = 256 << 20, run: str | None = None) -> None:
        self.folder, self.cache_bytes, self.run = folder, cache_bytes, run
        self.rounds: dict[int, int] = {}  # client id -> the round that made its state
        self._cache: OrderedDict[int, Tree] = OrderedDict()
        self._unsaved: set[int] = set()
        self._replaced: dict[Path, tuple[int, int]] = {}  # file -> the round that made it, the round that replaced it
        self._cached_bytes = 0

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
        state = self._read(client, self.rounds[client])
        self._cache_state(client, state)
        return state

    def get(self, client: int) -> Tree | None:
        """Return a client's state, or None if it has none."""
        has_state = client in self.rounds
        return self[client] if has_state else None

    def put(self, client: int, state: Tree, round: int) -> None:
        """Store a client's new state."""
        if client in self.rounds and client not in self._unsaved and self.folder is not None:
            self._replaced[self._path(client)] = (self.rounds[client], round)
        self._drop_from_cache(client)
        self.rounds[client] = round
        self._unsaved.add(client)
        self._cache_state(client, state)

    def save(self) -> Tree:
        """Write the states that are not on disk yet, and return an index of all states for the checkpoint."""
        if self.folder is not None:
            for client in sorted(self._unsaved):
                self._write(client)
        ids = sorted(self.rounds)
        return {
            "id": torch.tensor(ids, dtype=torch.int64),
            "round": torch.tensor([self.rounds[k] for k in ids], dtype=torch.int64),
        }

    def prune(self, checkpoints: Iterable[int] = ()) -> None:
        """Remove the replaced states that none of the checkpoints of these rounds refers to."""
        kept = list(checkpoints)
        for path, (made, replaced) in list(self._replaced.items()):
            if not any(made <= number < replaced for number in kept):
                remove(path)
                del self._replaced[path]

    def load_index(self, index: Tree) -> None:
        """Use the states of a checkpoint, without changing any file."""
        self.rounds = _to_dict(index)
        self._cache.clear()
        self._unsaved.clear()
        self._replaced.clear()
        self._cached_bytes = 0

    def require_states(self, index: Tree) -> None:
        """Raise unless every state of a checkpoint is there and of this run. Nothing changes.

        The checksums of small states are verified too; those of large ones when they are read.
        """
        if self.folder is None:
            return
        require_real_folder(self.folder)
        named = _to_dict(index)
        for number in {client % 1000 for client in named}:
            require_real_folder(self.folder / f"{number:03d}")
        size = 0
        for client, made in named.items():
            path = self._path_of(client, made)
            try:
                size += path.lstat().st_size
            except OSError as error:
                raise RunError(
                    f"{path} is missing ({error.strerror}), but the checkpoint refers to it", key=path.name
                ) from None
            if size <= _CHECKED_COMPLETELY:
                self._read(client, made)
            else:
                self._require_own(path, read_about(path, self.run), client, made)

    def restore(self, index: Tree, older: Iterable[Tree] = (), postpone: bool = False) -> None:
        """Use the states of a checkpoint, and remove those that neither it nor the `older` checkpoints refer to.

        With `postpone` they are removed after the next checkpoint. Only files that this class writes are removed.
        """
        self.load_index(index)
        if self.folder is None:
            return
        require_real_folder(self.folder)
        kept = {self._path_of(*pair) for one in (index, *older) for pair in _to_dict(one).items()}
        for subfolder in entries(self.folder):
            if not _SUBFOLDER.fullmatch(subfolder.name) or not subfolder.is_dir(follow_symlinks=False):
                continue
            remove_partial_files(Path(subfolder.path))
            for entry in entries(Path(subfolder.path)):
                path = Path(entry.path)
                if (match := _STATE.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    current = self.rounds.get(int(match[1]), 0)
                    if path not in kept:
                        self._replaced[path] = (0, 0)  # no checkpoint refers to it
                    elif int(match[2]) < current:
                        self._replaced[path] = (int(match[2]), current)  # an older checkpoint does
        if not postpone:
            stale = [path for path, rounds in self._replaced.items() if rounds == (0, 0)]
            for path in stale:
                remove(path)
                del self._replaced[path]

    def _path(self, client: int) -> Path:
        return self._path_of(client, self.rounds[client])

    def _path_of(self, client: int, made: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{client % 1000:03d}" / f"{client}-{made}.safetensors"

    def _read(self, client: int, made: int) -> Tree:
        path = self._path_of(client, made)
        state, about = read_tree(path, self.run)
        self._require_own(path, about, client, made)
        return state

    def _require_own(self, path: Path, about: dict[str, object], client: int, made: int) -> None:
        owner, number = require_whole_numbers(path, about, "client", "round")
        if (owner, number) != (client, made):
            raise damaged(str(path), path.name, f"it is the state of client {owner} from round {number}")

    def _write(self, client: int) -> None:
        path = self._path(client)
        assert self.folder is not None
        for folder in (self.folder, path.parent):
            require_real_folder(folder)
            make_folder(folder, private=True)
        about = {"client": client, "round": self.rounds[client]}
        write_tree(path, self._cache[client], about, self.run, private=True)
        self._replaced.pop(path, None)  # a state of a round that is repeated
        self._unsaved.discard(client)

    def _cache_state(self, client: int, state: Tree) -> None:
        self._cache[client] = state
        self._cached_bytes += tree.nbytes(state)
        while self.folder is not None and self._cached_bytes > self.cache_bytes and len(self._cache) > 1:
            oldest = next(iter(self._cache))
            if oldest in self._unsaved:
                self._write(oldest)
            self._drop_from_cache(oldest)

    def _drop_from_cache(self, client: int) -> None:
        if client in self._cache:
            self._cached_bytes -= tree.nbytes(self._cache.pop(client))


def _to_dict(index: Tree) -> dict[int, int]:
    """Return a checkpoint's index of states as {client: the round that made its state}."""
    return dict(zip(index["id"].tolist(), index["round"].tolist(), strict=True)) if index else {}
