"""Our figures beside a paper's: the differences, the signs of the gaps to the first method, the order of methods."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedkeep.reproduce.cells import Cells, Job, Results
from fedkeep.reproduce.measures import MEASURES, NEVER, Measure
from fedkeep.reproduce.spec import Figure


@dataclass(frozen=True)
class Entry:
    """One measure of one method: our values by seed, and the paper's figure."""

    measure: Measure
    values: Mapping[int, float]
    diverged: bool  # in every run there is
    paper: Figure | None

    @property
    def ours(self) -> float | None:
        """Our figure over all seeds; where every run diverged, the worst there is."""
        if self.values:
            return self.measure.sum_up(list(self.values.values()))
        return (-math.inf if self.measure.higher else math.inf) if self.diverged else None

    @property
    def theirs(self) -> float | None:
        """The paper's figure, a target never reached counted as `NEVER`; None where it prints none."""
        if self.paper is None:
            return None
        return NEVER if self.paper.mean is None else self.paper.mean

    @property
    def difference(self) -> float | None:
        """Ours minus theirs, where both are numbers."""
        if self.ours is None or self.theirs is None:
            return None
        apart = self.ours - self.theirs if math.isfinite(self.theirs) else math.nan
        return apart if math.isfinite(apart) else None


@dataclass(frozen=True)
class Line:
    """One row of a column."""

    row: str
    label: str
    entries: Mapping[str, Entry]  # by measure
    note: str | None  # why there are no figures, or not all


@dataclass(frozen=True)
class Gap:
    """How much better a method is than the first, here and in the paper."""

    ours: float | None
    theirs: float | None

    @property
    def agree(self) -> bool | None:
        """Whether the signs are the same; None where there is nothing to compare."""
        if self.ours is None or self.theirs is None or not self.theirs:
            return None
        return self.ours * self.theirs > 0


@dataclass(frozen=True)
class Order:
    """How far the order of methods is the paper's: pairs it tells apart, how many are so here, and who is best."""

    pairs: int
    agreeing: int
    best_here: tuple[str, ...]
    best_there: tuple[str, ...]


@dataclass(frozen=True)
class Sheet:
    """One column of a table, ours beside the paper's."""

    column: str
    label: str
    first: Line  # what gaps are taken to
    lines: Sequence[Line]
    measures: Sequence[str]
    target: float | None
    missing: str | None  # how to get its data

    @property
    def ran(self) -> bool:
        """Whether there is any figure of ours."""
        return any(entry.ours is not None for line in self.lines for entry in line.entries.values())

    def gap(self, line: Line, measure: str) -> Gap:
        """Compare a method with the first one, over the seeds that both have."""
        first, mine = self.first.entries[measure], line.entries[measure]
        better, theirs = MEASURES[measure].better, (mine.theirs, first.theirs)
        return Gap(
            _common_gap(mine, first),
            None if theirs[0] is None or theirs[1] is None else better(theirs[0], theirs[1]),
        )

    def gaps(self, measure: str) -> dict[str, Gap]:
        """Compare every method but the first with the first one."""
        return {line.label: self.gap(line, measure) for line in self.lines if line.row != self.first.row}

    def order(self, measure: str) -> Order:
        """Compare the order of the methods that both have a figure for."""
        better = MEASURES[measure].better
        here: dict[str, float] = {}
        there: dict[str, float] = {}
        for line in self.lines:
            ours, theirs = line.entries[measure].ours, line.entries[measure].theirs
            if ours is not None and theirs is not None:
                here[line.label], there[line.label] = ours, theirs
        signs = [(better(here[a], here[b]), better(there[a], there[b])) for a, b in itertools.combinations(here, 2)]
        apart = [(ours, theirs) for ours, theirs in signs if theirs]
        return Order(
            len(apart), sum(ours * theirs > 0 for ours, theirs in apart), _best(here, better), _best(there, better)
        )


def sheets(job: Job, results: Results) -> list[Sheet]:
    """Lay out the columns of a table."""
    table = job.table
    return [
        Sheet(
            column,
            ("digits in the place of " if job.quick else "") + table.columns[column].label,
            _line(job, results, column, table.baseline),
            [_line(job, results, column, row) for row in job.rows],
            table.measures,
            table.target(column, job.quick),
            results.missing.get(column),
        )
        for column in job.columns
    ]


def words(sheet: Sheet) -> list[str]:
    """Say what agrees with the paper, measure by measure."""
    said = []
    for name in sheet.measures:
        gaps = {label: gap for label, gap in sheet.gaps(name).items() if gap.agree is not None}
        order, head = sheet.order(name), MEASURES[name].head
        if not order.pairs:
            continue
        text = f"{head}: best here {_and(order.best_here)}, in the paper {_and(order.best_there)}."
        if gaps:
            text += f" Gaps to {sheet.first.label}: {sum(bool(g.agree) for g in gaps.values())} of {len(gaps)}"
            text += " have the paper's sign"
            unlike = [
                f"{label} (here {_far(g.ours, name)}, there {_far(g.theirs, name)})"
                for label, g in gaps.items()
                if not g.agree
            ]
            text += f"; not so {_and(unlike)}." if unlike else "."
        text += f" Order: {order.agreeing} of {order.pairs} pairs as in the paper."
        said.append(text)
    return said


def as_data(sheet: Sheet) -> dict[str, Any]:
    """Return a column as plain data."""
    rows = []
    for line in sheet.lines:
        measures = {}
        for name, entry in line.entries.items():
            gap = sheet.gap(line, name)
            measures[name] = {
                "values": {str(seed): value for seed, value in entry.values.items()},
                "ours": entry.ours,
                "paper": None if entry.paper is None else entry.paper.model_dump(),
                "difference": entry.difference,
                "gap": gap.ours,
                "paper_gap": gap.theirs,
                "same_sign": gap.agree,
            }
        rows.append({"row": line.row, "label": line.label, "note": line.note, "measures": measures})
    found = {"column": sheet.column, "label": sheet.label, "target": sheet.target, "missing": sheet.missing}
    return {**found, "rows": rows, "found": words(sheet)}


def _line(job: Job, results: Results, column: str, row: str) -> Line:
    cells, table = results.cells[column, row], job.table
    first = results.cells[column, table.baseline].histories
    printed = table.columns[column].paper.get(row, {})
    entries = {}
    for name in table.measures:
        measure = MEASURES[name]
        taken = {
            seed: measure.take(history, first.get(seed), table.target(column, job.quick))
            for seed, history in sorted(cells.histories.items())
        }
        values = {seed: value for seed, value in taken.items() if value is not None}
        entries[name] = Entry(measure, values, bool(cells.diverged) and not cells.histories, printed.get(name))
    return Line(row, table.rows[row].label, entries, _note(cells, job.seeds))


def _note(cells: Cells, seeds: int) -> str | None:
    """Say in a few words why a row's figures are not all there."""
    if cells.why_not is not None:
        return cells.why_not
    said = []
    if cells.diverged:
        said.append("diverged" if not cells.histories else f"{len(cells.diverged)} of {seeds} diverged")
    if cells.failed:
        said.append(f"{len(cells.failed)} failed")
    waiting = seeds - len(cells.histories) - len(cells.diverged) - len(cells.failed)
    if waiting:
        said.append("not run yet" if waiting == seeds else f"{len(cells.histories)} of {seeds} seeds")
    return ", ".join(said) or None


def _best(values: Mapping[str, float], better: Callable[[float, float], float]) -> tuple[str, ...]:
    return tuple(name for name, mine in values.items() if not any(better(other, mine) > 0 for other in values.values()))


def _common_gap(mine: Entry, first: Entry) -> float | None:
    if not mine.values or not first.values:
        ours = (mine.ours, first.ours)
        return None if ours[0] is None or ours[1] is None else mine.measure.better(ours[0], ours[1])
    seeds = mine.values.keys() & first.values.keys()
    if not seeds:
        return None
    one, other = (mine.measure.sum_up([e.values[s] for s in sorted(seeds)]) for e in (mine, first))
    return mine.measure.better(one, other)


def _far(gap: float | None, measure: str) -> str:
    """Write how much better something is, in words where one of the two never got there, or diverged."""
    assert gap is not None
    if math.isinf(gap):
        return "far better" if gap > 0 else "far worse"
    return f"{gap:+.{MEASURES[measure].digits}f}"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
