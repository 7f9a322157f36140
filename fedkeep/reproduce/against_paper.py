"""Comparison of our results with a paper's: differences, signs of the gaps to the baseline, order of methods."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedkeep._util.text import join_names
from fedkeep.analysis import personal
from fedkeep.reproduce.cells import Cells, Job, Results
from fedkeep.reproduce.gaps import UNDECIDED, Gap, MeasureComparison, gap
from fedkeep.reproduce.measures import get_measure
from fedkeep.reproduce.recorded import is_recorded


@dataclass(frozen=True)
class MethodRow:
    """One method in one column."""

    name: str
    label: str
    measures: Mapping[str, MeasureComparison]  # by name of the measure
    note: str | None = None  # why some or all values are missing
    cells: Cells = field(default_factory=Cells)


@dataclass(frozen=True)
class Order:
    """Agreement with the paper's order of methods: compared methods, decided pairs, agreeing ones, best methods."""

    methods: int
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

    def is_printed(self, measure: str) -> bool:
        """Return whether the paper prints a figure of this measure for any of the methods."""
        return any(row.measures[measure].paper is not None for row in self.rows)

    def gaps(self, measure: str) -> dict[str, Gap]:
        """Return the gap of every other method to the baseline, by row name."""
        baseline = self.baseline.measures[measure]
        return {row.name: gap(row.measures[measure], baseline) for row in self.rows if row.name != self.baseline.name}

    def order(self, measure: str) -> Order:
        """Compare the order of the methods with figures here and in the paper, by the pairs whose gap is decided."""
        both = {
            row.label: comparison
            for row in self.rows
            if (comparison := row.measures[measure]).ours is not None and comparison.theirs is not None
        }
        signs = [gap(both[a], both[b]).agree for a, b in itertools.combinations(both, 2)]
        decided = [sign for sign in signs if sign is not None]
        improvement = get_measure(measure).improvement
        here = _best({label: comparison.ours for label, comparison in both.items()}, improvement)
        there = _best({label: comparison.theirs for label, comparison in both.items()}, improvement)
        return Order(len(both), len(decided), sum(decided), here, there)


def _label(job: Job, column: str) -> str:
    """Return what is printed above a column: its label, and the data that a quick run has instead."""
    label, data = job.table.columns[column].label, job.table.quick.data
    source = data.get("source") if isinstance(data, dict) else data
    return f"{source} instead of {label}" if job.quick and source else label


def compare_columns(job: Job, results: Results) -> list[ColumnComparison]:
    """Compare the results of every selected column with the paper's."""
    table = job.table
    return [
        ColumnComparison(
            column,
            _label(job, column),
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
        if order.methods < 2:
            continue
        here, there = join_names(order.best_here), join_names(order.best_there)
        text = f"{get_measure(name).head}: best method here {here}, in the paper {there}."
        signs = {labels[row]: gap for row, gap in gaps.items() if gap.agree is not None}
        if signs:
            agreeing = sum(bool(gap.agree) for gap in signs.values())
            of = f"{len(signs)} decided gaps to {column.baseline.label}"
            text += f" {agreeing} of {of} have the same sign as in the paper."
            different = [
                f"{label} (here {_format_gap(gap.ours, name)}, paper {_format_gap(gap.theirs, name)})"
                for label, gap in signs.items()
                if not gap.agree
            ]
            text += f" Different sign: {join_names(different)}." if different else ""
        for verdict in UNDECIDED:
            rows = [labels[row] for row, gap in gaps.items() if gap.verdict == verdict and gap.ours is not None]
            text += f" {verdict.capitalize()}, not counted: {join_names(rows)}." if rows else ""
        if order.pairs:
            text += f" {order.agreeing} of {order.pairs} decided pairs of methods are in the paper's order."
        texts.append(text)
    return texts


def measured_clients(column: ColumnComparison) -> list[str]:
    """Return of which models, on which data, over which clients and after which round a column's clients are measured.

    Empty unless the column has measures of personalised accuracy.
    """
    if not any(name.startswith(f"{personal.STUDY}.") for name in column.measures):
        return []
    runs = ((row.name, row.label, history) for row in column.rows for history in row.cells.histories.values())
    which = any(name.startswith(f"{personal.STUDY}.{personal.USED}.") for name in column.measures)
    return [
        f"{measured.title}." + (f" Clients' models: {measured.models}." if which else "")
        for measured in personal.measured_runs(runs)
    ]


def as_data(column: ColumnComparison) -> dict[str, Any]:
    """Return a column as JSON data; "never" is a target that was not reached, "failed" a run that failed."""
    rows = []
    for row in column.rows:
        measures = {}
        for name, comparison in row.measures.items():
            values = list(comparison.values.values())
            to_baseline = column.gaps(name).get(row.name, Gap())
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
                "verdict": to_baseline.verdict if to_baseline.ours is not None else None,
            }
        status = {"note": row.note, "diverged": row.cells.diverged, "failed": row.cells.failed}
        rows.append({"row": row.name, "label": row.label, **status, "measures": measures})
    order = {name: vars(column.order(name)) for name in column.measures}
    about = {"column": column.column, "label": column.label, "target": column.target, "missing": column.missing}
    return {**about, "rows": rows, "order": order, "found": sentences(column), "clients": measured_clients(column)}


def _compare_row(job: Job, results: Results, column: str, row: str) -> MethodRow:
    cells, table = results.cells[column, row], job.table
    # quick runs train another model on other data: they are not compared with the paper's figures
    printed = {} if job.quick else table.columns[column].paper.get(row, {})
    baseline = results.cells[column, table.baseline].histories
    comparisons = {}
    fewer: dict[int, list[str]] = {}  # measures that only so many of the runs recorded
    for name in table.measures:
        measure = get_measure(name)
        computed = {
            seed: measure.from_history(history, baseline.get(seed), table.target(column, job.quick))
            for seed, history in sorted(cells.histories.items())
        }
        values = {seed: value for seed, value in computed.items() if value is not None and not math.isnan(value)}
        comparisons[name] = MeasureComparison(measure, values, frozenset(cells.diverged), printed.get(name))
        recorded = sum(value is not None for value in computed.values())
        if is_recorded(name) and 0 < recorded < len(computed):
            fewer.setdefault(recorded, []).append(measure.head)
    return MethodRow(row, table.rows[row].label, comparisons, _note(cells, job.seeds, fewer), cells)


def _note(cells: Cells, seeds: int, fewer: Mapping[int, Sequence[str]]) -> str | None:
    """Return why some or all values of a row are missing, None if they are complete."""
    runs = len(cells.histories)
    reasons = [f"recorded in {n} of {runs} runs only: {' | '.join(heads)}" for n, heads in fewer.items()]
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
