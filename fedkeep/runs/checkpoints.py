"""Checkpoints of a run folder: the server's tree and an index of the clients' states, one file per kept round."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeep.errors import ForeignFile, RunError
from fedkeep.runs.experiment_file import ExperimentFile
from fedkeep.runs.files import (
    EXPERIMENT,
    EXTENDED,
    FEDERATION,
    INSTRUMENTS,
    ROUNDS,
    SPLIT,
    entries,
    is_there,
    read_bytes,
)
from fedkeep.runs.history import Record
from fedkeep.runs.records import Lines, read_lines
from fedkeep.runs.seals import checksum, damaged
from fedkeep.runs.trees import read_about, read_tree, require_whole_numbers
from fedkeep.tree import Tree

CHECKPOINT_1 = "checkpoint.safetensors"  # the only checkpoint of a run of format 1
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})\.safetensors")


@dataclass(frozen=True)
class CheckpointHeader:
    """What a checkpoint says about the run besides its trees."""

    file: Path
    round: int
    offset: int  # the length of rounds.jsonl after this round
    check: str  # the checksum of the round's line
    files: dict[str, Any]  # checksums of other files of the run, by name
    ended: str | None  # why the run ended after this round, if it did


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read back."""

    header: CheckpointHeader
    server: Tree
    clients: Tree
    records: list[Record]

    @property
    def round(self) -> int:
        """The round after which it was written."""
        return self.header.round


def checkpoint_file(folder: Path, round: int, run: str | None) -> Path:
    """Return the path of a round's checkpoint."""
    return folder / (CHECKPOINT_1 if run is None else f"checkpoint-{round}.safetensors")


def find_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a run of format 2 by their rounds, oldest first."""
    found = {int(m[1]): Path(e.path) for e in entries(folder) if (m := _NAME.fullmatch(e.name))}
    return dict(sorted(found.items()))


def newest_checkpoint(folder: Path, run: str | None) -> Path | None:
    """Return the newest checkpoint of a run, or None before the first."""
    if run is None:
        return folder / CHECKPOINT_1 if is_there(folder / CHECKPOINT_1) else None
    return next(reversed(find_checkpoints(folder).values()), None)


def read_header(file: Path, run: str | None) -> CheckpointHeader:
    """Return a checkpoint's header without reading its trees."""
    with _naming_older(file):
        return _header(file, read_about(file, run))


def read_checkpoint(file: Path, experiment: ExperimentFile) -> Checkpoint:
    """Return a checkpoint with the records up to it; raise if anything is damaged, missing or of another run."""
    with _naming_older(file):
        saved, about = read_tree(file, experiment.run)
        header = _header(file, about)
        if "server" not in saved or "clients" not in saved:
            raise damaged(str(file), file.name, "it has no server or no clients")
    require_files(header, experiment)
    lines = read_lines(file.parent / ROUNDS, experiment, header.offset)
    require_lines(lines, header, experiment)
    return Checkpoint(header, saved["server"], saved["clients"], lines.records)


def read_index(file: Path, run: str | None) -> Tree:
    """Return which client states a checkpoint refers to."""
    saved, about = read_tree(file, run)
    _header(file, about)
    index: Tree = saved.get("clients", {})
    return index


def require_lines(lines: Lines, header: CheckpointHeader, experiment: ExperimentFile) -> None:
    """Raise unless the records reach to the checkpoint's round, and the line of that round is the one it names."""
    rounds, name = header.file.parent / ROUNDS, header.file.name
    last = lines.records[-1]["round"] if lines.records else "none"
    if len(lines.records) <= header.round:
        raise RunError(
            f"{rounds} is damaged: its last round is {last}, but {name} was written after round {header.round}",
            key=ROUNDS,
            value=last,
            valid=[header.round],
        )
    at = header.round
    if lines.ends[at] != header.offset or (experiment.run is not None and lines.checks[at] != header.check):
        raise damaged(str(rounds), ROUNDS, f"the line of round {at} is not the one that {name} was written after")


def require_files(header: CheckpointHeader, experiment: ExperimentFile) -> None:
    """Raise unless the files that a checkpoint covers are still the same."""
    folder, name = header.file.parent, header.file.name
    for other, expected in header.files.items():
        file = folder / other
        if other == EXPERIMENT and expected == experiment.checksum:
            continue  # as it was read
        if not is_there(file):
            raise RunError(f"{file} does not exist, but {name} refers to it", key=other, value=str(file))
        if expected is not None and checksum(read_bytes(file)) != expected:
            raise damaged(str(file), other, f"it is not the file that {name} was written with")


def covered_files(folder: Path, experiment: ExperimentFile) -> dict[str, Any]:
    """Return the checksums that a checkpoint stores of other files; of a file that may still change, only its name."""
    files: dict[str, Any] = {EXPERIMENT: experiment.checksum}
    for name in (SPLIT, FEDERATION):
        if is_there(folder / name):
            files[name] = checksum(read_bytes(folder / name))
    for name in (INSTRUMENTS, EXTENDED):
        if is_there(folder / name):
            files[name] = None
    return files


@contextmanager
def _naming_older(file: Path) -> Iterator[None]:
    """Add to an error how to continue from an older checkpoint, if there is one."""
    try:
        yield
    except ForeignFile:
        raise
    except RunError as error:
        match = _NAME.fullmatch(file.name)
        older = [number for number in find_checkpoints(file.parent) if match and number < int(match[1])]
        if not older:
            raise
        command = f"fedkeep resume {shlex.quote(str(file.parent))} --from-round {older[-1]}"
        raise error.converted(type(error), f"{error}; to continue from an older checkpoint: {command}") from error


def _header(file: Path, about: dict[str, Any]) -> CheckpointHeader:
    number, offset = require_whole_numbers(file, about, "round", "offset")
    if file.name != CHECKPOINT_1 and file.name != f"checkpoint-{number}.safetensors":
        raise damaged(str(file), file.name, f"it is the checkpoint of round {number}")
    return CheckpointHeader(file, number, offset, about.get("check", ""), about.get("files", {}), about.get("ended"))
