"""The ledger: every printed figure of the tables next to ours, with a verdict on its gap to the baseline.

`gaps` has the rule. A figure that a paper prints again for the same experiment and baseline is repeated, and counted
once. The papers' pictures have no printed figures: of these, the ledger judges the claims that the paper's text makes.
Nothing here depends on which data sets this machine has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fedkeep.errors import RunError
from fedkeep.reproduce.against_paper import ColumnComparison, MethodRow, compare_columns
from fedkeep.reproduce.cells import Job
from fedkeep.reproduce.claims import Cell, Claim
from fedkeep.reproduce.gaps import (
    AGREES,
    DISAGREES,
    FEW_SEEDS,
    NOISE_HERE,
    NOISE_THERE,
    MeasureComparison,
    claimed_gap,
    gap,
)
from fedkeep.reproduce.measures import Measure
from fedkeep.reproduce.spec import Table

BASELINE, NOT_RUN, REPEATED = "baseline", "not run", "repeated"
VERDICTS = (AGREES, DISAGREES, NOISE_HERE, NOISE_THERE, FEW_SEEDS, BASELINE, NOT_RUN, REPEATED)


@dataclass(frozen=True)
class Entry:
    """One printed figure: a table's column, row and measure, with ours and the verdict."""

    table: Table
    column: str
    source: str  # the data set of the column
    row: MethodRow
    measure: str
    ours_gap: float | None
    paper_gap: float | None
    verdict: str
    reason: str = ""  # why there is no value or no gap, what explains a disagreement, or where it is printed first

    @property
    def comparison(self) -> MeasureComparison:
        """Our values and the paper's figure."""
        return self.row.measures[self.measure]

    @property
    def seeds(self) -> int:
        """The number of our runs, with those that diverged."""
        return len(self.comparison.values_with_diverged)


@dataclass(frozen=True)
class ClaimEntry:
    """One comparison of a claim: what is said to be better, than what, our gap, and the verdict."""

    table: Table
    claim: Claim
    better: str  # as shown: the row with its column, or without it if there is only one
    than: str
    measure: Measure
    seeds: int  # that both have
    gap: float | None
    verdict: str
    reason: str = ""


class Ledger(NamedTuple):
    """The entries, what is wrong with runs that could not be read, and the claims of figures."""

    entries: list[Entry]
    problems: list[str]
    claims: list[ClaimEntry]


def read(tables: Iterable[Table], runs: Path) -> Ledger:
    """Return an entry for every printed figure of the tables, from the runs in a folder."""
    if not runs.is_dir():
        raise RunError(f"there is no folder {runs}: --runs is the folder of the runs", key="--runs", value=str(runs))
    out: list[Entry] = []
    claims: list[ClaimEntry] = []
    problems: dict[str, None] = {}
    for table in tables:
        columns, rows = table.select(None, None)
        job = Job(table, columns, rows, 1, runs)
        results, _ = (job := job.with_all_seeds()).load_existing()
        problems |= dict.fromkeys(text for cells in results.cells.values() for text in cells.failed.values())
        compared = compare_columns(job, results)
        for column in compared:
            out += _column_entries(table, column)
        claims += claim_entries(table, compared)
    sources = {entry.source for entry in out if entry.seeds}
    found = [
        replace(entry, reason=f"no run on {entry.source} yet")
        if entry.verdict == NOT_RUN and not entry.reason and entry.source not in sources
        else entry
        for entry in out
    ]
    return Ledger(found, list(problems), claims)


def totals(ledger: Sequence[Entry]) -> dict[str, Counter[str]]:
    """Return how many figures have each verdict, by paper (the folder of its tables)."""
    out: dict[str, Counter[str]] = {}
    for entry in ledger:
        out.setdefault(entry.table.name.partition("/")[0], Counter())[entry.verdict] += 1
    return out


def _column_entries(table: Table, column: ColumnComparison) -> list[Entry]:
    out = []
    source = table.experiment(column.column, table.baseline, 0).data["source"]
    for row in column.rows:
        for name, comparison in row.measures.items():
            if comparison.paper is None:
                continue
            baseline = column.baseline.measures[name]
            of_all = gap(comparison, baseline)
            verdict, reason = _verdict(table, column, row, name)
            out.append(Entry(table, column.column, source, row, name, of_all.ours, of_all.theirs, verdict, reason))
    return out


def _verdict(table: Table, column: ColumnComparison, row: MethodRow, measure: str) -> tuple[str, str]:
    """Return the verdict on one figure, and the reason of the entry."""
    one, baseline = row.measures[measure], column.baseline.measures[measure]
    if (first := _printed_first(table, column.column, row.name, measure)) is not None:
        return REPEATED, first
    if not one.values_with_diverged:
        return NOT_RUN, table.rows[row.name].absent or _why_missing(row)
    if row.name == column.baseline.name:
        return BASELINE, ""
    if not baseline.values_with_diverged:
        return NOT_RUN, "the baseline was not run"
    to_baseline = gap(one, baseline)
    explained = table.columns[column.column].explained.get(row.name)
    if to_baseline.verdict is None:
        return NOISE_THERE, "both failed in the paper"
    if to_baseline.verdict == DISAGREES:
        return DISAGREES, explained or "unexplained"
    if to_baseline.verdict == FEW_SEEDS:
        return FEW_SEEDS, explained or (
            "" if to_baseline.ours is not None else "the baseline has no run with this seed"
        )
    return to_baseline.verdict, ""


def _printed_first(table: Table, column: str, row: str, measure: str) -> str | None:
    """Return the extended table and its column if this figure is printed there, with the same baseline; else None."""
    extended, baseline = table.extended_cell(column, row), table.extended_cell(column, table.baseline)
    if extended is None or baseline is None or baseline[2] != baseline[0].baseline:
        return None
    other, of_column, of_row = extended
    first = other.columns[of_column].paper.get(of_row, {}).get(measure)
    if first is None or first.mean != table.columns[column].paper[row][measure].mean:
        return None
    runnable = [(one, of) for one, of in ((row, of_row), (table.baseline, baseline[2])) if not table.rows[one].absent]
    same = all(table.experiment(column, one, 0) == other.experiment(of_column, of, 0) for one, of in runnable)
    return f"{other.name}, {of_column}" if same else None


def claim_entries(table: Table, columns: Sequence[ColumnComparison]) -> list[ClaimEntry]:
    """Return an entry for every comparison that the table's claims make among these columns and their rows."""
    cells = {(column.column, row.name): row for column in columns for row in column.rows}
    out = []
    for claim in table.claims:
        for better, other in claim.pairs(list(table.columns)):
            if better not in cells or other not in cells:
                continue
            one, two = cells[better].measures[claim.of], cells[other].measures[claim.of]
            seeds = len(one.values_with_diverged.keys() & two.values_with_diverged.keys())
            labels = [_cell_label(table, claim, cell) for cell in (better, other)]
            ours = claimed_gap(one, two)
            verdict, reason = _claim_verdict(table, claim, (better, other), cells)
            out.append(ClaimEntry(table, claim, labels[0], labels[1], one.measure, seeds, ours.ours, verdict, reason))
    return out


def _cell_label(table: Table, claim: Claim, cell: Cell) -> str:
    column, row = cell
    if claim.row is not None:
        return f"{table.rows[row].label}, {table.columns[column].label}"
    return table.rows[row].label if len(table.columns) == 1 else f"{table.rows[row].label}, {column}"


def _claim_verdict(
    table: Table, claim: Claim, pair: tuple[Cell, Cell], cells: Mapping[Cell, MethodRow]
) -> tuple[str, str]:
    """Return the verdict on one comparison of a claim, and its reason."""
    if (first := _judged_first(table, claim.of, pair)) is not None:
        return REPEATED, first
    for cell in pair:
        if not cells[cell].measures[claim.of].values_with_diverged:
            return NOT_RUN, table.rows[cell[1]].absent or _why_missing(cells[cell])
    better, other = (cells[cell].measures[claim.of] for cell in pair)
    verdict = claimed_gap(better, other).verdict
    assert verdict is not None
    rows = (table.columns[column].explained.get(row) for column, row in pair)
    explained = claim.explained or next(filter(None, rows), "")
    if verdict == FEW_SEEDS:
        return FEW_SEEDS, explained
    return verdict, (explained or "unexplained") if verdict == DISAGREES else ""


def _judged_first(table: Table, measure: str, pair: tuple[Cell, Cell]) -> str | None:
    """Return the extended table if it prints both figures of the same experiments, next to its baseline; else None."""
    first, second = (table.extended_cell(*cell) for cell in pair)
    if first is None or second is None:
        return None
    (other, column, row), (_, other_column, baseline) = first, second
    paper = other.columns[column].paper
    same = column == other_column and baseline == other.baseline
    if not same or any(measure not in paper.get(name, {}) for name in (row, baseline)):
        return None
    equal = all(
        table.experiment(*cell, 0) == other.experiment(column, name, 0)
        for cell, name in zip(pair, (row, baseline), strict=True)
    )
    return f"{other.name}, {column}" if equal else None


def _why_missing(row: MethodRow) -> str:
    """Return why a row that can be run has no value: what is wrong with its runs, or nothing if there are none."""
    if row.cells.failed:
        return next(iter(row.cells.failed.values()))
    return "the runs that exist do not contain it" if row.cells.histories else ""
