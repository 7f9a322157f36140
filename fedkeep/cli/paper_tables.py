"""Output of `fedkeep reproduce`: a paper's table on a terminal and in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from fedkeep._util.text import format_mean, format_reached
from fedkeep.cli import tables
from fedkeep.reproduce import against_paper
from fedkeep.reproduce.against_paper import ColumnComparison, MethodRow
from fedkeep.reproduce.cells import Job
from fedkeep.reproduce.gaps import AGREES, DISAGREES, FEW_SEEDS, NOISE_HERE, NOISE_THERE, Gap, MeasureComparison
from fedkeep.reproduce.measures import NEVER, get_measure

_MARKS = {AGREES: "=", DISAGREES: "≠", NOISE_HERE: "~", NOISE_THERE: "~", FEW_SEEDS: "?"}
NOT_RUN = "·"
_HARMLESS_OVERRIDES = ("device", "engine", "threads", "at_once", "deterministic")  # the setting remains the paper's


def _print_heading(console: Console, name: str, text: str) -> None:
    console.print(Text(name, style="bold") + Text(f"  {text}", style="not bold"))


def print_table(
    console: Console, job: Job, comparisons: Sequence[ColumnComparison], columns_without_data: bool = False
) -> None:
    """Print the columns of a table, the agreement with the paper, and what could not be run."""
    _print_heading(console, job.table.name, job.table.title)
    console.print(f"{job.table.paper}\n", style="dim", highlight=False, markup=False)
    for text in disclaimers(job):
        console.print(f"{text}\n", style="yellow", highlight=False, markup=False)
    for column in comparisons:
        if column.missing and not column.has_results and not columns_without_data:
            _print_heading(console, column.column, f"{column.label}: not run")
        else:
            rows = {row.label: [Text(cell) for cell in row_cells(column, row)] for row in column.rows}
            console.print(tables.MethodTable(_title(column), headings(column), rows, caption(column)))
        for text in _below(column):
            console.print(f" {text}", highlight=False, markup=False, soft_wrap=text == column.missing)
        console.print()
    for note in _table_notes(job):
        console.print(f"- {note}", style="dim", highlight=False, markup=False)


def format_markdown(job: Job, comparisons: Sequence[ColumnComparison]) -> str:
    """Format the columns as Markdown tables, each followed by its agreement with the paper."""
    out = [f"### {job.table.name}: {job.table.title}", "", f"{job.table.paper}.", ""]
    out += [f"{text}\n" for text in disclaimers(job)]
    for column in comparisons:
        names = ["method", *headings(column)]
        out += [f"**{_title(column)}**", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        out += [f"| {' | '.join([row.label, *row_cells(column, row)])} |" for row in column.rows]
        out += [
            "",
            f"{caption(column)}.",
            "",
            *(f"- {text}" for text in _below(column)),
            "",
        ]
    return "\n".join([*out, *(f"- {note}" for note in _table_notes(job))]).rstrip()


def _below(column: ColumnComparison) -> list[str]:
    """Return what stands below a column: missing values, what personalised accuracy is of, agreement with the paper."""
    return [*_notes(column), *against_paper.measured_clients(column), *against_paper.sentences(column)]


def _table_notes(job: Job) -> list[str]:
    """Return the notes on the paper's setting and figures; a quick table has neither."""
    return [] if job.quick else job.table.notes


def disclaimers(job: Job) -> list[str]:
    """Return how the setting of these runs differs from the table's."""
    texts = []
    if job.quick:
        texts.append("Quick: small data and a small network, to test that everything runs; only our figures are shown.")
    changed = [
        text for text in job.overrides if text.partition("=")[0].removeprefix("train.") not in _HARMLESS_OVERRIDES
    ]
    if changed:
        texts.append(f"Settings changed from the table's: {', '.join(changed)}.")
    return texts


def caption(column: ColumnComparison) -> str:
    """Explain the columns and symbols of a table."""
    baseline = column.baseline.label
    signs = ", here and in the paper; = same sign, ≠ different sign"
    parts = [f"vs {baseline}: improvement over {baseline}{signs if column.is_printed(column.measures[0]) else ''}"]
    marks = {_mark(gap) for gap in column.gaps(column.measures[0]).values()}
    parts += ["~ within noise, here or in the paper"] if "~" in marks else []
    parts += ["? one seed"] if "?" in marks else []
    parts += ["- never reached"] if any(get_measure(name).counts_rounds for name in column.measures) else []
    parts += ["· not run"] if any(NOT_RUN in row_cells(column, row) for row in column.rows) else []
    return "; ".join(parts)


def headings(column: ColumnComparison) -> list[str]:
    """Return the headings: each measure here, in the paper, the difference; for the first measure also the gaps.

    What concerns the paper is left out for a measure of which it prints no figure.
    """
    out: list[str] = []
    for name in column.measures:
        printed = column.is_printed(name)
        out += [get_measure(name).head, *(["paper", "diff"] if printed else [])]
        if name == column.measures[0]:
            out += [f"vs {column.baseline.label}", *(["paper"] if printed else [])]
    return out


def row_cells(column: ColumnComparison, row: MethodRow) -> list[str]:
    """Format the cells of one row."""
    out: list[str] = []
    for name in column.measures:
        comparison, printed = row.measures[name], column.is_printed(name)
        digits = comparison.measure.digits
        paper = [format_paper(comparison), format_gap(comparison.difference, digits)]
        out += [format_ours(comparison), *(paper if printed else [])]
        if name == column.measures[0]:
            gap = column.gaps(name).get(row.name, Gap())
            theirs = f"{format_gap(gap.theirs, digits)} {_mark(gap)}".rstrip()
            out += [format_gap(gap.ours, digits), *([theirs] if printed else [])]
    return out


def _mark(gap: Gap) -> str:
    """Return the symbol of a gap's verdict; none if a figure is missing."""
    return "" if gap.ours is None or gap.verdict is None else _MARKS[gap.verdict]


def _title(column: ColumnComparison) -> str:
    return f"{column.column}  {column.label}" + (f", A = {column.target:.1%}" if column.target else "")


def _notes(column: ColumnComparison) -> list[str]:
    """Return why values are missing, with the rows of each reason, and how to get missing data."""
    by_note: dict[str, list[str]] = {}
    for row in column.rows:
        if row.note is not None:
            by_note.setdefault(row.note, []).append(row.label)
    texts = [f"{', '.join(labels)}: {note}" for note, labels in by_note.items()]
    baseline = column.baseline
    if column.has_results and not any(comparison.values_with_diverged for comparison in baseline.measures.values()):
        texts.append(f"{baseline.label} has not been run, so there are no gaps to it: add {baseline.name} to --methods")
    return [*texts, column.missing] if column.missing else texts


def format_ours(comparison: MeasureComparison) -> str:
    """Format our figure over all seeds: the median of rounds, else mean and standard deviation."""
    if not comparison.values:
        return "diverged" if comparison.diverged else NOT_RUN
    if comparison.measure.counts_rounds:
        rounds = comparison.values_with_diverged.values()
        return format_reached([None if value == NEVER else int(value) for value in rounds])
    values = list(comparison.values.values())
    spread = statistics.stdev(values) if len(values) > 1 else None
    return format_mean(statistics.fmean(values), spread, comparison.measure.digits)


def format_paper(comparison: MeasureComparison) -> str:
    """Format the paper's figure; a dash is a target that was never reached."""
    if comparison.paper is None:
        return ""
    if comparison.paper.mean is None:
        return "failed" if comparison.paper.failed else "-"
    return format_mean(comparison.paper.mean, comparison.paper.spread, comparison.measure.digits)


def format_gap(value: float | None, digits: int) -> str:
    """Format a difference with its sign; "better" or "worse" if it is infinite."""
    if value is None:
        return ""
    if math.isinf(value):
        return "better" if value > 0 else "worse"
    return against_paper.format_signed(value, digits)
