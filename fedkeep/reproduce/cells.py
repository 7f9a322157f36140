"""The runs behind a table: which there are, which are done, and how the rest is run."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedkeep.config import Experiment
from fedkeep.data.sources import named
from fedkeep.engine import ranks
from fedkeep.errors import Diverged, FedkeepError
from fedkeep.history import History
from fedkeep.reproduce.spec import Table
from fedkeep.store import write_atomic
from fedkeep.sweeping import folder_name, run_all
from fedkeep.terminal import Bar

_DIVERGED = "diverged.json"


@dataclass(frozen=True)
class Cell:
    """One method in one column with one seed: an experiment and the folder of its run."""

    column: str
    row: str
    seed: int
    experiment: Experiment

    @property
    def label(self) -> str:
        """The folder, below the table's."""
        return f"{self.column}/{self.row}-seed-{self.seed}"


@dataclass
class Cells:
    """One method in one column: its runs by seed, and why there are none where there are none."""

    histories: dict[int, History] = field(default_factory=dict)
    diverged: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    why_not: str | None = None


@dataclass
class Results:
    """What is known of a table: the cells by column and row, and which data sets are not at hand."""

    cells: dict[tuple[str, str], Cells]
    missing: dict[str, str] = field(default_factory=dict)  # column -> how to get its data

    @property
    def failures(self) -> Iterator[tuple[str, str, int, str]]:
        """Column, row, seed and reason of what neither ended nor diverged."""
        for (column, row), cells in self.cells.items():
            for seed, reason in cells.failed.items():
                yield column, row, seed, reason


@dataclass(frozen=True)
class Job:
    """A table, or a part of one, to be run: which columns and rows, how often, and into which folder."""

    table: Table
    columns: Sequence[str]
    rows: Sequence[str]
    seeds: int
    runs: Path
    quick: bool = False
    overrides: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        """Where the runs of this table are; other settings than the table's have a folder of their own."""
        base = self.table.name + ("-quick" if self.quick else "")
        paper, _, table = base.partition("/")
        return self.runs / paper / folder_name(table, self.overrides)

    def cells(self, rows: Sequence[str]) -> list[Cell]:
        """List runs, seed by seed within a column, so that an interrupted table has all its rows."""
        return [
            Cell(column, row, seed, self.table.experiment(column, row, seed, self.quick, self.overrides))
            for column in self.columns
            for seed in range(self.seeds)
            for row in rows
            if self.table.rows[row].absent is None
        ]

    def look(self) -> tuple[Results, list[Cell]]:
        """Read what is there, also of the method the others are compared with, and say what is to be run."""
        table = self.table
        rows = list(dict.fromkeys([table.baseline, *self.rows]))
        found = Results({(c, r): Cells(why_not=table.rows[r].absent) for c in self.columns for r in rows})
        todo: list[Cell] = []
        for cell in self.cells(rows):
            source = str(cell.experiment.data["source"])
            absent = named.missing(named.canonical(source) or source, cell.experiment.data.get("root"))
            if self._read(cell, found):
                continue
            if absent is not None:
                found.missing[cell.column] = absent
                found.cells[cell.column, cell.row].why_not = "data not at hand"
            elif cell.row in self.rows:
                todo.append(cell)
        agreed = ranks.here().decide(lambda: [cell.label for cell in todo])
        return found, [cell for cell in todo if cell.label in agreed]

    def _read(self, cell: Cell, found: Results) -> bool:
        """Take a run that has come to its end, or had diverged, into the results."""
        path, into = self.folder / cell.label, found.cells[cell.column, cell.row]
        if (history := cell.experiment.finished(path)) is not None:
            into.histories[cell.seed] = history
        elif (path / _DIVERGED).exists():
            into.diverged[cell.seed] = str(json.loads((path / _DIVERGED).read_text())["what"])
        return cell.seed in into.histories or cell.seed in into.diverged

    def run(self, found: Results, todo: Iterable[Cell], jobs: int, progress: Bar) -> None:
        """Run what is still to be made, and add it to the results; a run that fails does not stop the others."""
        cells = {cell.label: cell for cell in todo}
        experiments = {label: cell.experiment for label, cell in cells.items()}
        for label, outcome in run_all(experiments, self.folder, jobs, progress):
            cell = cells[label]
            into = found.cells[cell.column, cell.row]
            if isinstance(outcome, Diverged):
                into.diverged[cell.seed] = str(outcome)
                ranks.here().decide(functools.partial(self._note, label, outcome))
                progress.say(f"{label}: {outcome}")
            elif isinstance(outcome, FedkeepError):
                into.failed[cell.seed] = str(outcome)
                progress.say(f"{label}: {outcome}")
            else:
                into.histories[cell.seed] = outcome
                progress.end(label, outcome)

    def _note(self, label: str, outcome: Diverged) -> None:
        """Leave a note that a run diverged: it would again."""
        about = {"round": outcome.round, "what": str(outcome)}
        write_atomic(self.folder / label / _DIVERGED, json.dumps(about).encode())
