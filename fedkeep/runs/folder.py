"""Run folder: writing rounds and checkpoints, and restoring from them.

    experiment.toml              the complete experiment: running it again gives the same run
    rounds.jsonl                 one line per round, appended and flushed
    checkpoint-ROUND.safetensors the server's tree and an index of the clients' states; the last few are kept
    clients/                     one file per client and round
    split.json                   the label counts of the clients (see label_counts.py)
    federation.json              the split and the cohorts, if files gave them (see federation_copy.py)
    extended.json                more rounds than the experiment file has (see extension.py)
    ended.json                   the last round and why the run ended: "finished", "stopped" by a callback, "diverged"
    diverged.txt                 the message of a run that diverged
    abandoned/                   later rounds, while a run repeats them from an earlier checkpoint (see abandoned.py)

A run killed at any time resumes from its checkpoint; lines written after it are cut off and written again. Every file
carries the run's id and a checksum (see seals.py and trees.py). Runs of format 1 have none; they are continued in
format 1, with one checkpoint, `checkpoint.safetensors`.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path
from typing import Any

from fedkeep._util.validate import require_whole
from fedkeep.errors import RunError
from fedkeep.runs.abandoned import delete_abandoned, last_abandoned_round, set_aside
from fedkeep.runs.checkpoints import (
    Checkpoint,
    checkpoint_file,
    covered_files,
    find_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    read_index,
)
from fedkeep.runs.client_store import ClientStore
from fedkeep.runs.deletion import delete_run
from fedkeep.runs.experiment_file import ExperimentFile, read_experiment_file, write_experiment
from fedkeep.runs.extension import write_extension
from fedkeep.runs.files import (
    CLIENTS,
    DIVERGED,
    ENDED,
    EXPERIMENT,
    LOCK,
    ROUNDS,
    is_there,
    make_folder,
    make_private,
    open_to_append,
    read_bytes,
    remove,
    remove_partial_files,
    require_replaceable,
    sync_folder,
    write_all,
    write_atomic,
)
from fedkeep.runs.history import Record
from fedkeep.runs.lock import lock_folder
from fedkeep.runs.records import format_record
from fedkeep.runs.seals import seal_json, seal_text
from fedkeep.runs.trees import write_tree
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

KEEP = 3  # checkpoints, by default
_MAX_SECONDS_WITHOUT_CHECKPOINT = 600  # unless `checkpoint_every` is set


class RunFolder:
    """The folder of one run, locked by one process at a time."""

    def __init__(self, path: Path, checkpoint_every: int | None = None, keep: int | None = None) -> None:
        self.path, self.checkpoint_every, self.keep = path, checkpoint_every, keep or KEEP
        self.rounds: int | None = None  # to which `restore` extends the run
        self.clients = path / CLIENTS
        self.last: int | None = None  # the round of the last checkpoint
        self._experiment: ExperimentFile | None = None
        self._check, self._recorded = "", 0  # the checksum and the round of the last line of rounds.jsonl
        self._opened = self._last_checkpoint = time.monotonic()
        self._total_cost = self._last_cost = 0.0  # seconds, of all checkpoints and of the last
        self._abandoned: int | None = None  # the last of the rounds that were set aside
        self._lock = lock_folder(path / LOCK)
        try:
            self._rounds = open_to_append(path / ROUNDS)
        except BaseException:
            self._lock.release()
            raise

    @classmethod
    def create(cls, path: Path, about: dict[str, Any], overwrite: bool = False) -> RunFolder:
        """Create a run folder; raise if it already contains a run, or delete that with `overwrite`."""
        for key in ("checkpoint_every", "keep"):
            if about.get(key) is not None:
                require_whole(key, about[key], low=1, error=RunError)
        if is_there(path / EXPERIMENT) and not overwrite:
            raise RunError(
                f"{path} already contains a run: choose another folder, or pass resume=True to continue the run or "
                "overwrite=True to replace it",
                key="run_dir",
                value=str(path),
            )
        try:
            make_folder(path)
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "it is not a folder")
        except OSError as error:
            raise RunError(
                f"the folder {path} cannot be created: {error.strerror}", key="run_dir", value=str(path)
            ) from error
        if not overwrite:
            _require_no_records(path)
        folder = cls(path, about.get("checkpoint_every"), about.get("keep"))
        try:
            folder._cut(0)
            if overwrite:
                delete_run(path)
            folder._use(write_experiment(path, about))
            remove_partial_files(path)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def open(cls, path: Path, keep: int | None = None, rounds: int | None = None) -> RunFolder:
        """Open an existing run, to resume it; `keep` takes precedence over the recorded number of checkpoints.

        If it has fewer than `rounds` rounds, `restore` extends it to so many.
        """
        if keep is not None:
            require_whole("keep", keep, low=1, error=RunError)
        experiment = read_experiment_file(path)
        folder = cls(path, experiment.about.get("checkpoint_every"), keep or experiment.about.get("keep"))
        folder._use(experiment)
        if rounds is not None and rounds > experiment.about["train"]["rounds"]:
            folder.rounds = rounds
        return folder

    @property
    def experiment(self) -> ExperimentFile:
        """The run's experiment file."""
        assert self._experiment is not None
        return self._experiment

    @property
    def run(self) -> str | None:
        """The run's id; None in format 1."""
        return self.experiment.run

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and release the lock."""
        if self._rounds >= 0:
            os.close(self._rounds)
            self._rounds = -1
        self._lock.release()

    def append(self, record: Record) -> None:
        """Append a round's record to rounds.jsonl."""
        line, check = format_record(record, self.run, self._check)
        try:
            write_all(self._rounds, line)
        except OSError as error:
            raise RunError(self._write_failed_message(ROUNDS, error), key=ROUNDS) from error
        self._check, self._recorded = check, record["round"]

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

    def checkpoint(self, round: int, server: Tree, states: ClientStore, ended: str | None = None) -> None:
        """Save the server's tree and the clients' states, so that the run can be resumed after this round.

        `ended` says why the run ends with it. The last `keep` checkpoints stay, with the states they refer to.
        """
        began = time.monotonic()
        file = checkpoint_file(self.path, round, self.run)
        try:
            index = states.save()
            if states.folder is not None and len(states):
                make_private(self.path)
            os.fsync(self._rounds)
            about: dict[str, Any] = {"round": round, "offset": os.fstat(self._rounds).st_size}
            if self.run is not None:
                files = covered_files(self.path, self.experiment)
                about.update(check=self._check, ended=ended, files=files)
            write_tree(file, {"server": server, "clients": index}, about, self.run)
        except OSError as error:
            raise RunError(self._write_failed_message(file.name, error), key=file.name) from error
        states.prune(self._rotate(round))
        self.last, self._last_checkpoint = round, time.monotonic()
        self._last_cost = self._last_checkpoint - began
        self._total_cost += self._last_cost

    def finish(self, round: int, reason: str) -> None:
        """Record that the run ended after this round: "finished", "stopped" by a callback, or "diverged"."""
        if self.run is not None:
            data, _ = seal_json({"round": round, "reason": reason, "line": self._check}, self.run, ENDED)
            write_atomic(self.path / ENDED, data + b"\n")

    def write_diverged(self, message: str) -> None:
        """Write the file that marks the run as diverged, until it is resumed."""
        data = message.encode() + b"\n"
        write_atomic(self.path / DIVERGED, data if self.run is None else seal_text(DIVERGED, data, self.run))
        if self.last is not None:
            self.finish(self._recorded, "diverged")

    def restore(self, states: ClientStore, from_round: int | None = None) -> Checkpoint | None:
        """Read the last checkpoint, or that of an earlier round; return None before the first.

        Everything that it needs is validated before anything changes. Then the run is extended, if it is to have more
        rounds, the records after the checkpoint are cut off, and files that nothing refers to any more are deleted.
        """
        file = self._choose(from_round)
        require_replaceable(self.path / DIVERGED)
        if file is None:
            _require_no_records(self.path)
            self._extend()
            self._forget_divergence()
            remove_partial_files(self.path)
            self._cut(0)
            return None
        saved = read_checkpoint(file, self.experiment)
        states.require_states(saved.clients)
        older = self._older_indexes(saved.round) if states.folder is not None and states.folder.exists() else []
        self._extend()
        remove_partial_files(self.path)
        going_back = file != newest_checkpoint(self.path, self.run)
        if self.run is not None:
            set_aside(self.path, saved.round, read_bytes(self.path / ROUNDS)[saved.header.offset :], self.run)
            self._abandoned = last_abandoned_round(self.path)
            if self._abandoned is None or self._abandoned <= saved.round:
                delete_abandoned(self.path)  # left by a process that was killed before it did
        self._cut(saved.header.offset)
        self._forget_divergence()
        states.restore(saved.clients, older, postpone=going_back)
        self.last = self._recorded = saved.round
        self._check = saved.header.check
        return saved

    def _extend(self) -> None:
        if self.rounds is not None and self.run is not None:
            write_extension(self.path, self.run, self.rounds)

    def _use(self, experiment: ExperimentFile) -> None:
        self._experiment, self._check = experiment, experiment.checksum

    def _choose(self, from_round: int | None) -> Path | None:
        """Return the checkpoint to continue from."""
        if from_round is None:
            return newest_checkpoint(self.path, self.run)
        kept = find_checkpoints(self.path) if self.run is not None else {}
        if from_round not in kept:
            rounds = ", ".join(map(str, kept)) or "none"
            raise RunError(
                f"{self.path} has no checkpoint of round {from_round}; those it has are of rounds: {rounds}",
                key="from_round",
                value=from_round,
                valid=list(kept),
            )
        return kept[from_round]

    def _older_indexes(self, number: int) -> list[Tree]:
        """Return which client states the older checkpoints refer to; a damaged one is reported and not counted."""
        indexes = []
        for older, file in (find_checkpoints(self.path) if self.run is not None else {}).items():
            if older < number:
                try:
                    indexes.append(read_index(file, self.run))
                except RunError as error:
                    log.warning("%s; this older checkpoint cannot be used", error)
        return indexes

    def _rotate(self, newest: int) -> list[int]:
        """Delete the checkpoints that are too old, and return the rounds of the others."""
        if self.run is None:
            return [newest]
        if self._abandoned is not None and newest >= self._abandoned:
            delete_abandoned(self.path)
            self._abandoned = None
        kept = find_checkpoints(self.path)
        for number in list(kept)[: -self.keep]:
            remove(kept.pop(number))
            sync_folder(self.path)  # before the states that it refers to are deleted
        return list(kept)

    def _forget_divergence(self) -> None:
        """Remove what says that the run diverged: it is resumed, and may diverge again."""
        if is_there(self.path / DIVERGED):
            remove(self.path / ENDED)
            remove(self.path / DIVERGED)

    def _cut(self, length: int) -> None:
        """Cut rounds.jsonl to this length."""
        try:
            os.ftruncate(self._rounds, length)
        except OSError as error:
            raise RunError(self._write_failed_message(ROUNDS, error), key=ROUNDS) from error

    def _write_failed_message(self, name: str, error: OSError) -> str:
        reached = "nothing yet" if self.last is None else f"round {self.last}"
        return f"{self.path / name} could not be written ({error.strerror}); saved so far: {reached}"


def _require_no_records(path: Path) -> None:
    """Raise if a folder without a checkpoint has records of more than the untrained model: they would be cut off."""
    file = path / ROUNDS
    if is_there(file) and read_bytes(file).count(b"\n") > 1:
        raise RunError(
            f"{file} has records, but there is no checkpoint-ROUND.safetensors to continue from: choose another "
            f"folder, or move {ROUNDS} away to start again",
            key=ROUNDS,
            value=str(file),
        )
