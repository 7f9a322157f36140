"""Deleting the run in a folder, so that another can take its place. Files that fedkeep did not write stay."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from fedkeep.errors import RunError
from fedkeep.runs.abandoned import delete_abandoned
from fedkeep.runs.checkpoints import CHECKPOINT_1, find_checkpoints
from fedkeep.runs.client_store import ClientStore
from fedkeep.runs.experiment_file import read_experiment_file
from fedkeep.runs.files import (
    CLIENTS,
    DIVERGED,
    ENDED,
    EXPERIMENT,
    EXTENDED,
    FEDERATION,
    INSTRUMENTS,
    LOG_CSV,
    SPLIT,
    TENSORBOARD,
    TRACE,
    WANDB,
    entries,
    remove,
)
from fedkeep.runs.releases import RELEASES


def delete_run(path: Path) -> None:
    """Delete the files of the run in a folder, its logs first and the experiment file last; rounds.jsonl is not."""
    _delete_logs(path)
    ClientStore(path / CLIENTS).restore({})  # no state is referred to any more
    delete_abandoned(path)
    for file in (*find_checkpoints(path).values(), path / CHECKPOINT_1):
        remove(file)
    for name in (RELEASES, SPLIT, FEDERATION, INSTRUMENTS, EXTENDED, ENDED, DIVERGED, EXPERIMENT):
        remove(path / name)


def _delete_logs(path: Path) -> None:
    """Delete what the loggers and the profiler write into a run folder. Links to folders are not followed."""
    for name in (LOG_CSV, TRACE):
        if not (path / name).is_dir():
            remove(path / name)
    for entry in _entries(path / TENSORBOARD):
        if entry.name.startswith("events.out.tfevents."):
            remove(Path(entry.path))
    try:
        run = read_experiment_file(path).run
    except RunError:  # a damaged run can be replaced too
        run = None
    logged = _entries(path / WANDB)
    for entry in logged:
        if run is not None and entry.name.endswith(f"-{run}"):
            shutil.rmtree(entry.path, ignore_errors=True)
    for entry in logged:
        if entry.is_symlink() and not os.path.exists(entry.path):  # latest-run and debug.log lead there
            remove(Path(entry.path))
    for name in (TENSORBOARD, WANDB):
        with contextlib.suppress(OSError):  # it has other files, or is missing
            os.rmdir(path / name)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    return [] if folder.is_symlink() else list(entries(folder))
