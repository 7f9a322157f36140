"""The run folder: what a run writes while it goes on, and what it can go on from.

    experiment.toml          what was run, complete: running it again gives the same run
    rounds.jsonl             one line per round, appended and flushed
    checkpoint.safetensors   the server's tree and an index of the clients' states, replaced every so often
    clients/                 one file per client and round
    split.json               who holds which classes, of some clients where there are many (see splits.py)
    diverged.txt             what a run said that diverged

Killed at any instant, a run goes on from its checkpoint; lines written after it are cut off and made anew.
"""

from __future__ import annotations

import json
import logging
import os
import time
import tomllib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeep import toml, tree
from fedkeep.errors import RunError
from fedkeep.history import History, Record
from fedkeep.store import ClientStore, Lock, read_tree, write_atomic, write_tree
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

FORMAT = 1
EXPERIMENT, ROUNDS, CHECKPOINT, CLIENTS = "experiment.toml", "rounds.jsonl", "checkpoint.safetensors", "clients"
DIVERGED = "diverged.txt"
_LONGEST = 600  # seconds without a checkpoint, where it is not said after how many rounds there is one


@dataclass(frozen=True)
class Saved:
    """A checkpoint, read back."""

    round: int
    server: Tree
    clients: Tree
    records: list[Record]


class RunFolder:
    """One run's folder, held by one process at a time."""

    def __init__(self, path: Path, checkpoint_every: int | None) -> None:
        self.path, self.checkpoint_every = path, checkpoint_every
        self.clients = path / CLIENTS
        self.last: int | None = None  # the round of the last checkpoint
        self._began = self._written = time.monotonic()
        self._spent = self._took = 0.0  # seconds, on all checkpoints and on the last
        self._lock = Lock(path / ".lock")
        self._rounds = open(path / ROUNDS, "ab", buffering=0)  # noqa: SIM115 (open as long as the run)

    @classmethod
    def create(cls, path: Path, about: dict[str, Any]) -> RunFolder:
        """Make a new run folder; one that holds a run already is refused."""
        every = about.get("checkpoint_every")
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise RunError(f"checkpoint_every must be a whole number of at least 1, not {every!r}")
        if (path / EXPERIMENT).exists():
            raise RunError(
                f"{path} holds a run already: go on with it (fedkeep resume {path}) or choose another folder"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{path} cannot be made: {error.strerror}") from error
        folder = cls(path, every)
        try:
            write_atomic(path / EXPERIMENT, toml.dumps({"format": FORMAT, **about}).encode())
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open a run that exists, to go on with it."""
        return cls(path, read_experiment(path).get("checkpoint_every"))

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes at the folder."""
        self._rounds.close()
        self._lock.release()

    def append(self, record: Record) -> None:
        """Write a round's line."""
        line = json.dumps(record).encode() + b"\n"
        try:
            while line:
                line = line[self._rounds.write(line) :]
        except OSError as error:
            raise RunError(self._lost(ROUNDS, error)) from error

    def due(self, round: int) -> bool:
        """Say whether a round ends with a checkpoint: every so many do, or as many as take a twentieth of the time.

        How long the next one will take is not known; it is taken to be as long as the last. However long that is, after
        ten minutes one is due.
        """
        if self.checkpoint_every is not None:
            return round % self.checkpoint_every == 0
        now = time.monotonic()
        return 20 * (self._spent + self._took) <= now - self._began or now - self._written >= _LONGEST

    def checkpoint(self, round: int, server: Tree, states: ClientStore) -> None:
        """Make this round the one to go on from."""
        began = time.monotonic()
        try:
            index = states.save()
            os.fsync(self._rounds.fileno())
            about = {"round": round, "offset": self._rounds.tell()}
            write_tree(self.path / CHECKPOINT, {"server": server, "clients": index}, about)
        except OSError as error:
            raise RunError(self._lost(CHECKPOINT, error)) from error
        states.prune()
        self.last, self._written = round, time.monotonic()
        self._took = self._written - began
        self._spent += self._took

    def diverged(self, said: str) -> None:
        """Note that the run diverged, until somebody goes on with it."""
        write_atomic(self.path / DIVERGED, said.encode())

    def restore(self) -> Saved | None:
        """Read the last checkpoint, if there is one yet, and cut off the lines that were written after it."""
        (self.path / DIVERGED).unlink(missing_ok=True)
        if not (self.path / CHECKPOINT).exists():
            self._rounds.truncate(0)
            return None
        saved, about = read_tree(self.path / CHECKPOINT)
        records = read_records(self.path / ROUNDS, about["offset"])
        if len(records) != about["round"] + 1:
            raise RunError(f"{self.path / ROUNDS} holds {len(records)} rounds, the checkpoint counts {about['round']}")
        self._rounds.truncate(about["offset"])
        self._rounds.seek(0, os.SEEK_END)
        self.last = about["round"]
        return Saved(about["round"], saved["server"], saved["clients"], records)

    def _lost(self, what: str, error: OSError) -> str:
        reached = "nothing yet" if self.last is None else f"round {self.last}"
        return f"{self.path / what} could not be written ({error.strerror}); saved so far: {reached}"


def read_experiment(path: Path) -> dict[str, Any]:
    """Read a run's experiment file; one of a newer format is refused."""
    file = path / EXPERIMENT
    try:
        about = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise RunError(f"{path} is not a run folder: it has no {EXPERIMENT}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    if about.get("format") != FORMAT:
        raise RunError(f"{file} has format {about.get('format')!r}; this fedkeep reads format {FORMAT}: update it")
    return about


def read_records(path: Path, upto: int | None = None) -> list[Record]:
    """Read the rounds' lines; with `upto`, exactly that many bytes; without, all that are complete."""
    data = path.read_bytes()
    if upto is not None:
        if len(data) < upto:
            raise RunError(f"{path} is truncated: {len(data)} bytes, where the checkpoint knows of {upto}")
        data = data[:upto]
    complete, _, _ = data.rpartition(b"\n")
    records = []
    for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise RunError(f"{path}, line {number} is damaged: {error}") from error
        if len(records) > 1 and records[-1]["round"] != records[-2]["round"] + 1:
            raise RunError(f"{path}, line {number}: round {records[-1]['round']} follows on {records[-2]['round']}")
    return records


def saved_round(path: Path) -> int | None:
    """Return the round of a run's checkpoint, or None before the first."""
    if not (path / CHECKPOINT).exists():
        return None
    return int(read_tree(path / CHECKPOINT)[1]["round"])


def load_run(path: str | Path, weights: bool = True) -> History:
    """Read what a run has left so far; it may still be going on, or have been interrupted.

    Without `weights` the checkpoint stays unread: a page or a table needs the rounds alone.
    """
    path = Path(path)
    about = read_experiment(path)
    records = read_records(path / ROUNDS) if (path / ROUNDS).exists() else []
    settings = {**about["train"], "seed": about["seed"]}
    if ran_with := about.get("made_by", {}).get("engine"):
        settings["engine"] = ran_with  # where `auto` was asked for
    history = History(about["method"]["name"], settings, records, about=about, folder=path)
    if (path / DIVERGED).exists():
        history.diverged = (path / DIVERGED).read_text(errors="replace").strip()
    if not weights:
        return history
    try:
        saved, checkpoint = read_tree(path / CHECKPOINT)
        history.params, history.saved = saved["server"]["params"], checkpoint["round"]
    except RunError as error:
        log.warning("%s: its weights are left out", error)
    return history


def fingerprint(*parts: Any) -> str:
    """Sum up arrays and trees of tensors in a few letters, to know them again."""
    total = 0
    for part in parts:
        for path, leaf in tree.items(part):
            array = np.ascontiguousarray(leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf)
            total = zlib.crc32(f"{path}{array.shape}{array.dtype}".encode(), total)
            total = zlib.crc32(array.reshape(-1).view(np.uint8).data, total)
    return f"{total:08x}"
