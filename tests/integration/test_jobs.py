"""How many runs run at a time: the option --jobs and its default."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cli import fedkeep
from support.errors import raises
from support.runs import SMALL

from fedkeep.cli.options import parse_jobs
from fedkeep.errors import FedkeepError
from fedkeep.experiments import jobs as jobs_module
from fedkeep.experiments import sweep
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.jobs import nvidia_mps_runs, resolve_jobs


def runs(device: str, number: int = 9) -> list[Experiment]:
    tables = {**SMALL, "method": "fedavg", "train": {**SMALL["train"], "device": device}}
    return [Experiment.from_dict({**tables, "seed": seed}) for seed in range(number)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that makes this a machine with or without a GPU and MPS."""

    def make(gpu: bool, mps: bool, ranks: int = 1) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(jobs_module, "current_ranks", lambda: SimpleNamespace(size=ranks))
        monkeypatch.setattr(jobs_module, "RUNS_PER_GPU", 2)
        monkeypatch.setattr(jobs_module, "RUNS_PER_GPU_WITH_MPS", 5)
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
        if mps:
            (tmp_path / "control").touch()

    return make


@pytest.mark.parametrize(
    ("gpu", "mps", "ranks", "device", "number", "expected"),
    [
        (False, False, 1, "auto", 9, 1),
        (False, True, 1, "auto", 9, 1),
        (True, False, 1, "auto", 9, 2),
        (True, True, 1, "auto", 9, 5),
        (True, True, 1, "cuda:0", 9, 5),
        (True, True, 1, "cpu", 9, 1),
        (True, True, 1, "auto", 3, 3),  # no more than there are runs
        (True, True, 1, "auto", 0, 1),
        (True, True, 2, "auto", 9, 1),  # torchrun
    ],
)
def test_the_default(machine: Any, gpu: bool, mps: bool, ranks: int, device: str, number: int, expected: int) -> None:
    machine(gpu, mps, ranks)
    assert nvidia_mps_runs() == mps
    assert resolve_jobs("auto", runs(device, number)) == expected


def test_runs_on_both_cpu_and_gpu_run_one_at_a_time(machine: Any) -> None:
    machine(gpu=True, mps=True)
    assert resolve_jobs("auto", [*runs("cuda", 2), *runs("cpu", 2)]) == 1


def test_a_given_number_is_used(machine: Any) -> None:
    machine(gpu=True, mps=True)
    assert resolve_jobs(3, runs("cpu")) == 3
    with raises(FedkeepError, key="jobs", value=0):
        resolve_jobs(0, runs("cpu"))
    machine(gpu=True, mps=True, ranks=2)
    with raises(FedkeepError, key="jobs", value=2):
        resolve_jobs(2, runs("cpu"))


def test_a_sweep_asks_for_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[int] = []

    def in_processes(experiments: Any, folder: Path, jobs: int, *rest: Any) -> Any:
        started.append(jobs)
        yield from ()

    monkeypatch.setattr(sweep, "_in_processes", in_processes)
    monkeypatch.setattr(sweep, "resolve_jobs", lambda jobs, experiments: {"auto": 4}[jobs])
    assert list(sweep.run_all({}, tmp_path, "auto", None)) == []  # type: ignore[arg-type]
    assert started == [4]


def test_the_options_words() -> None:
    assert (parse_jobs("auto"), parse_jobs("3")) == ("auto", 3)


@pytest.mark.parametrize("command", ["run", "reproduce"])
@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_anything_else_is_refused(command: str, text: str) -> None:
    done = fedkeep(command, "digits", f"--jobs={text}")
    assert done.returncode == 2
    assert "is neither a number of at least 1 nor auto" in " ".join(done.stderr.replace("│", " ").split())


def test_two_runs_at_a_time_give_what_one_gives(tmp_path: Path) -> None:
    args = ("run", "digits", "rounds=2", "--sweep", "seed=0,1", "--json")
    results = [
        json.loads(fedkeep(*args, "--jobs", jobs, "--runs", str(tmp_path / jobs), fresh=True).stdout)
        for jobs in ("auto", "2")
    ]
    for result in results:
        for summary in result.values():
            summary.pop("seconds")
    assert results[0] == results[1]


def test_a_script_without_a_main_guard_can_run_several_at_a_time(tmp_path: Path) -> None:
    """A process does not run the script again, and finds code of the user's own next to it."""
    (tmp_path / "parts.py").write_text(
        "from torch import nn\n"
        "def net(input_shape, n_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, n_classes))\n"
    )
    (tmp_path / "script.py").write_text(
        "import fedkeep as fk\n"
        "print('started')\n"
        "print(fk.sweep('digits', {'seed': [0, 1]}, jobs=2, rounds=1, model='parts:net', name='x'))\n"
    )
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    assert done.stdout.startswith("started\n<SweepResult: 2 runs, 0 failed>")
    assert done.stdout.count("started") == 1
