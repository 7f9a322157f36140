"""Sweeps: one run that fails, in whatever way, is that run's failure and no more; exit codes; bad command lines."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support import failing
from support.errors import raises
from support.runs import SMALL, small_experiment

import fedkeep as fk
from fedkeep.cli import app
from fedkeep.cli.progress import ProgressBar
from fedkeep.errors import ConfigError, FedkeepError, MethodError, ModelError, RunFailed
from fedkeep.experiments import workers
from fedkeep.experiments.experiment import PRESETS, Experiment
from fedkeep.experiments.failure import TRACEBACK
from fedkeep.experiments.overrides import override
from fedkeep.experiments.run import run
from fedkeep.experiments.sweep import Outcome, run_all

pytestmark = pytest.mark.usefixtures("forked_workers")


def sweep(path: Path, jobs: int, make_callbacks: Any = list) -> tuple[dict[str, Outcome], str]:
    """Run the seeds 0 to 3 of a small experiment; return the results, and what was printed."""
    experiments = {f"s{seed}": Experiment.from_dict({**SMALL, "method": "fedavg", "seed": seed}) for seed in range(4)}
    console = Console(file=StringIO(), width=500)
    with ProgressBar(console, 12) as progress, closing(
        run_all(experiments, path, jobs, progress, make_callbacks)
    ) as outcomes:  # fmt: skip
        results = dict(outcomes)
    return results, console.file.getvalue()  # type: ignore[attr-defined]


def failed(results: dict[str, Outcome]) -> set[str]:
    return {label for label, outcome in results.items() if isinstance(outcome, FedkeepError)}


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_unexpected_error_is_one_runs_failure(tmp_path: Path, jobs: int) -> None:
    results, printed = sweep(tmp_path, jobs, failing.raising_callbacks)
    file = tmp_path / "s1" / TRACEBACK
    assert failed(results) == {"s1"}
    assert len(results) == 4
    assert isinstance(results["s1"], RunFailed)
    [line] = printed.splitlines()
    assert all(part in line for part in ("s1", "ZeroDivisionError", "first line second line", str(file)))
    assert "test_sweeps" in file.read_text() or "_raise" in file.read_text()
    results, printed = sweep(tmp_path, jobs)
    assert failed(results) == set()
    assert not file.exists(), "the run was successful after all"


def test_a_process_that_dies_is_one_runs_failure(tmp_path: Path) -> None:
    results, printed = sweep(tmp_path, 2, failing.dying_callbacks)
    assert failed(results) == {"s1"}
    assert len(results) == 4
    [line] = printed.splitlines()
    assert "s1" in line
    assert "SIGKILL" in line


@pytest.mark.parametrize("make_callbacks", [failing.unpicklable_callbacks, failing.global_lambda_callbacks])
def test_an_error_that_cannot_be_sent_is_one_runs_failure(tmp_path: Path, make_callbacks: Any) -> None:
    results, printed = sweep(tmp_path, 2, make_callbacks)
    assert failed(results) == {"s1"}
    assert "it holds a function" in printed


def test_a_failed_process_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SECONDS_TO_END", 1.0)
    began = time.monotonic()
    results, _ = sweep(tmp_path, 2, failing.lingering_callbacks)
    assert failed(results) == {"s1"}
    assert len(results) == 4
    assert time.monotonic() - began < 200


# Exit codes


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> Any:
    """Run a command in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["fedkeep", *args])
    with pytest.raises(SystemExit) as end:
        app.main()
    return end.value.code or 0


SHORT = ["digits", "rounds=1", "epochs=1"]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ("lr=1e30", 1),
        ("data=nope.npz", 2),
        ("data=digit", 2),
        ("model.hidden=[0]", 2),
        ("split.s=0", 2),
        ("participation=50", 2),
        ("device=cudaa", 2),
    ],
)
def test_a_run_that_failed_gives_1_and_one_that_was_refused_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str, code: int
) -> None:
    """Alone and in a sweep."""
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "run", *SHORT, wrong) == code
    assert capsys.readouterr().err.count("\n") == 1
    assert call(monkeypatch, "run", *SHORT, wrong, "--sweep", "seed=0,1") == code
    assert call(monkeypatch, "run", *SHORT, wrong, "nope=1") == 2


def test_a_sweep_of_which_one_run_is_refused_gives_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "run", *SHORT, "--sweep", "participation=2,50") == 1
    assert call(monkeypatch, "run", "digits", "rounds=2", "--name", "digits-rounds=1-epochs=1-participation=2") == 2


@pytest.mark.parametrize(
    ("error", "code", "mentions"),
    [
        (OSError(30, "Read-only file system", "report.html"), 1, ["report.html", "Read-only"]),
        (MemoryError(), 1, ["memory"]),
        (ConfigError("two\nlines\x1b[31m"), 2, ["two lines\\x1b[31m"]),
        (RunFailed("its process was killed"), 1, ["killed"]),
    ],
)
def test_errors_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    mentions: list[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(app, "app", fail)
    assert call(monkeypatch) == code
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert all(part in printed for part in mentions)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise KeyError("lost")

    monkeypatch.setattr(app, "app", fail)
    assert call(monkeypatch) == 1
    *_, error, last = capsys.readouterr().err.splitlines()
    assert "KeyError" in error
    assert fk.__version__ in last


# Bad input


@pytest.mark.parametrize(
    ("text", "kind", "key"),
    [
        ("lr=" + "[" * 1000 + "]" * 1000, ConfigError, "train.lr"),
        ("lr=" + "9" * 5000, ConfigError, "train.lr"),
        ("lr=0x" + "f" * 5000, ConfigError, "train.lr"),
        (f"model.projection={2**63}", ConfigError, "model.projection"),
        (f"method.tau={10**30}", ConfigError, "method.tau"),
        (f"threads={2**31}", FedkeepError, "train.threads"),
        ("epochs=1000000000", FedkeepError, "train.epochs"),
        ("method.tau=1e308", ConfigError, "method.tau"),
        ("lr=1e39", FedkeepError, "train.lr"),
    ],
)
def test_what_torch_or_python_cannot_take_is_refused_by_key(text: str, kind: type[FedkeepError], key: str) -> None:
    with raises(kind, key):
        Experiment.load(PRESETS / "digits.toml", [text])


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("lr=abc", "train.lr"),
        ("rounds=2.5", "train.rounds"),
        ("participation=half", "train.participation"),
        ("cohorts=3", "train.cohorts"),
        ("deterministic=3", "train.deterministic"),
        ("keep=0", "keep"),
        ("train=3", "train"),
    ],
)
def test_a_value_of_another_type_is_refused_in_our_words(text: str, key: str) -> None:
    with raises(ConfigError, key, mentions=[f"{key} must be"]) as caught:
        Experiment.load(PRESETS / "digits.toml", [text])
    assert "Input" not in str(caught.value), "pydantic's words"


@pytest.mark.parametrize("data", [np.ones((2, 2)), {"source": np.ones((2, 2))}])
def test_objects_in_an_experiment_are_refused_and_not_printed(data: Any) -> None:
    with raises(ConfigError, mentions=["ndarray", "fedkeep.simulate"]):
        Experiment.from_dict({"method": "fedavg", "model": "mlp", "data": data, "split": "by_id"})


@pytest.mark.parametrize("value", [10**30, 1e308, 10**5000], ids=["int", "float", "long int"])
def test_hyperparameters_are_numbers_that_torch_can_take(value: float) -> None:
    with raises(MethodError, key="method.tau", value=value):
        fk.methods.FedNTD(tau=value)


@pytest.mark.parametrize(
    "options", [{"projection": 2**31}, {"hidden": [10**9]}, {"hidden": [2**20, 2**20]}, {"hidden": [1] * 1000}]
)
def test_models_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with raises(ModelError):
        fk.models.build("mlp", (1, 8, 8), 10, **options)


def test_more_padding_than_image_is_refused(tmp_path: Path) -> None:
    with raises(FedkeepError, key="augment.crop", value=2**31):
        run(small_experiment("fedavg", augment={"crop": 2**31}), tmp_path / "x")


def test_a_learning_rate_that_overflows_diverges(tmp_path: Path) -> None:
    assert fk.Settings(lr_decay=1e30).lr_in(100) == float("inf")
    with pytest.raises(fk.errors.Diverged):
        run(small_experiment("fedavg", lr_decay=1e38, rounds=12), tmp_path / "x")


@pytest.mark.parametrize(
    "content", [b"a = " + b"[" * 1000, b"a = 0x" + b"f" * 5000, b"a = " + b"9" * 5000, b"\xff", b"a"]
)
def test_an_experiment_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(content)
    with raises(ConfigError, key="file", value=str(file), mentions=[str(file)]):
        Experiment.load(file)


def test_a_name_that_is_too_long_is_named() -> None:
    with raises(ConfigError, key="file", value="n" * 300):
        Experiment.load("n" * 300)


def test_another_experiment_is_named_by_what_was_changed(tmp_path: Path) -> None:
    """A public set brings a seed of its own, which says less than the public set itself."""
    tables = {**SMALL, "method": "fedavg"}
    run(Experiment.from_dict(tables), tmp_path / "x")
    others = {
        "data.public": {**tables, "data": "digits"},
        "split.seed": override(tables, ["split.seed=7"]),
        "seed": override(tables, ["seed=7"]),
    }
    for key, other in others.items():
        with raises(ConfigError, key=key, mentions=[str(tmp_path / "x")]):
            run(Experiment.from_dict(other), tmp_path / "x")
