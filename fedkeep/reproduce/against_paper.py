"""Our figures beside a paper's: the differences, the signs of the gaps to the first method, the order of methods."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedkeep._util.text import join_names
from fedkeep.reproduce.cells import Cells, Job, Results
from fedkeep.reproduce.measures import MEASURES, NEVER, Measure
from fedkeep.reproduce.spec import Figure


@dataclass(frozen=True)
class MeasureComparison:
    """One measure of one method: our values by seed, the seeds that diverged, and the paper's figure."""

    measure: Measure
    values: Mapping[int, float]
    diverged: frozenset[int] = frozenset()
    paper: Figure | None = None

    @property
    def counted(self) -> dict[int, float]:
        """Our values, the worst there is for runs that diverged."""
        return {**self.values, **dict.fromkeys(self.diverged, self.measure.worst)}

    @property
    def ours(self) -> float | None:
        """Our figure over all seeds: what is compared."""
        return self.measure.sum_up(list(self.counted.values())) if self.counted else None

    @property
    def theirs(self) -> float | None:
        """The paper's figure, a target never reached counted as `NEVER`; None where it prints none."""
        if self.paper is None:
            return None
        return NEVER if self.paper.mean is None else self.paper.mean

    @property
    def difference(self) -> float | None:
        """Ours minus theirs, where both are numbers."""
        if self.ours is None or self.theirs is None or not (math.isfinite(self.ours) and math.isfinite(self.theirs)):
            return None
        return self.ours - self.theirs


@dataclass(frozen=True)
class MethodRow:
    """One row of a column."""

    row: str
    label: str
    entries: Mapping[str, MeasureComparison]  # by measure
    note: str | None = None  # why there are no figures, or not all
    cells: Cells = field(default_factory=Cells)


@dataclass(frozen=True)
class Gap:
    """How much better one method is than another, here and in the paper; `slight`: within the paper's own spread."""

    ours: float | None
    theirs: float | None
    slight: bool = False

    @property
    def agree(self) -> bool | None:
        """Whether the signs are the same; None where there is nothing to compare, or the paper has no clear sign."""
        if self.ours is None or self.theirs is None or not self.theirs or self.slight:
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
class ColumnComparison:
    """One column of a table, ours beside the paper's."""

    column: str
    label: str
    first: MethodRow  # what gaps are taken to
    lines: Sequence[MethodRow]
    measures: Sequence[str]
    target: float | None = None
    missing: str | None = None  # how to get its data

    @property
    def ran(self) -> bool:
        """Whether there is any figure of ours."""
        return any(entry.ours is not None for line in self.lines for entry in line.entries.values())

    def gaps(self, measure: str) -> dict[str, Gap]:
        """Compare every method but the first with the first one, by row."""
        first = self.first.entries[measure]
        return {line.row: gap(line.entries[measure], first) for line in self.lines if line.row != self.first.row}

    def order(self, measure: str) -> Order:
        """Compare the order of the methods that both have figures for, but for pairs within the paper's spread."""
        known = {
            line.label: entry
            for line in self.lines
            if (entry := line.entries[measure]).ours is not None and entry.theirs is not None
        }
        signs = [gap(known[a], known[b]).agree for a, b in itertools.combinations(known, 2)]
        apart = [sign for sign in signs if sign is not None]
        better = MEASURES[measure].better
        here = _best({label: entry.ours for label, entry in known.items()}, better)
        there = _best({label: entry.theirs for label, entry in known.items()}, better)
        return Order(len(apart), sum(apart), here, there)


def gap(one: MeasureComparison, other: MeasureComparison) -> Gap:
    """Compare two methods, over the seeds that both have."""
    measure, theirs = one.measure, None
    if one.theirs is not None and other.theirs is not None and not one.theirs == other.theirs == NEVER:
        theirs = measure.better(one.theirs, other.theirs)
    seeds = sorted(one.counted.keys() & other.counted.keys())
    ours = None
    if seeds:
        mine, others = (measure.sum_up([entry.counted[s] for s in seeds]) for entry in (one, other))
        ours = measure.better(mine, others)
    spreads = [entry.paper.spread for entry in (one, other) if entry.paper and entry.paper.spread is not None]
    return Gap(ours, theirs, bool(spreads) and theirs is not None and abs(theirs) <= max(spreads))


def sheets(job: Job, results: Results) -> list[ColumnComparison]:
    """Lay out the columns of a table."""
    table = job.table
    return [
        ColumnComparison(
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


def sentences(sheet: ColumnComparison) -> list[str]:
    """Say what agrees with the paper, measure by measure."""
    said = []
    labels = {line.row: line.label for line in sheet.lines}
    for name in sheet.measures:
        order, gaps = sheet.order(name), sheet.gaps(name)
        signs = {labels[row]: g for row, g in gaps.items() if g.agree is not None}
        if not order.pairs:
            continue
        here, there = join_names(order.best_here), join_names(order.best_there)
        text = f"{MEASURES[name].head}: best here {here}, in the paper {there}."
        if signs:
            agreeing = sum(bool(g.agree) for g in signs.values())
            text += f" Gaps to {sheet.first.label}: {agreeing} of {len(signs)} have the paper's sign"
            unlike = [
                f"{label} (here {_far(g.ours, name)}, there {_far(g.theirs, name)})"
                for label, g in signs.items()
                if not g.agree
            ]
            text += f"; not so {join_names(unlike)}." if unlike else "."
        slight = [labels[row] for row, g in gaps.items() if g.slight and g.ours is not None]
        if slight:
            text += f" Within the paper's spread, and not counted: {join_names(slight)}."
        text += f" Order: {order.agreeing} of {order.pairs} pairs as in the paper."
        said.append(text)
    return said


def as_data(sheet: ColumnComparison) -> dict[str, Any]:
    """Return a column as plain data; "never" is a target that was not reached."""
    rows = []
    for line in sheet.lines:
        measures = {}
        for name, entry in line.entries.items():
            values = list(entry.values.values())
            found = sheet.gaps(name).get(line.row, Gap(None, None))
            measures[name] = {
                "values": {str(seed): _plain(value) for seed, value in entry.values.items()},
                "ours": None if entry.diverged and not entry.measure.rounds else _plain(entry.ours),
                "spread": statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None,
                "paper": _plain(entry.theirs),
                "paper_spread": entry.paper.spread if entry.paper else None,
                "difference": entry.difference,
                "better_by": _plain(found.ours, "far better", "far worse"),
                "paper_better_by": _plain(found.theirs, "far better", "far worse"),
                "same_sign": found.agree,
            }
        why = {"note": line.note, "diverged": line.cells.diverged, "failed": line.cells.failed}
        rows.append({"row": line.row, "label": line.label, **why, "measures": measures})
    order = {name: vars(sheet.order(name)) for name in sheet.measures}
    about = {"column": sheet.column, "label": sheet.label, "target": sheet.target, "missing": sheet.missing}
    return {**about, "rows": rows, "order": order, "found": sentences(sheet)}


def _line(job: Job, results: Results, column: str, row: str) -> MethodRow:
    cells, table = results.cells[column, row], job.table
    first = results.cells[column, table.baseline].histories
    entries = {}
    for name in table.measures:
        measure = MEASURES[name]
        taken = {
            seed: measure.take(history, first.get(seed), table.target(column, job.quick))
            for seed, history in sorted(cells.histories.items())
        }
        values = {seed: value for seed, value in taken.items() if value is not None and not math.isnan(value)}
        entries[name] = MeasureComparison(
            measure, values, frozenset(cells.diverged), table.columns[column].paper.get(row, {}).get(name)
        )
    return MethodRow(row, table.rows[row].label, entries, _note(cells, job.seeds), cells)


def _note(cells: Cells, seeds: int) -> str | None:
    """Say in a few words why a row's figures are not all there."""
    said = []
    if cells.diverged:
        said.append("diverged" if not cells.histories else f"{len(cells.diverged)} of {seeds} diverged")
    said += [f"seed {seed}: {reason}" for seed, reason in cells.failed.items()]
    over = cells.histories.keys() | cells.diverged.keys() | cells.failed.keys()
    begun = [f"seed {seed}: {how_far}" for seed, how_far in cells.begun.items() if seed not in over]
    said += begun
    ended = len(cells.histories) + len(cells.diverged)
    waiting = seeds - ended - len(cells.failed)
    if waiting == seeds and (cells.why_not or not begun):
        said.append(cells.why_not or "not run yet")
    elif waiting and ended:
        said.append(f"{ended} of {seeds} seeds run")
    return "; ".join(said) or None


def _best(values: Mapping[str, float | None], better: Callable[[float, float], float]) -> tuple[str, ...]:
    known = {name: value for name, value in values.items() if value is not None}
    return tuple(name for name, mine in known.items() if not any(better(other, mine) > 0 for other in known.values()))


def _far(value: float | None, measure: str) -> str:
    """Write how much better something is, in words where one of the two never got there, or diverged."""
    assert value is not None
    if math.isinf(value):
        return "far better" if value > 0 else "far worse"
    return signed(value, MEASURES[measure].digits)


def signed(value: float, digits: int) -> str:
    """Write a number with its sign; one that rounds to zero has none but +. A median of rounds keeps its half.

    >>> signed(-0.004, 2), signed(1.5, 0), signed(2, 0)
    ('+0.00', '+1.5', '+2')
    """
    if digits == 0 and value % 1 == 0.5:
        digits = 1
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def _plain(value: float | None, high: str = "never", low: str = "never") -> float | str | None:
    """Write what JSON has no number for as a word."""
    if value is None or math.isfinite(value):
        return value
    return high if value > 0 else low
