"""The runs behind a table: which there are, which are done, and how the rest is run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedkeep.data.sources import named
from fedkeep.engine import distributed
from fedkeep.errors import Diverged, FedkeepError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.run import existing_run
from fedkeep.experiments.sweep import Progress, folder_name, run_all
from fedkeep.reproduce.spec import Table
from fedkeep.runs.history import History


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
    begun: dict[int, str] = field(default_factory=dict)  # how far, of runs that were interrupted
    why_not: str | None = None


@dataclass
class Results:
    """What is known of a table: the cells by column and row, and which data sets are not at hand."""

    cells: dict[tuple[str, str], Cells]
    missing: dict[str, str] = field(default_factory=dict)  # column -> how to get its data

    @property
    def failed(self) -> bool:
        """Whether some run neither ended nor diverged."""
        return any(cells.failed for cells in self.cells.values())


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

    def overrides_of(self, row: str) -> list[str]:
        """Return what is overridden in a row: hyperparameters are meant for the rows that were asked for."""
        asked = row in self.rows
        return [text for text in self.overrides if asked or not text.strip().startswith("method.")]

    def folder(self, row: str) -> Path:
        """Say where a row's runs are; other settings than the table's have a folder of their own."""
        paper, _, table = self.table.name.rpartition("/")
        return self.runs / paper / folder_name(table + ("-quick" if self.quick else ""), self.overrides_of(row))

    def path(self, cell: Cell) -> Path:
        """Say where a run is."""
        return self.folder(cell.row) / cell.label

    def seeds_found(self) -> int:
        """Count the seeds that there are runs of."""
        found = [path.name for row in self.rows for path in self.folder(row).glob(f"*/{row}-seed-*")]
        return 1 + max((int(name.rpartition("-")[2]) for name in found if name[-1].isdigit()), default=-1)

    def cells(self, rows: Sequence[str]) -> list[Cell]:
        """List runs, seed by seed within a column, so that an interrupted table has all its rows."""
        return [
            Cell(column, row, seed, self.table.experiment(column, row, seed, self.quick, self.overrides_of(row)))
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
            try:
                if self._read(cell, found):
                    continue
            except FedkeepError as error:  # a damaged run, or one of another experiment: the others go on
                found.cells[cell.column, cell.row].failed[cell.seed] = str(error)
                continue
            absent = named.how_to_get(cell.experiment.data["source"], cell.experiment.data.get("root"))
            if absent is not None:
                found.missing[cell.column] = absent
                found.cells[cell.column, cell.row].why_not = "data not at hand"
            elif cell.row in self.rows:
                todo.append(cell)
        agreed = distributed.current_ranks().on_rank0(lambda: [cell.label for cell in todo])
        return found, [cell for cell in todo if cell.label in agreed]

    def _read(self, cell: Cell, found: Results) -> bool:
        """Take a run that has come to its end, or had diverged, into the results."""
        path, into = self.path(cell), found.cells[cell.column, cell.row]
        history = existing_run(cell.experiment, path)
        if history is None:
            return False
        if history.finished:
            into.histories[cell.seed] = history
        elif history.diverged:
            into.diverged[cell.seed] = history.diverged  # it would diverge again
        elif history.records:
            into.begun[cell.seed] = f"{history.records[-1]['round']} of {cell.experiment.train.rounds} rounds"
        return history.finished or history.diverged is not None

    def run(self, found: Results, todo: Iterable[Cell], jobs: int, progress: Progress) -> None:
        """Run what is still to be made, and add it to the results; a run that fails does not stop the others."""
        cells = {cell.label: cell for cell in todo}
        experiments = {label: cell.experiment for label, cell in cells.items()}
        folder = self.folder(self.rows[0])  # of all rows that are run
        for label, outcome in run_all(experiments, folder, jobs, progress):
            cell = cells[label]
            into = found.cells[cell.column, cell.row]
            if isinstance(outcome, Diverged):
                into.diverged[cell.seed] = str(outcome)
            elif isinstance(outcome, FedkeepError):
                into.failed[cell.seed] = str(outcome)
            else:
                into.histories[cell.seed] = outcome
