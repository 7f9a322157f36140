"""Releases of a differentially private federation: which clients took part in every model that was ever released.

`releases.jsonl` has one line for each aggregation and is only ever appended to, before noise is added. A federation's
noise is new every time, so a round that is run again after a crash, or after going back to an earlier checkpoint,
spends privacy again. The records in `rounds.jsonl` are cut off then; these lines stay.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from fedkeep.errors import RunError
from fedkeep.runs.files import sync_folder
from fedkeep.runs.history import Record

RELEASES = "releases.jsonl"


class Releases:
    """The clients of every release so far, in memory or in a file.

    Every line has a checksum that covers the run's id and all lines before it.
    """

    def __init__(self, path: Path | None = None, run: str = "") -> None:
        self.cohorts: list[list[int]] = []
        self._path, self._sum = path, hashlib.sha256(run.encode()).hexdigest()
        self._size = 0  # of the complete lines, in bytes
        self._released = self._read(path) if path is not None else []

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

    def add(self, round: int, clients: list[int]) -> None:
        """Add a release; when this returns, it is on disk."""
        entry = {"round": round, "clients": clients}
        checksum = self._next_sum(entry)
        if self._path is not None:
            line = json.dumps({**entry, "sum": checksum}).encode() + b"\n"
            try:
                with open(self._path, "r+b" if self._path.exists() else "xb") as file:
                    file.truncate(self._size)
                    file.seek(self._size)
                    file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
                if not self._size:
                    sync_folder(self._path.parent)
            except OSError as error:
                raise RunError(f"{self._path} could not be written: {error.strerror}", key=RELEASES) from error
            self._size += len(line)
        self.cohorts.append(clients)
        self._sum = checksum

    def _read(self, path: Path) -> list[tuple[int, list[int]]]:
        """Read the file; a last line without its end was cut off by a crash, before its release."""
        found = []
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                checksum = self._next_sum({key: entry[key] for key in ("round", "clients")})
                valid = entry["sum"] == checksum
            except (ValueError, KeyError, TypeError):
                valid = False
            if not valid:
                raise RunError(
                    f"line {number} of {path} is damaged or of another run, so the privacy spent is unknown",
                    key=RELEASES,
                    value=number,
                )
            self._sum = checksum
            self.cohorts.append(entry["clients"])
            found.append((entry["round"], entry["clients"]))
        self._size = len(whole)
        return found

    def _next_sum(self, entry: dict[str, object]) -> str:
        return hashlib.sha256((self._sum + json.dumps(entry)).encode()).hexdigest()
