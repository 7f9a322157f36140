"""Power cuts: the file operations of a run are recorded; from them come the states that a cut can leave on disk.

Only what was synced is certain to be there after a cut. Of the rest, any part may be: the entries of each folder that
were created, renamed or deleted since that folder was synced, and the bytes of each file since that file was synced,
torn or as zeros. A rename within a folder is there completely or not at all; one between folders may be there in one of
them only. Folders are never renamed, so a folder is known by its path and a file by a number.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = -1  # the entry of a folder, where a file has its number
Operation = tuple[Any, ...]


@dataclass
class Disk:
    """What is certain to be on disk, and what is not yet."""

    entries: dict[Path, dict[str, int]] = field(default_factory=dict)  # folder -> name -> file
    data: dict[int, bytes] = field(default_factory=dict)  # file -> its bytes
    pending_entries: dict[Path, list[dict[str, int | None]]] = field(default_factory=dict)  # None: deleted
    pending_data: dict[int, list[Operation]] = field(default_factory=dict)

    def apply(self, operation: Operation) -> None:
        """Apply one recorded operation."""
        kind, *args = operation
        if kind == "entries":
            folder, change = args
            self.pending_entries.setdefault(folder, []).append(change)
        elif kind == "sync folder":
            for change in self.pending_entries.pop(args[0], []):
                _change(self.entries.setdefault(args[0], {}), change)
        elif kind == "sync file":
            self.data[args[0]] = _written(self.data.get(args[0], b""), self.pending_data.pop(args[0], []))
        else:  # ("write", file, bytes) or ("truncate", file, length)
            self.pending_data.setdefault(args[0], []).append(operation)

    def after_a_cut(self, rng: random.Random, chance: float) -> dict[Path, bytes | None]:
        """Return the files and folders (None) after a cut; each uncertain change is there with this chance."""
        found: dict[Path, bytes | None] = {}

        def visit(folder: Path) -> None:
            names = dict(self.entries.get(folder, {}))
            for change in self.pending_entries.get(folder, []):
                if rng.random() < chance:
                    _change(names, change)
            for name, file in sorted(names.items()):
                if file == FOLDER:
                    found[folder / name] = None
                    visit(folder / name)
                else:
                    found[folder / name] = self._contents(file, rng, chance)

        visit(Path())
        return found

    def _contents(self, file: int, rng: random.Random, chance: float) -> bytes:
        data = self.data.get(file, b"")
        for operation in self.pending_data.get(file, []):
            if rng.random() >= chance:
                break
            after = _written(data, [operation])
            torn = after[: len(data) + rng.randrange(len(after) - len(data))] if len(after) > len(data) else after
            zeros = data + bytes(len(after) - len(data)) if len(after) > len(data) else after
            data = rng.choice([after, after, torn, zeros])
            if data is not after:
                break
        return data


def _change(names: dict[str, int], change: dict[str, int | None]) -> None:
    for name, file in change.items():
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file


def _written(data: bytes, operations: list[Operation]) -> bytes:
    for kind, _, value in operations:
        data = data + value if kind == "write" else data[:value]
    return data


@contextlib.contextmanager
def recorded(root: Path) -> Iterator[tuple[Disk, list[Operation]]]:
    """Record the file operations below a folder. Yields what is there at the start, and the list that they go into."""
    start, operations, numbers = Disk(), [], {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        numbers[path] = FOLDER if path.is_dir() else len(numbers)
        start.entries.setdefault(name.parent, {})[name.name] = numbers[path]
        if path.is_file():
            start.data[numbers[path]] = path.read_bytes()
    recorder = _Recorder(root, operations, numbers)
    originals = {name: getattr(os, name) for name in recorder.wrappers}
    try:
        for name, wrap in recorder.wrappers.items():
            setattr(os, name, wrap(originals[name]))
        yield start, operations
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


class _Recorder:
    """Wrappers around the functions of `os` that change files."""

    def __init__(self, root: Path, operations: list[Operation], numbers: dict[Path, int]) -> None:
        self.root, self.operations, self.numbers = root, operations, numbers
        self.open_files: dict[int, int] = {}
        self.open_folders: dict[int, Path] = {}
        self.next = 1_000_000
        names = ("open", "write", "fsync", "close", "ftruncate", "replace", "unlink", "mkdir", "rmdir")
        self.wrappers: dict[str, Callable[..., Any]] = {name: getattr(self, f"_{name}") for name in names}

    def _below(self, path: Any) -> Path | None:
        try:
            path = Path(path)
        except TypeError:
            return None
        return path if self.root in (path, *path.parents) and path.name != ".lock" else None

    def _change(self, folder: Path, **change: int | None) -> None:
        for name, file in change.items():
            self.numbers.pop(folder / name, None)
            if file is not None:
                self.numbers[folder / name] = file
        self.operations.append(("entries", folder.relative_to(self.root), change))

    def _open(self, original: Any) -> Any:
        def wrapped(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            below = self._below(path)
            existed = below is None or os.path.lexists(below)
            handle = original(path, flags, *args, **kwargs)
            if below is None:
                return handle
            if below.is_dir():
                self.open_folders[handle] = below
                return handle
            if not existed:
                self.next += 1
                self._change(below.parent, **{below.name: self.next})
            if flags & (os.O_WRONLY | os.O_RDWR):
                self.open_files[handle] = self.numbers[below]
            return handle

        return wrapped

    def _write(self, original: Any) -> Any:
        def wrapped(handle: int, data: Any) -> int:
            count = original(handle, data)
            if handle in self.open_files:
                self.operations.append(("write", self.open_files[handle], bytes(data[:count])))
            return count

        return wrapped

    def _fsync(self, original: Any) -> Any:
        def wrapped(handle: int) -> None:
            original(handle)
            if handle in self.open_files:
                self.operations.append(("sync file", self.open_files[handle]))
            elif handle in self.open_folders:
                self.operations.append(("sync folder", self.open_folders[handle].relative_to(self.root)))

        return wrapped

    def _close(self, original: Any) -> Any:
        def wrapped(handle: int) -> None:
            self.open_files.pop(handle, None)
            self.open_folders.pop(handle, None)
            original(handle)

        return wrapped

    def _ftruncate(self, original: Any) -> Any:
        def wrapped(handle: int, length: int) -> None:
            original(handle, length)
            if handle in self.open_files:
                self.operations.append(("truncate", self.open_files[handle], length))

        return wrapped

    def _replace(self, original: Any) -> Any:
        def wrapped(source: Any, target: Any) -> None:
            original(source, target)
            if (below := self._below(source)) is not None:
                file, target = self.numbers[below], Path(target)
                if target.parent == below.parent:
                    self._change(below.parent, **{target.name: file, below.name: None})
                else:
                    self._change(target.parent, **{target.name: file})
                    self._change(below.parent, **{below.name: None})

        return wrapped

    def _unlink(self, original: Any) -> Any:
        def wrapped(path: Any, *args: Any, **kwargs: Any) -> None:
            original(path, *args, **kwargs)
            if (below := self._below(path)) is not None:
                self._change(below.parent, **{below.name: None})

        return wrapped

    _rmdir = _unlink

    def _mkdir(self, original: Any) -> Any:
        def wrapped(path: Any, *args: Any, **kwargs: Any) -> None:
            original(path, *args, **kwargs)
            if (below := self._below(path)) is not None:
                self._change(below.parent, **{below.name: FOLDER})

        return wrapped


def states_after_cuts(
    disk: Disk, operations: list[Operation], seed: int, tries: int
) -> Iterator[dict[Path, bytes | None]]:
    """Yield different states that a cut can leave, at every point of a recording: all lost, all there, and mixtures."""
    rng, known = random.Random(seed), set()
    for operation in operations:
        disk.apply(operation)
        for chance in [0.0, 1.0] + [rng.choice([0.2, 0.5, 0.8]) for _ in range(tries)]:
            state = disk.after_a_cut(rng, chance)
            key = hash(tuple(sorted((str(path), data) for path, data in state.items() if data is not None)))
            if key not in known:
                known.add(key)
                yield state


def write_state(state: dict[Path, bytes | None], root: Path) -> None:
    """Write the files of a state below a folder."""
    root.mkdir(parents=True)
    for path, data in state.items():
        if data is None:
            (root / path).mkdir(exist_ok=True)
        else:
            (root / path).write_bytes(data)
