"""Progress of runs: a bar on a terminal, lines when piped."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from fedkeep import forgetting
from fedkeep._util.text import printable
from fedkeep.cli.heatmap import append_cells, row_labels
from fedkeep.errors import Diverged, FedkeepError, RunError
from fedkeep.runs.history import History, Record

MAX_SECONDS_BETWEEN_LINES = 10.0  # when piped
MIN_SECONDS_BETWEEN_STEPS = 1.0  # when piped: steps that follow each other faster are not printed


class ProgressBar:
    """Progress over all rounds of all runs.

    On a terminal: a bar with the time left, and the class accuracies of the current run. Piped: a line at the end of
    every run, and some lines during a long one. Errors in an experiment are shown with the name in `experiments`, where
    the run's folder has one: what the user wrote, not what is made of it.
    """

    def __init__(self, console: Console, total: int, experiments: Mapping[str, str] | None = None) -> None:
        self.console, self.experiments = console, experiments or {}
        self.name, self.run, self.counted = "", RunProgress(), 0
        self.last_line = time.monotonic()
        self.progress = Progress(
            TextColumn("{task.description:<18}", markup=False, table_column=Column(max_width=34, no_wrap=True)),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds, time left"),
            TimeRemainingColumn(),
            console=console,
        )
        self.task = self.progress.add_task("", total=total)
        self.live = Live(console=console, transient=True, get_renderable=self._now) if console.is_terminal else None

    def __enter__(self) -> ProgressBar:
        if self.live:
            self.live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.live:
            self.live.__exit__(*exc)

    def start_run(self, name: str) -> None:
        """Show which run is running now."""
        self.name, self.run, self.counted = printable(name), RunProgress(max(10, min(60, self.console.width - 14))), 0
        self.progress.update(self.task, description=self.name)

    def __call__(self, simulation: Any, record: Record) -> None:
        """Count a round. The bar is a callback of the simulation."""
        self._count(record["round"])
        self.run.class_names = simulation.history.class_names
        for each in [record] if self.run.round else simulation.history.records:  # resumed: the earlier rounds too
            self.run.update(each)
        if self.live is None and time.monotonic() - self.last_line >= MAX_SECONDS_BETWEEN_LINES:
            self._print(f"{self.name}: {self.run.line()}")

    def finish_run(self, name: str, history: History, rounds: int) -> None:
        """Show a run's result. The bar advances to the rounds that were planned, also if the run ended earlier."""
        self._count(rounds)
        s = history.summary()
        if self.live is None:
            number = len(history.records) - 1
            forgetting = "" if math.isnan(s["forgetting"]) else f", forgetting {s['forgetting']:.3f}"
            self._print(
                f"{printable(name)}: accuracy {s['final']:.3f}{forgetting}{format_epsilon(history.epsilon)} "
                f"({number} round{'s' * (number != 1)}, {s['seconds']:.1f} s, {history.settings['engine']})"
            )

    def fail_run(self, name: str, error: FedkeepError, rounds: int) -> None:
        """Show a run's error."""
        self._count(rounds)
        if not isinstance(error, Diverged | RunError):  # these are events of the run
            name = self.experiments.get(name, name)
        line = printable(": ".join(part for part in ("fedkeep", name, str(error)) if part))
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, line: str) -> None:
        """Show a line above the bar."""
        self._print(line)

    def _count(self, rounds: int) -> None:
        """Advance the bar to this many rounds of the current run, including rounds that ran before it was resumed."""
        self.progress.advance(self.task, rounds - self.counted)
        self.counted = rounds

    def _print(self, line: str) -> None:
        self.last_line = time.monotonic()
        print(line, file=sys.stderr, flush=True)

    def _now(self) -> RenderableType:
        """Return what a terminal shows at this moment."""
        if not self.run.recent:
            return self.progress.get_renderable()
        return Group(self.progress.get_renderable(), Text(self.run.line()), self.run.strip())


class StepBar:
    """Progress over named steps: a bar on a terminal, and when piped a line before each step that others waited for."""

    def __init__(self, console: Console, total: int) -> None:
        self.total, self.started, self.last_line = total, 0, time.monotonic()
        columns = (TextColumn("{task.description:<16}", markup=False), BarColumn(), MofNCompleteColumn())
        self.progress = Progress(*columns, console=console, transient=True)
        self.task = self.progress.add_task("", total=total)
        self.live = console.is_terminal

    def __enter__(self) -> StepBar:
        if self.live:
            self.progress.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.live:
            self.progress.stop()

    def __call__(self, step: str) -> None:
        """Show which step starts now; those before it are finished."""
        self.progress.update(self.task, description=step, completed=self.started)
        self.started += 1
        if not self.live and time.monotonic() - self.last_line >= MIN_SECONDS_BETWEEN_STEPS:
            self.last_line = time.monotonic()
            print(f"{step} ({self.started} of {self.total})", file=sys.stderr, flush=True)


class RunProgress:
    """Accuracy, forgetting and class accuracies of one run, updated record by record.

    >>> run = RunProgress()
    >>> run.update({"round": 1, "confusion": [[9, 1], [10, 0]]})
    >>> run.update({"round": 2, "confusion": [[3, 7], [2, 8]]})
    >>> run.line()
    'round 2: accuracy 0.550, forgetting -0.100'
    >>> run.update({"round": 3, "confusion": [[3, 7], [2, 8]], "epsilon": 4.7285})
    >>> run.line()
    'round 3: accuracy 0.550, forgetting 0.300, epsilon 4.73'
    """

    def __init__(self, rounds: int = 60) -> None:
        self.class_names: Sequence[str] | None = None
        self.round = 0
        self.accuracy = float("nan")
        self.epsilon: float | None = None
        self.recent: deque[np.ndarray] = deque(maxlen=rounds)  # class accuracies [C] of the last evaluated rounds
        self._best: np.ndarray | None = None  # [C] of the rounds before the last

    def update(self, record: Record) -> None:
        """Add a round's record."""
        if record["round"] < 1:
            return
        self.round, self.epsilon = record["round"], record.get("epsilon")
        if "confusion" not in record:
            return
        if self.recent:
            last = self.recent[-1]
            self._best = last if self._best is None else np.maximum(self._best, last)
        self.accuracy = float(forgetting.accuracy(record["confusion"]))
        self.recent.append(forgetting.class_accuracy(record["confusion"]))

    @property
    def lost(self) -> np.ndarray | None:
        """How far each class is below its best earlier round, [C]; None before the second round."""
        return None if self._best is None else self._best - self.recent[-1]

    def line(self) -> str:
        """Format the last round as one line."""
        if not self.recent:
            return f"round {self.round}: not evaluated yet"
        lost = self.lost
        forgotten = "" if lost is None else f", forgetting {np.nanmean(lost):.3f}"
        return f"round {self.round}: accuracy {self.accuracy:.3f}{forgotten}{format_epsilon(self.epsilon)}"

    def strip(self, most: int = 10) -> Text:
        """Draw the last rounds, a row per class; of many classes, those that have lost most."""
        text = Text()
        if not self.recent:
            return text
        accuracy = np.stack(self.recent)
        labels = row_labels(accuracy.shape[1], self.class_names, 4)
        for c in self._shown(most):
            text.append(f"  {labels[c]}", style="dim")
            append_cells(text, accuracy[:, c])
            text.append("\n")
        return text

    def _shown(self, most: int) -> list[int]:
        classes = len(self.recent[-1])
        if classes <= most or self.lost is None:
            return list(range(min(classes, most)))
        worst = np.argsort(-np.nan_to_num(self.lost, nan=-1.0), kind="stable")[:most]
        return sorted(int(c) for c in worst)


def format_epsilon(epsilon: float | None) -> str:
    """Format what a differentially private run has spent so far; nothing for other runs."""
    return "" if epsilon is None else f", epsilon {epsilon:.2f}"
