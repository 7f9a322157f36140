"""What the command line shows: a heat map of class accuracies, progress. Tables are in `table`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedkeep.history import History, Record

BLOCKS = " ▁▂▃▄▅▆▇█"
# Dark to light in steps of equal contrast, told apart by the colour-blind too (after viridis).
COLOURS = ("#440154", "#472c7a", "#3b518b", "#2c718e", "#21908d", "#27ad81", "#5cc863", "#aadc32", "#fde725")


class Bar:
    """Progress over all rounds of all runs: a bar with the time left on a terminal, a line per run when piped."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds, time left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("", total=total)

    def __enter__(self) -> Bar:
        self.progress.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.progress.__exit__(*exc)

    def begin(self, name: str) -> None:
        """Say which run is going on."""
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

    def end(self, name: str, history: History) -> None:
        """Say what came of a run."""
        s = history.summary()
        if not self.console.is_terminal:
            print(
                f"{name}: accuracy {s['final']:.3f}, forgetting {s['forgetting']:.3f} "
                f"({len(history.records) - 1} rounds, {s['seconds']:.1f} s, {history.settings['engine']})",
                file=sys.stderr,
                flush=True,
            )


def heat_map(name: str, history: History, width: int = 60) -> Text:
    """Draw class accuracy over rounds: a row per class, a column per round (or every n-th); a drop is forgetting."""
    accuracy, rounds = history.class_accuracy, history.rounds
    every = max(1, -(-len(rounds) // width))
    text = Text(f"{name}: accuracy of each class over rounds {rounds[0]} to {rounds[-1]}\n", style="bold")
    for c, row in enumerate(accuracy[::every].T):
        text.append(f"  class {c:<3} ", style="dim")
        for value in row:
            level = 0 if np.isnan(value) else round(value * (len(BLOCKS) - 1))
            text.append(BLOCKS[level], style=COLOURS[level])
        text.append("\n")
    return text
