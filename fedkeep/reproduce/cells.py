"""The runs of a table: loading those that exist and running the rest."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedkeep.data.sources import named
from fedkeep.engine import distributed
from fedkeep.errors import Diverged, FedkeepError, RunError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.jobs import Jobs
from fedkeep.experiments.overrides import override
from fedkeep.experiments.run import existing_run, require_same
from fedkeep.experiments.sweep import Outcome, Progress, folder_name, run_all
from fedkeep.experiments.workers import MakeCallbacks
from fedkeep.reproduce import kept
from fedkeep.reproduce.recorded import Instruments
from fedkeep.reproduce.spec import Table
from fedkeep.runs.history import History


@dataclass(frozen=True)
class Cell:
    """One run: one method in one column with one seed."""

    column: str
    row: str
    seed: int
    experiment: Experiment

    @property
    def label(self) -> str:
        """The run's folder, relative to the table's."""
        return f"{self.column}/{self.row}-seed-{self.seed}"


@dataclass
class Cells:
    """One method in one column: the state of its runs by seed. In `diverged` and `failed` are the messages."""

    histories: dict[int, History] = field(default_factory=dict)  # of finished runs
    diverged: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    unfinished: dict[int, str] = field(default_factory=dict)  # the progress of interrupted runs
    not_run_reason: str | None = None


@dataclass
class Results:
    """The results of a table: cells by column and row, and data sets that are not available."""

    cells: dict[tuple[str, str], Cells]
    missing: dict[str, str] = field(default_factory=dict)  # column -> how to get its data
    sharing: dict[str, list[Cell]] = field(default_factory=dict)  # label of a run -> other cells that it serves

    @property
    def failed(self) -> bool:
        """Whether any run failed. A run that diverged did not fail."""
        return any(cells.failed for cells in self.cells.values())

    def add(self, cell: Cell, outcome: Outcome) -> None:
        """Add the outcome of a run to a cell."""
        cells = self.cells[cell.column, cell.row]
        if isinstance(outcome, Diverged):
            cells.diverged[cell.seed] = str(outcome)
        elif isinstance(outcome, FedkeepError):
            cells.failed[cell.seed] = str(outcome)
        else:
            cells.histories[cell.seed] = outcome


@dataclass(frozen=True)
class Job:
    """A table or a part of it to be run: columns, rows, number of seeds, and the folder of the runs."""

    table: Table
    columns: Sequence[str]
    rows: Sequence[str]
    seeds: int  # from the table's first seed
    runs: Path
    quick: bool = False
    overrides: Sequence[str] = ()

    @property
    def instruments(self) -> Instruments | None:
        """What is recorded during the runs."""
        return self.table.recorded(self.quick)

    def overrides_of(self, row: str) -> list[str]:
        """Return the overrides of a row. Hyperparameters (method.*) apply only to the selected rows."""
        selected = row in self.rows
        return [text for text in self.overrides if selected or not text.strip().startswith("method.")]

    def folder(self, row: str) -> Path:
        """Return the folder of a row's runs. Runs with overrides have a separate folder."""
        paper, _, table = self.table.name.rpartition("/")
        return self.runs / paper / folder_name(table + ("-quick" if self.quick else ""), self.overrides_of(row))

    def path(self, cell: Cell) -> Path:
        """Return the folder of a run."""
        return self.folder(cell.row) / cell.label

    def kept_file(self, row: str, runs: Path | None = None) -> Path:
        """Return the file of a row's kept runs: next to the folder of its runs, or in another folder of runs."""
        folder = self.folder(row)
        return (runs or self.runs) / folder.parent.relative_to(self.runs) / (folder.name + kept.SUFFIX)

    def keep(self, runs: Path) -> list[Path]:
        """Write the finished and diverged runs of the selected rows into files of kept runs; return the files."""
        files: dict[Path, dict[str, History]] = {}
        for cell in self.cells(self.rows):
            try:
                history = self._own(cell)
            except FedkeepError:  # a damaged run or a different experiment: `load_existing` reports it
                continue
            if history is not None and (history.finished or history.diverged):
                files.setdefault(self.kept_file(cell.row, runs), {})[cell.label] = history
        for path, histories in files.items():
            kept.write(path, histories)
        return list(files)

    def with_all_seeds(self) -> Job:
        """Return this job with as many seeds as there are runs of, if that is more."""
        return dataclasses.replace(self, seeds=max(self.seeds, self.seeds_on_disk()))

    def seeds_on_disk(self) -> int:
        """Return how many seeds reach the highest of the existing runs; 0 without runs.

        Runs of the extended table count where they serve a cell of this job.
        """
        labels = self._labels_on_disk()
        if (extended := self._extended()) is not None:
            cells = map(self._in_extended, dataclasses.replace(self, seeds=1).cells(self.rows))
            served = {f"{cell.column}/{cell.row}" for cell in cells if cell is not None}
            labels += [label for label in extended._labels_on_disk() if label.rpartition("-seed-")[0] in served]
        found = [int(label.rpartition("-")[2]) for label in labels if label[-1].isdigit()]
        return max((seed - self.table.first_seed + 1 for seed in found), default=0)

    def _labels_on_disk(self) -> list[str]:
        """List the existing runs of the job's rows, in any column."""
        found = []
        for row in self.rows:
            folder = self.folder(row)
            found += [path.relative_to(folder).as_posix() for path in folder.glob(f"*/{row}-seed-*")]
            with suppress(RunError):  # a damaged file: `load_existing` reports it
                found += [label for label in kept.read(self.kept_file(row)) if f"/{row}-seed-" in label]
        return found

    def cells(self, rows: Sequence[str]) -> list[Cell]:
        """List the runs, seed by seed in each column, so that an interrupted table has all rows for the first seeds."""
        return [
            Cell(column, row, seed, self.table.experiment(column, row, seed, self.quick, self.overrides_of(row)))
            for column in self.columns
            for seed in range(self.table.first_seed, self.table.first_seed + self.seeds)
            for row in rows
            if self.table.rows[row].absent is None
        ]

    def load_existing(self) -> tuple[Results, list[Cell]]:
        """Load the existing runs, those of the baseline too, and return the results and the cells still to be run."""
        table = self.table
        rows = list(dict.fromkeys([table.baseline, *self.rows]))
        results = Results({(c, r): Cells(not_run_reason=table.rows[r].absent) for c in self.columns for r in rows})
        todo: list[Cell] = []
        for cell in self.cells(rows):
            cells = results.cells[cell.column, cell.row]
            try:
                if self._load(cell, cells):
                    continue
            except FedkeepError as error:  # a damaged run or a different experiment: continue with the others
                cells.failed[cell.seed] = str(error)
                continue
            instructions = named.how_to_get(cell.experiment.data["source"], cell.experiment.data.get("root"))
            if instructions is not None:
                results.missing[cell.column] = instructions
                cells.not_run_reason = "data not available"
            elif cell.row in self.rows:
                twins = [twin.label for twin in self._twins(cell)]
                first = next((other for other in todo if other.label in twins), None)
                if first is None:
                    todo.append(cell)
                else:
                    results.sharing.setdefault(first.label, []).append(cell)
        agreed = distributed.current_ranks().on_rank0(lambda: [cell.label for cell in todo])
        return results, [cell for cell in todo if cell.label in agreed]

    def _load(self, cell: Cell, cells: Cells) -> bool:
        """Add an existing run to its cells, and return whether nothing is left to do: it is complete, or diverged."""
        history = self._existing(cell)
        if history is None:
            return False
        if history.finished:
            cells.histories[cell.seed] = history
            return self.instruments is None or self.instruments.recorded_in(history)
        if history.diverged:
            cells.diverged[cell.seed] = history.diverged  # it would diverge again
        elif history.records:
            cells.unfinished[cell.seed] = f"{history.records[-1]['round']} of {cell.experiment.train.rounds} rounds"
        return history.diverged is not None

    def _existing(self, cell: Cell) -> History | None:
        """Return a run of this cell, or of the same experiment: the extended table's, or another cell's; else None."""
        history = self._own(cell)
        if history is None and (extended := self._extended()) is not None:
            other = self._in_extended(cell)
            history = None if other is None else extended._own(other)
        for twin in self._twins(cell) if history is None else ():
            with suppress(FedkeepError):  # it is reported in its own cell
                history = history or self._own(twin)
        return history

    def _in_extended(self, cell: Cell) -> Cell | None:
        """Return the cell of the extended table that is the same experiment as this cell; None if there is none."""
        other = self.table.extended_cell(cell.column, cell.row)
        if other is None:
            return None
        table, column, row = other
        experiment = table.experiment(column, row, cell.seed, self.quick, self.overrides_of(cell.row))
        return Cell(column, row, cell.seed, experiment) if experiment == cell.experiment else None

    def _twins(self, cell: Cell) -> list[Cell]:
        """Return the other cells of the table that are the same experiment: one run serves all of them."""
        places = self._same_experiment[cell.column, cell.row]
        return [
            Cell(column, row, cell.seed, cell.experiment)
            for column, row in places
            if (column, row) != (cell.column, cell.row)
        ]

    @functools.cached_property
    def _same_experiment(self) -> dict[tuple[str, str], list[tuple[str, str]]]:
        """By column and row, the columns and rows of all cells of the table that are the same experiment."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for column, row in itertools.product(self.table.columns, self.table.rows):
            if self.table.rows[row].absent is None:
                about = override(self.table.changes(column, row, self.quick), self.overrides_of(row))
                groups.setdefault(json.dumps(about, sort_keys=True), []).append((column, row))
        return {place: group for group in groups.values() for place in group}

    def _extended(self) -> Job | None:
        """Return the job of the extended table, if any, with the rows that the selected rows extend."""
        if self.table.extended is None:
            return None
        rows = [row for name in self.rows if (row := self.table.rows[name].extends) is not None]
        return dataclasses.replace(self, table=self.table.extended, columns=[], rows=rows)

    def _own(self, cell: Cell) -> History | None:
        """Return a run of this table from its folder, or from the file of kept runs; None if there is none."""
        history = existing_run(cell.experiment, self.path(cell))
        if history is None and (history := kept.read(self.kept_file(cell.row)).get(cell.label)) is not None:
            file = self.kept_file(cell.row)
            require_same(cell.experiment, history.about, f"{file} holds another {cell.label}", "keep it elsewhere")
        return history

    def run(self, results: Results, todo: Iterable[Cell], jobs: Jobs, progress: Progress) -> None:
        """Run cells and add them to the results. A failed run does not stop the others."""
        by_label = {cell.label: cell for cell in todo}
        experiments = {label: cell.experiment for label, cell in by_label.items()}
        folder = self.folder(self.rows[0])  # the same for all selected rows
        instruments = self.instruments
        make_callbacks: MakeCallbacks = instruments.callbacks if instruments else list
        make_callbacks()  # if it cannot work, no run is started
        with closing(run_all(experiments, folder, jobs, progress, make_callbacks)) as outcomes:
            for label, outcome in outcomes:
                if instruments and not isinstance(outcome, FedkeepError):
                    try:
                        outcome.instruments = instruments.add_missing(folder / label)
                    except FedkeepError as error:
                        outcome = error
                for cell in (by_label[label], *results.sharing.get(label, ())):
                    results.add(cell, outcome)
