"""Run folder: writing rounds and checkpoints, and restoring from them.

    experiment.toml          the complete experiment: running it again gives the same run
    rounds.jsonl             one line per round, appended and flushed
    checkpoint.safetensors   the server's tree and an index of the clients' states
    clients/                 one file per client and round
    split.json               the label counts of the clients (see label_counts.py)
    diverged.txt             the message of a run that diverged

A run killed at any time resumes from its checkpoint; lines written after it are cut off and written again.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedkeep._util.validate import require_whole
from fedkeep.errors import RunError
from fedkeep.runs.client_store import ClientStore
from fedkeep.runs.files import (
    CHECKPOINT,
    CLIENTS,
    DIVERGED,
    EXPERIMENT,
    FORMAT,
    LOCK,
    ROUNDS,
    read_tree,
    to_toml,
    write_atomic,
    write_tree,
)
from fedkeep.runs.history import Record
from fedkeep.runs.reading import read_experiment, read_records
from fedkeep.tree import Tree

_MAX_SECONDS_WITHOUT_CHECKPOINT = 600  # unless `checkpoint_every` is set


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read back."""

    round: int
    server: Tree
    clients: Tree
    records: list[Record]


class RunFolder:
    """The folder of one run, locked by one process at a time."""

    def __init__(self, path: Path, checkpoint_every: int | None) -> None:
        self.path, self.checkpoint_every = path, checkpoint_every
        self.clients = path / CLIENTS
        self.last: int | None = None  # the round of the last checkpoint
        self._opened = self._last_checkpoint = time.monotonic()
        self._total_cost = self._last_cost = 0.0  # seconds, of all checkpoints and of the last
        self._lock = _locked(path / LOCK)
        self._rounds = open(path / ROUNDS, "ab", buffering=0)  # noqa: SIM115 (open as long as the run)

    @classmethod
    def create(cls, path: Path, about: dict[str, Any]) -> RunFolder:
        """Create a run folder; raise if it already contains a run."""
        every = about.get("checkpoint_every")
        if every is not None:
            require_whole("checkpoint_every", every, low=1, error=RunError)
        if (path / EXPERIMENT).exists():
            raise RunError(
                f"{path} already contains a run: resume it (fedkeep resume {path}) or choose another folder",
                key="run_dir",
                value=str(path),
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"the folder {path} cannot be created: {error.strerror}", key="run_dir", value=str(path)
            ) from error
        folder = cls(path, every)
        try:
            write_atomic(path / EXPERIMENT, to_toml({"format": FORMAT, **about}))
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run, to resume it."""
        return cls(path, read_experiment(path).get("checkpoint_every"))

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and release the lock."""
        self._rounds.close()
        self._lock.release()

    def append(self, record: Record) -> None:
        """Append a round's record to rounds.jsonl."""
        line = json.dumps(record).encode() + b"\n"
        try:
            while line:
                line = line[self._rounds.write(line) :]
        except OSError as error:
            raise RunError(self._write_failed_message(ROUNDS, error), key=ROUNDS) from error

    def checkpoint_due(self, round: int) -> bool:
        """Return whether to checkpoint after this round.

        Every `checkpoint_every` rounds or, by default, whenever all checkpoints together, the next one included (taken
        to cost as much as the last), cost at most 5% of the run time; at the latest after ten minutes.
        """
        if self.checkpoint_every is not None:
            return round % self.checkpoint_every == 0
        now = time.monotonic()
        cheap = 20 * (self._total_cost + self._last_cost) <= now - self._opened
        return cheap or now - self._last_checkpoint >= _MAX_SECONDS_WITHOUT_CHECKPOINT

    def checkpoint(self, round: int, server: Tree, states: ClientStore) -> None:
        """Save the server's tree and the clients' states, so that the run can be resumed after this round."""
        began = time.monotonic()
        try:
            index = states.save()
            os.fsync(self._rounds.fileno())
            metadata = {"round": round, "offset": self._rounds.tell()}
            write_tree(self.path / CHECKPOINT, {"server": server, "clients": index}, metadata)
        except OSError as error:
            raise RunError(self._write_failed_message(CHECKPOINT, error), key=CHECKPOINT) from error
        states.prune()
        self.last, self._last_checkpoint = round, time.monotonic()
        self._last_cost = self._last_checkpoint - began
        self._total_cost += self._last_cost

    def write_diverged(self, message: str) -> None:
        """Write the file that marks the run as diverged, until it is resumed."""
        write_atomic(self.path / DIVERGED, message.encode())

    def restore(self) -> Checkpoint | None:
        """Read the last checkpoint, or None before the first; cut off the records that were written after it."""
        (self.path / DIVERGED).unlink(missing_ok=True)
        if not (self.path / CHECKPOINT).exists():
            self._rounds.truncate(0)
            return None
        saved, metadata = read_tree(self.path / CHECKPOINT)
        records = read_records(self.path / ROUNDS, metadata["offset"])
        if len(records) != metadata["round"] + 1:
            raise RunError(
                f"{self.path / ROUNDS} has {len(records)} records, but the checkpoint is of round {metadata['round']}",
                key=ROUNDS,
            )
        self._rounds.truncate(metadata["offset"])
        self._rounds.seek(0, os.SEEK_END)
        self.last = metadata["round"]
        return Checkpoint(metadata["round"], saved["server"], saved["clients"], records)

    def _write_failed_message(self, name: str, error: OSError) -> str:
        reached = "nothing yet" if self.last is None else f"round {self.last}"
        return f"{self.path / name} could not be written ({error.strerror}); saved so far: {reached}"


def _locked(path: Path) -> FileLock:
    """Lock the folder of this file. The system releases the lock when the process ends, however it ends."""
    lock = FileLock(path, blocking=False, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise RunError(
            f"another process is using {path.parent}; wait for it or stop it first",
            key="run_dir",
            value=str(path.parent),
        ) from None
    return lock
