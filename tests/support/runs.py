"""Small runs in folders: making, interrupting, killing and comparing them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeep as fk
from fedkeep import tree
from fedkeep.analysis.groups import Group
from fedkeep.analysis.run_set import read_runs
from fedkeep.errors import RunError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.run import run
from fedkeep.runs import client_store
from fedkeep.runs.checkpoints import Checkpoint, newest_checkpoint, read_checkpoint
from fedkeep.runs.experiment_file import read_experiment_file
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.reading import read_records
from support.methods import QUICK
from support.problems import same

SMALL: dict[str, Any] = {
    "model": "mlp",
    "data": {"source": "digits", "public": 2},
    "split": {"kind": "shards", "n_clients": 6, "s": 2},
    "train": {"rounds": 3, "participation": 2, "epochs": 1, "batch_size": 60, "lr": 0.05},
    "checkpoint_every": 2,
    "seed": 1,
}


def small_experiment(method: str, **train: Any) -> Experiment:
    """Return a small experiment on the digits, with these changes to [train]."""
    return Experiment.from_dict(
        {**SMALL, "method": {"name": method, **QUICK.get(method, {})}, "train": {**SMALL["train"], **train}}
    )


def run_small(path: Path | str, method: str, **train: Any) -> fk.History:
    """Run a small experiment in a folder, or resume it there; also the target of a process."""
    torch.set_num_threads(1)
    return run(small_experiment(method, **train), path)


def run_small_until_killed(path: Path | str, method: str, round: int, **train: Any) -> None:
    """Run or resume a small experiment up to this round, and wait there to be killed; the target of a process."""

    def wait(simulation: fk.Simulation, record: dict[str, Any]) -> None:
        if record["round"] == round:
            time.sleep(120)

    torch.set_num_threads(1)
    run(small_experiment(method, **train), path, [wait])


def interrupt_small(path: Path) -> None:
    """Leave a run of SCAFFOLD that was interrupted after round 3 of 4, with a checkpoint at round 2."""

    def stop(simulation: fk.Simulation, record: dict[str, Any]) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small_experiment("scaffold", rounds=4), path, [stop])


def assert_same_run(a: Path, b: Path) -> None:
    """Check that two run folders hold the same weights, client states and records, bit for bit."""
    one, other = read_newest(a), read_newest(b)
    assert one.round == other.round
    assert same(one.server, other.server)
    ours, theirs = _client_states(a, one.clients), _client_states(b, other.clients)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[k], theirs[k]) for k in ours)
    lines = [[{k: v for k, v in r.items() if k != "seconds"} for r in read_records(p / "rounds.jsonl")] for p in (a, b)]
    assert lines[0] == lines[1]


def read_newest(path: Path) -> Checkpoint:
    """Return the newest checkpoint of a run folder."""
    experiment = read_experiment_file(path)
    file = newest_checkpoint(path, experiment.run)
    assert file is not None
    return read_checkpoint(file, experiment)


def files_of(path: Path) -> dict[str, bytes]:
    """Return the contents of all files of a run folder but its lock."""
    found = (p for p in sorted(path.rglob("*")) if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(path)): p.read_bytes() for p in found}


def _client_states(path: Path, index: tree.Tree) -> dict[int, tree.Tree]:
    store = client_store.ClientStore(path / "clients", run=read_experiment_file(path).run)
    store.load_index(index)
    return {k: store[k] for k in store}


def wait_for_lines(path: Path, lines: int, process: subprocess.Popen[Any] | BaseProcess) -> None:
    """Wait until a running process has written this many lines of a file."""
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert (process.exitcode if isinstance(process, BaseProcess) else process.poll()) is None
        time.sleep(0.005)


def is_killed_at_write(forks: Any, method: str, path: Path, event: int) -> bool:
    """Run a small experiment in a process that kills itself at its n-th write; return False if it finished before."""
    process = forks.Process(target=_run_until_write, args=(method, str(path), event))
    process.start()
    process.join(120)
    assert process.exitcode in (-signal.SIGKILL, 7), process.exitcode
    return process.exitcode == -signal.SIGKILL


def _run_until_write(method: str, path: str, event: int) -> None:
    """Die without warning when the n-th sync, rename, removal or record is due."""
    count = 0

    def die_at(original, tear: bool = False):
        def wrapped(*args, **kwargs):
            nonlocal count
            count += 1
            if count == event:
                if tear and isinstance(args[0], int):  # a sync that never came: only half of the data reached the disk
                    size = os.fstat(args[0]).st_size
                    if os.readlink(f"/proc/self/fd/{args[0]}").endswith(".part"):
                        os.truncate(f"/proc/self/fd/{args[0]}", size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return wrapped

    os.fsync = die_at(os.fsync, tear=True)
    os.replace = die_at(os.replace)
    os.unlink = die_at(os.unlink)
    RunFolder.append = die_at(RunFolder.append)
    run_small(path, method)
    os._exit(7)  # it finished: there are no more writes


def run_with_little_space(path: str, method: str, **train: Any) -> None:
    """Run where files cannot grow beyond 40 kB; exit with 0 if the error names the file and the saved round."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # a checkpoint fits, the records of 80 rounds do not
    try:
        run_small(path, method, **train)
    except RunError as error:
        saved = read_newest(Path(path)).round
        sys.exit(0 if error.key == "rounds.jsonl" and f"round {saved}" in str(error) else 3)
    sys.exit(4)


def expect_locked(path: str) -> None:
    """Exit with 0 if another process is using the folder."""
    try:
        RunFolder.open(Path(path))
    except RunError as error:
        sys.exit(0 if (error.key, error.value) == ("run_dir", path) else 3)
    sys.exit(4)


def group_runs(paths: Iterable[str | Path]) -> list[Group]:
    """Read run folders and return the groups of all their problems."""
    return read_runs(paths).groups
