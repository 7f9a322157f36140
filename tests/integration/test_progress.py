"""Progress of runs: what a terminal shows, what is printed when piped, and how rounds are counted."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.runs import interrupt_small, run_small, small_experiment
from support.synthetic import records, wave

from fedkeep.cli.progress import (
    MAX_SECONDS_BETWEEN_LINES,
    MIN_SECONDS_BETWEEN_STEPS,
    ProgressBar,
    RunProgress,
    StepBar,
)
from fedkeep.errors import Diverged
from fedkeep.experiments.sweep import run_all


def test_run_progress_measures_the_same_as_the_history() -> None:
    lines = records(wave(1, rounds=9))
    run = RunProgress(rounds=4)
    for line in lines:
        run.update(line)
    whole = np.array([np.diag(line["confusion"]) / 20 for line in lines[1:]])
    assert run.lost is not None
    np.testing.assert_allclose(run.lost, whole[:-1].max(0) - whole[-1])
    assert run.line() == f"round 9: accuracy {whole[-1].mean():.3f}, forgetting {run.lost.mean():.3f}"
    assert len(run.recent) == 4


def test_run_progress_shows_a_column_per_round_and_of_many_classes_those_that_lost_most() -> None:
    run = RunProgress()
    assert "round 0" in run.line()
    assert run.strip().plain == ""
    before, after = np.ones(30), np.ones(30)
    after[[3, 17]] = 0.0
    for line in records([[0.0] * 30, before.tolist(), after.tolist()]):
        run.update(line)
    rows = run.strip(most=2).plain.splitlines()
    assert [row.split()[1] for row in rows] == ["3", "17"]
    assert rows[0].endswith("█ ")
    run.update({"round": 3})  # not evaluated
    assert run.line().startswith("round 3: accuracy")


def run_one_round(bar: ProgressBar, lines: list[dict[str, Any]]) -> None:
    bar.start_run("fedavg")
    bar(SimpleNamespace(history=SimpleNamespace(records=lines, class_names=None)), lines[-1])


def test_a_terminal_shows_the_classes_of_the_current_run() -> None:
    console = Console(force_terminal=True, file=io.StringIO(), width=80)
    with ProgressBar(console, 4) as bar:
        run_one_round(bar, records(wave(0)))  # resumed: the earlier rounds are shown too
        assert len(bar.run.recent) == 4
        assert bar.live is not None
        bar.live.refresh()
    shown = console.file.getvalue()
    for part in ("fedavg", "accuracy", "forgetting", "class 2", "▇"):
        assert part in shown


def test_a_long_run_prints_a_line_from_time_to_time_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(Console(file=io.StringIO()), 4)
    run_one_round(bar, records(wave(0)))
    assert capsys.readouterr().err == ""
    bar.last_line -= MAX_SECONDS_BETWEEN_LINES
    run_one_round(bar, records(wave(0)))
    assert capsys.readouterr().err.startswith("fedavg: round 4: accuracy 0.")


class Watched(ProgressBar):
    """A bar that remembers how many rounds it showed after every round and every run."""

    def __init__(self, total: int) -> None:
        super().__init__(Console(file=io.StringIO()), total)
        self.shown: list[float] = []

    def _count(self, rounds: int) -> None:
        super()._count(rounds)
        self.shown.append(self.progress.tasks[0].completed)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("jobs", [1, 2])
def test_the_bar_counts_every_round_once(tmp_path: Path, jobs: int) -> None:
    """Four runs: a new one, a finished one, one to be resumed after round 2 of 4, and one that diverges."""
    run_small(tmp_path / "finished", "fedavg")
    interrupt_small(tmp_path / "resumed")
    experiments = {
        "new": small_experiment("fedavg"),
        "finished": small_experiment("fedavg"),
        "resumed": small_experiment("scaffold", rounds=4),
        "diverged": small_experiment("fedavg", lr=1e30),
    }
    bar = Watched(sum(experiment.train.rounds for experiment in experiments.values()))
    outcomes = dict(run_all(experiments, tmp_path, jobs, bar))
    assert isinstance(outcomes.pop("diverged"), Diverged)
    assert {label: outcome.finished for label, outcome in outcomes.items()} == dict.fromkeys(outcomes, True)
    assert bar.shown == sorted(bar.shown), "the bar never goes back"
    assert bar.shown[-1] == bar.progress.tasks[0].total == 13
    if jobs == 1:
        assert bar.shown == [1, 2, 3, 3, 6, 9, 10, 10, 13], "a resumed run starts at its checkpoint"


def test_steps_are_shown_on_a_terminal_and_printed_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=True, file=io.StringIO(), width=80)
    with StepBar(console, 3) as bar:
        bar("where")
        bar("surface")
        bar.progress.refresh()
    assert "surface" in console.file.getvalue()
    assert "1/3" in console.file.getvalue()
    assert capsys.readouterr().err == ""
    with StepBar(Console(file=io.StringIO()), 3) as bar:
        bar("where")
        bar.last_line -= MIN_SECONDS_BETWEEN_STEPS
        bar("surface")
    assert capsys.readouterr().err == "surface (2 of 3)\n"
