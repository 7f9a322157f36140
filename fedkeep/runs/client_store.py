"""Client states between visits: one file per client and round, and a bounded cache in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import torch

from fedkeep import tree
from fedkeep.runs.files import read_tree, write_tree
from fedkeep.tree import Tree


class ClientStore:
    """Client states by client id: one file per client and round, and a bounded cache in memory.

    Without a folder everything stays in memory. The name of a state's file contains the round that made it, so that a
    newer state never overwrites the one that the last checkpoint refers to. After a checkpoint, `prune` removes the
    older files.
    """

    def __init__(self, folder: Path | None = None, cache_bytes: int = 256 << 20) -> None:
        self.folder, self.cache_bytes = folder, cache_bytes
        self.rounds: dict[int, int] = {}  # client id -> the round that made its state
        self._cache: OrderedDict[int, Tree] = OrderedDict()
        self._unsaved: set[int] = set()
        self._stale: set[Path] = set()
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
        state, _ = read_tree(self._path(client))
        self._cache_state(client, state)
        return state

    def get(self, client: int) -> Tree | None:
        """Return a client's state, or None if it has none."""
        has_state = client in self.rounds
        return self[client] if has_state else None

    def put(self, client: int, state: Tree, round: int) -> None:
        """Store a client's new state."""
        if client in self.rounds and client not in self._unsaved and self.folder is not None:
            self._stale.add(self._path(client))
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

    def prune(self) -> None:
        """Remove the files that no checkpoint refers to any more."""
        for path in self._stale:
            path.unlink(missing_ok=True)
        self._stale.clear()

    def load_index(self, index: Tree) -> None:
        """Use the states of a checkpoint, without changing any file."""
        self.rounds = dict(zip(index["id"].tolist(), index["round"].tolist(), strict=True))
        self._cache.clear()
        self._unsaved.clear()
        self._cached_bytes = 0

    def restore(self, index: Tree) -> None:
        """Use the states of a checkpoint, and remove all other files."""
        self.load_index(index)
        if self.folder is not None and self.folder.exists():
            current = {self._path(client) for client in self.rounds}
            self._stale = {path for path in self.folder.rglob("*.safetensors") if path not in current}
            self.prune()

    def _path(self, client: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{client % 1000:03d}" / f"{client}-{self.rounds[client]}.safetensors"

    def _write(self, client: int) -> None:
        path = self._path(client)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tree(path, self._cache[client], {"client": client, "round": self.rounds[client]})
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
