"""What the command line shows: a heat map of class accuracies, progress. Tables are in `table`."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from fedkeep.history import History, Record
from fedkeep.live import BLOCKS, COLOURS, Pulse, append_cells

__all__ = ["BLOCKS", "COLOURS", "Bar", "heat_map"]

SILENCE = 10.0  # seconds without a line, at most, when piped


class Bar:
    """Progress over all rounds of all runs.

    On a terminal: a bar with the time left, and how the present run is doing, class by class. Piped: a line at the end
    of every run, and one now and then within a long one.
    """

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self.name, self.pulse, self.said = "", Pulse(), time.monotonic()
        self.progress = Progress(
            TextColumn("{task.description:<18}", table_column=Column(max_width=34, no_wrap=True)),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds, time left"),
            TimeRemainingColumn(),
            console=console,
        )
        self.task = self.progress.add_task("", total=total)
        self.live = Live(console=console, transient=True, get_renderable=self._now) if console.is_terminal else None

    def __enter__(self) -> Bar:
        if self.live:
            self.live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.live:
            self.live.__exit__(*exc)

    def begin(self, name: str) -> None:
        """Say which run is going on."""
        self.name, self.pulse = name, Pulse(max(10, min(60, self.console.width - 14)))
        self.progress.update(self.task, description=name)

    def advance(self, rounds: int) -> None:
        """Count rounds that were run elsewhere."""
        self.progress.advance(self.task, rounds)

    def say(self, text: str) -> None:
        """Print a line among the progress."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __call__(self, simulation: Any, record: Record) -> None:
        """Count a round; this is a callback of the simulation."""
        self.progress.advance(self.task)
        for each in [record] if self.pulse.round else simulation.history.records:  # resumed: also what was before
            self.pulse.update(each)
        if self.live is None and time.monotonic() - self.said >= SILENCE:
            self._print(f"{self.name}: {self.pulse.line()}")

    def end(self, name: str, history: History) -> None:
        """Say what came of a run."""
        s = history.summary()
        if self.live is None:
            self._print(
                f"{name}: accuracy {s['final']:.3f}, forgetting {s['forgetting']:.3f} "
                f"({len(history.records) - 1} rounds, {s['seconds']:.1f} s, {history.settings['engine']})"
            )

    def _print(self, line: str) -> None:
        self.said = time.monotonic()
        print(line, file=sys.stderr, flush=True)

    def _now(self) -> RenderableType:
        """What a terminal shows at this moment."""
        if not self.pulse.recent:
            return self.progress.get_renderable()
        return Group(self.progress.get_renderable(), Text(self.pulse.line()), self.pulse.strip())


def heat_map(name: str, history: History, width: int = 60) -> Text:
    """Draw class accuracy over rounds: a row per class, a column per round (or every n-th); a drop is forgetting."""
    accuracy, rounds = history.class_accuracy, history.rounds
    every = max(1, -(-len(rounds) // width))
    text = Text(f"{name}: accuracy of each class over rounds {rounds[0]} to {rounds[-1]}\n", style="bold")
    for c, row in enumerate(accuracy[::every].T):
        text.append(f"  class {c:<3} ", style="dim")
        append_cells(text, row)
        text.append("\n")
    return text
