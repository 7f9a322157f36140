"""Releases of a differentially private federation: which clients took part in every model that was ever released.

`releases.jsonl` has one line for each aggregation and is only ever appended to, before noise is added. A federation's
noise is new every time, so a round that is run again after a crash, or after going back to an earlier checkpoint,
spends privacy again. The records in `rounds.jsonl` are cut off then; these lines stay. Each one also has the epsilon
that is spent with it, so that a reader needs no accountant.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedkeep.errors import RunError
from fedkeep.runs.files import is_there, open_to_append, read_bytes, sync_folder, write_all
from fedkeep.runs.history import Record
from fedkeep.runs.seals import damaged, seal_json, unseal_json

RELEASES = "releases.jsonl"


class Releases:
    """The clients of every release so far, in memory or in a file of sealed lines, each chained to the one before."""

    def __init__(self, path: Path | None = None, run: str = "") -> None:
        self.cohorts: list[list[int]] = []
        self.epsilon: float | None = None  # after the last release; None before the first
        self._path, self._run, self._check = path, run, RELEASES
        self._size = 0  # of the complete lines, in bytes
        self._released: list[tuple[int, list[int]]] = []
        if path is not None and is_there(path):
            self._read(path)

    def require_all_of(self, records: Iterable[Record]) -> None:
        """Raise if a recorded round is not among the releases."""
        recorded = [(record["round"], record["cohort"]) for record in records if record.get("cohort")]
        missing = [number for number, cohort in recorded if (number, cohort) not in self._released]
        if missing:
            raise RunError(
                f"{self._path} lacks the release of round {missing[0]}, so the privacy spent by this run is unknown",
                key=RELEASES,
                value=missing[0],
            )

    def add(self, round: int, clients: list[int], epsilon: float) -> None:
        """Add a release, with epsilon after it; when this returns, it is on disk."""
        entry: dict[str, Any] = {"round": round, "clients": clients, "epsilon": epsilon}
        line, check = seal_json(entry, self._run, self._check)
        if self._path is not None:
            self._append(self._path, line + b"\n")
        self._check = check
        self._remember(**entry)

    def _append(self, path: Path, line: bytes) -> None:
        handle = open_to_append(path)
        try:
            if os.fstat(handle).st_size < self._size:
                raise damaged(str(path), RELEASES, "lines were removed while the run used it")
            os.ftruncate(handle, self._size)  # a line that a crash cut off
            write_all(handle, line)
            os.fsync(handle)
        except OSError as error:
            raise RunError(f"{path} could not be written: {error.strerror}", key=RELEASES) from error
        finally:
            os.close(handle)
        if not self._size:
            sync_folder(path.parent)
        self._size += len(line)

    def _read(self, path: Path) -> None:
        """Read the file; a last line without its end was cut off by a crash, before its release."""
        *lines, rest = (data := read_bytes(path)).split(b"\n")
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            entry, self._check = unseal_json(where, RELEASES, line, self._run, self._check, number)
            if entry.keys() != {"round", "clients", "epsilon"}:
                raise damaged(where, RELEASES, "its keys are not round, clients and epsilon", number)
            self._remember(**entry)
        self._size = len(data) - len(rest)

    def _remember(self, round: int, clients: list[int], epsilon: float) -> None:
        self.epsilon = epsilon
        self.cohorts.append(clients)
        self._released.append((round, clients))
