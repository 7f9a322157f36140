"""Comparison of our results with a paper's: differences, signs of the gaps to the baseline, order of methods."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedkeep._util.text import join_names
from fedkeep.reproduce.cells import Cells, Job, Results
from fedkeep.reproduce.measures import Measure, get_measure
from fedkeep.reproduce.spec import Figure


@dataclass(frozen=True)
class MeasureComparison:
    """One measure of one method: our values by seed, the diverged seeds, and the paper's figure."""

    measure: Measure
    values: Mapping[int, float]
    diverged: frozenset[int] = frozenset()
    paper: Figure | None = None

    @property
    def values_with_diverged(self) -> dict[int, float]:
        """Our values by seed, with the worst possible value for diverged runs."""
        return {**self.values, **dict.fromkeys(self.diverged, self.measure.worst)}

    @property
    def ours(self) -> float | None:
        """Our figure over all seeds, including diverged ones."""
        values = list(self.values_with_diverged.values())
        return self.measure.combine_seeds(values) if values else None

    @property
    def theirs(self) -> float | None:
        """The paper's figure; the worst value for a failed run or a target not reached, None if it prints none."""
        if self.paper is None:
            return None
        return self.measure.worst if self.paper.mean is None else self.paper.mean

    @property
    def difference(self) -> float | None:
        """Ours minus theirs, if both are finite numbers."""
        if self.ours is None or self.theirs is None or not (math.isfinite(self.ours) and math.isfinite(self.theirs)):
            return None
        return self.ours - self.theirs


@dataclass(frozen=True)
class MethodRow:
    """One method in one column."""

    name: str
    label: str
    measures: Mapping[str, MeasureComparison]  # by name of the measure
    note: str | None = None  # why some or all values are missing
    cells: Cells = field(default_factory=Cells)


@dataclass(frozen=True)
class Gap:
    """How much better one method is than another, here and in the paper."""

    ours: float | None
    theirs: float | None
    within_paper_spread: bool = False

    @property
    def agree(self) -> bool | None:
        """Whether the signs are the same; None if a figure is missing or the paper's gap is 0 or within its spread."""
        if self.ours is None or self.theirs is None or not self.theirs or self.within_paper_spread:
            return None
        return self.ours * self.theirs > 0


@dataclass(frozen=True)
class Order:
    """Agreement with the paper's order of methods: pairs with a clear order there, agreeing pairs, best methods."""

    pairs: int
    agreeing: int
    best_here: tuple[str, ...]
    best_there: tuple[str, ...]


@dataclass(frozen=True)
class ColumnComparison:
    """One column of a table, ours compared with the paper's."""

    column: str
    label: str
    baseline: MethodRow
    rows: Sequence[MethodRow]
    measures: Sequence[str]
    target: float | None = None
    missing: str | None = None  # how to get the data, if it is not available

    @property
    def has_results(self) -> bool:
        """Whether there is any result of ours."""
        return any(comparison.ours is not None for row in self.rows for comparison in row.measures.values())

    def gaps(self, measure: str) -> dict[str, Gap]:
        """Return the gap of every other method to the baseline, by row name."""
        baseline = self.baseline.measures[measure]
        return {row.name: gap(row.measures[measure], baseline) for row in self.rows if row.name != self.baseline.name}

    def order(self, measure: str) -> Order:
        """Compare the order of the methods with figures here and in the paper, without pairs within its spread."""
        both = {
            row.label: comparison
            for row in self.rows
            if (comparison := row.measures[measure]).ours is not None and comparison.theirs is not None
        }
        signs = [gap(both[a], both[b]).agree for a, b in itertools.combinations(both, 2)]
        clear = [sign for sign in signs if sign is not None]
        improvement = get_measure(measure).improvement
        here = _best({label: comparison.ours for label, comparison in both.items()}, improvement)
        there = _best({label: comparison.theirs for label, comparison in both.items()}, improvement)
        return Order(len(clear), sum(clear), here, there)


def gap(one: MeasureComparison, other: MeasureComparison) -> Gap:
    """Return how much better `one` is than `other`, over the seeds that both have."""
    measure, theirs = one.measure, None
    if one.theirs is not None and other.theirs is not None and not one.theirs == other.theirs == measure.worst:
        theirs = measure.improvement(one.theirs, other.theirs)
    ours = None
    if pairs := paired_values(one, other):
        first, second = (measure.combine_seeds(values) for values in zip(*pairs, strict=True))
        ours = measure.improvement(first, second)
    spread = printed_spread(one, other)
    return Gap(ours, theirs, spread is not None and theirs is not None and abs(theirs) <= spread)


def paired_values(one: MeasureComparison, other: MeasureComparison) -> list[tuple[float, float]]:
    """Return our values of both on every seed that both have, with the worst value for diverged runs."""
    first, second = one.values_with_diverged, other.values_with_diverged
    return [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]


def printed_spread(one: MeasureComparison, other: MeasureComparison) -> float | None:
    """Return the larger of the spreads that the paper prints for both; None if it prints none."""
    return max((c.paper.spread for c in (one, other) if c.paper and c.paper.spread is not None), default=None)


def compare_columns(job: Job, results: Results) -> list[ColumnComparison]:
    """Compare the results of every selected column with the paper's."""
    table = job.table
    return [
        ColumnComparison(
            column,
            ("digits instead of " if job.quick and table.quick.data else "") + table.columns[column].label,
            _compare_row(job, results, column, table.baseline),
            [_compare_row(job, results, column, row) for row in job.rows],
            table.measures,
            table.target(column, job.quick),
            results.missing.get(column),
        )
        for column in job.columns
    ]


def sentences(column: ColumnComparison) -> list[str]:
    """Summarise the agreement with the paper, one text per measure."""
    texts = []
    labels = {row.name: row.label for row in column.rows}
    for name in column.measures:
        order, gaps = column.order(name), column.gaps(name)
        if not order.pairs:
            continue
        here, there = join_names(order.best_here), join_names(order.best_there)
        text = f"{get_measure(name).head}: best method here {here}, in the paper {there}."
        signs = {labels[row]: gap for row, gap in gaps.items() if gap.agree is not None}
        if signs:
            agreeing = sum(bool(gap.agree) for gap in signs.values())
            text += f" {agreeing} of {len(signs)} gaps to {column.baseline.label} have the same sign as in the paper."
            different = [
                f"{label} (here {_format_gap(gap.ours, name)}, paper {_format_gap(gap.theirs, name)})"
                for label, gap in signs.items()
                if not gap.agree
            ]
            text += f" Different sign: {join_names(different)}." if different else ""
        ignored = [labels[row] for row, gap in gaps.items() if gap.within_paper_spread and gap.ours is not None]
        if ignored:
            text += f" Within the paper's spread, not counted: {join_names(ignored)}."
        text += f" {order.agreeing} of {order.pairs} pairs of methods are in the paper's order."
        texts.append(text)
    return texts


def as_data(column: ColumnComparison) -> dict[str, Any]:
    """Return a column as JSON data; "never" is a target that was not reached, "failed" a run that failed."""
    rows = []
    for row in column.rows:
        measures = {}
        for name, comparison in row.measures.items():
            values = list(comparison.values.values())
            to_baseline = column.gaps(name).get(row.name, Gap(None, None))
            without_figure = comparison.diverged and not comparison.measure.counts_rounds
            measures[name] = {
                "values": {str(seed): json_number(value) for seed, value in comparison.values.items()},
                "ours": None if without_figure else json_number(comparison.ours),
                "spread": statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None,
                "paper": "failed" if comparison.paper and comparison.paper.failed else json_number(comparison.theirs),
                "paper_spread": comparison.paper.spread if comparison.paper else None,
                "difference": comparison.difference,
                "better_by": json_number(to_baseline.ours, "far better", "far worse"),
                "paper_better_by": json_number(to_baseline.theirs, "far better", "far worse"),
                "same_sign": to_baseline.agree,
            }
        status = {"note": row.note, "diverged": row.cells.diverged, "failed": row.cells.failed}
        rows.append({"row": row.name, "label": row.label, **status, "measures": measures})
    order = {name: vars(column.order(name)) for name in column.measures}
    about = {"column": column.column, "label": column.label, "target": column.target, "missing": column.missing}
    return {**about, "rows": rows, "order": order, "found": sentences(column)}


def _compare_row(job: Job, results: Results, column: str, row: str) -> MethodRow:
    cells, table = results.cells[column, row], job.table
    baseline = results.cells[column, table.baseline].histories
    comparisons = {}
    for name in table.measures:
        measure = get_measure(name)
        computed = {
            seed: measure.from_history(history, baseline.get(seed), table.target(column, job.quick))
            for seed, history in sorted(cells.histories.items())
        }
        values = {seed: value for seed, value in computed.items() if value is not None and not math.isnan(value)}
        comparisons[name] = MeasureComparison(
            measure, values, frozenset(cells.diverged), table.columns[column].paper.get(row, {}).get(name)
        )
    return MethodRow(row, table.rows[row].label, comparisons, _note(cells, job.seeds), cells)


def _note(cells: Cells, seeds: int) -> str | None:
    """Return why some or all values of a row are missing, None if they are complete."""
    reasons = []
    if cells.diverged:
        reasons.append("diverged" if not cells.histories else f"{len(cells.diverged)} of {seeds} diverged")
    reasons += [f"seed {seed}: {reason}" for seed, reason in cells.failed.items()]
    over = cells.histories.keys() | cells.diverged.keys() | cells.failed.keys()
    unfinished = [f"seed {seed}: {progress}" for seed, progress in cells.unfinished.items() if seed not in over]
    reasons += unfinished
    ended = len(cells.histories) + len(cells.diverged)
    waiting = seeds - ended - len(cells.failed)
    if waiting == seeds and (cells.not_run_reason or not unfinished):
        reasons.append(cells.not_run_reason or "not run yet")
    elif waiting and ended:
        reasons.append(f"{ended} of {seeds} seeds run")
    return "; ".join(reasons) or None


def _best(values: Mapping[str, float | None], improvement: Callable[[float, float], float]) -> tuple[str, ...]:
    """Return the methods that no other method improves on."""
    known = {name: value for name, value in values.items() if value is not None}
    return tuple(
        name for name, value in known.items() if not any(improvement(other, value) > 0 for other in known.values())
    )


def _format_gap(value: float | None, measure: str) -> str:
    """Format a gap; an infinite one (a target never reached, a diverged run) as "far better" or "far worse"."""
    assert value is not None
    if math.isinf(value):
        return "far better" if value > 0 else "far worse"
    return format_signed(value, get_measure(measure).digits)


def format_signed(value: float, digits: int) -> str:
    """Format a number with its sign; zero after rounding is +0. A median of rounds keeps its half.

    >>> format_signed(-0.004, 2), format_signed(1.5, 0), format_signed(2, 0)
    ('+0.00', '+1.5', '+2')
    """
    if digits == 0 and value % 1 == 0.5:
        digits = 1
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def json_number(value: float | None, high: str = "never", low: str = "never") -> float | str | None:
    """Return a value for JSON: an infinity, which JSON lacks, becomes `high` or `low`."""
    if value is None or math.isfinite(value):
        return value
    return high if value > 0 else low
