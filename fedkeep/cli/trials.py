"""Output of `fedkeep reproduce --generated`: what two rounds of each cell needed, on a terminal and as JSON."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from fedkeep.reproduce.spec import Table
from fedkeep.reproduce.trials import ROUNDS, Trial

_NOTE = (
    "Random data of the data sets' size, from which nothing is learned: these are not results. Nothing is kept. "
    "Round 1 includes what is prepared once."
)


def print_trials(console: Console, table: Table, trials: Sequence[Trial]) -> None:
    """Print time and memory of every trial, one block per column."""
    console.print(Text(table.name, style="bold") + Text(f"  {table.title}", style="not bold"))
    for column, group in itertools.groupby(trials, key=lambda trial: trial.column):
        of_column = list(group)
        about = next((trial for trial in of_column if trial.failed is None), of_column[0])
        size = f", {about.n_examples:,} examples of {about.n_clients:,} clients" if about.n_examples else ""
        console.print(Text(f"\n{column}  {about.source}{size}"), highlight=False)
        console.print(_grid(table, of_column))
        for trial in of_column:
            if trial.failed is not None:
                text = Text(f"{table.rows[trial.row].label}: failed: {trial.failed}", style="red")
                console.print(text, highlight=False)
    console.print(f"\n{_NOTE}", style="dim", highlight=False)


def format_line(trial: Trial) -> str:
    """Format one trial as a line of the progress."""
    what = " ".join(_cells(trial)) if trial.failed is None else f"failed: {trial.failed}"
    return f"{trial.column}/{trial.row}: {what}"


def as_data(table: Table, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the trials as JSON data."""
    return {"table": table.name, "rounds": ROUNDS, "trials": [dataclasses.asdict(trial) for trial in trials]}


def _grid(table: Table, trials: Sequence[Trial]) -> Grid:
    grid = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column("method", no_wrap=True)
    for heading in ("weights", "round 1", "round 2", "peak memory"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("engine", no_wrap=True)
    for trial in trials:
        if trial.failed is None:
            grid.add_row(table.rows[trial.row].label, *_cells(trial))
    return grid


def _cells(trial: Trial) -> list[str]:
    place = "GPU" if trial.device == "cuda" else trial.device.upper()
    rounds = [f"{seconds:.1f} s" for seconds in trial.seconds[:ROUNDS]]
    rounds += [""] * (ROUNDS - len(rounds))  # with the override rounds=1
    return [f"{trial.n_weights:,}", *rounds, f"{trial.memory / 2**30:.2f} GiB {place}", trial.engine]
