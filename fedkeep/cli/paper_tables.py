"""A reproduced table on a terminal and in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from fedkeep._util.text import format_mean
from fedkeep.cli import tables
from fedkeep.data.sources import named
from fedkeep.reproduce import against_paper
from fedkeep.reproduce.against_paper import ColumnComparison, Gap, MeasureComparison, MethodRow
from fedkeep.reproduce.cells import Job
from fedkeep.reproduce.measures import MEASURES, NEVER
from fedkeep.reproduce.spec import Table

_MARK = {True: "=", False: "≠", None: " "}
_NO_NEWS = ("device", "engine", "threads", "at_once", "deterministic")  # overrides that leave a setting the paper's


def listing(console: Console, found: Iterable[Table]) -> None:
    """List the tables, their columns and what is at hand to run them with."""
    for table in found:
        console.print(f"[bold]{table.name}[/bold]  {table.title}", highlight=False)
        console.print(f"  {table.paper}", style="dim", highlight=False)
        rows = [name if row.absent is None else f"({row.label})" for name, row in table.rows.items()]
        console.print(f"  methods: {', '.join(rows)}", highlight=False)
        grid = Grid(box=None, show_header=False, padding=(0, 2, 0, 2))
        for name in table.columns:
            away = named.how_to_get(table.experiment(name, table.baseline, 0).data["source"])
            grid.add_row(name, table.columns[name].label, Text("data not at hand", style="dim") if away else "")
        console.print(grid)
    console.print(
        f"Methods in brackets are not in fedkeep yet. Data is looked for in {named.data_root(None)} ($FEDKEEP_DATA).",
        style="dim",
    )
    console.print("fedkeep reproduce TABLE runs one; --quick tries it on digits in about a minute.", style="dim")


def on_terminal(console: Console, job: Job, sheets: Sequence[ColumnComparison], all_of_it: bool = False) -> None:
    """Print the columns of a table, what agrees with the paper, and what could not be run."""
    console.print(f"[bold]{job.table.name}[/bold]  {job.table.title}", highlight=False)
    console.print(f"{job.table.paper}\n", style="dim", highlight=False)
    for text in disclaimers(job):
        console.print(f"{text}\n", style="yellow", highlight=False, markup=False)
    for sheet in sheets:
        if sheet.missing and not sheet.ran and not all_of_it:
            console.print(f"[bold]{sheet.column}[/bold]  {sheet.label}: not run", highlight=False)
        else:
            rows = {line.label: [Text(cell) for cell in cells(sheet, line)] for line in sheet.lines}
            console.print(tables.MethodTable(_title(sheet), heads(sheet), rows, caption(sheet)))
        for text in [*_notes(sheet), *against_paper.sentences(sheet)]:
            console.print(f" {text}", highlight=False, markup=False, soft_wrap=text == sheet.missing)
        console.print()
    for note in job.table.notes:
        console.print(f"- {note}", style="dim", highlight=False, markup=False)


def as_markdown(job: Job, sheets: Sequence[ColumnComparison]) -> str:
    """Write the columns as Markdown tables with what was found below."""
    out = [f"### {job.table.name}: {job.table.title}", "", f"{job.table.paper}.", ""]
    out += [f"{text}\n" for text in disclaimers(job)]
    for sheet in sheets:
        names = ["method", *heads(sheet)]
        out += [f"**{_title(sheet)}**", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        out += [f"| {' | '.join([line.label, *cells(sheet, line)])} |" for line in sheet.lines]
        out += [
            "",
            f"{caption(sheet)}.",
            "",
            *(f"- {text}" for text in [*_notes(sheet), *against_paper.sentences(sheet)]),
            "",
        ]
    return "\n".join([*out, *(f"- {note}" for note in job.table.notes)]).rstrip()


def disclaimers(job: Job) -> list[str]:
    """Say in what these runs are not the table's."""
    said = []
    if job.quick:
        said.append(
            "Quick: handwritten digits and a small network in the place of the paper's. The machinery is the same, the "
            "figures cannot be compared; the paper's stand beside them all the same."
        )
    changed = [text for text in job.overrides if text.partition("=")[0].removeprefix("train.") not in _NO_NEWS]
    if changed:
        said.append(f"Not the table's setting: {', '.join(changed)}.")
    return said


def caption(sheet: ColumnComparison) -> str:
    """Explain the signs."""
    said = [f"to {sheet.first.label}: by how much better, here and in the paper; = the sign agrees, ≠ it does not"]
    said += ["~ within the paper's spread"] if any(g.slight for g in sheet.gaps(sheet.measures[0]).values()) else []
    said += ["- never reached"] if any(MEASURES[name].rounds for name in sheet.measures) else []
    said += ["· no run"] if any(line.note for line in sheet.lines) else []
    return "; ".join(said)


def heads(sheet: ColumnComparison) -> list[str]:
    """Name the columns: each measure here, in the paper, and the difference; of the first also the gaps."""
    out: list[str] = []
    for name in sheet.measures:
        out += [MEASURES[name].head, "paper", "differs"]
        if name == sheet.measures[0]:
            out += [_better(sheet), "paper's"]
    return out


def cells(sheet: ColumnComparison, line: MethodRow) -> list[str]:
    """Write one row's cells."""
    out: list[str] = []
    for name in sheet.measures:
        entry = line.entries[name]
        out += [_ours(entry), _theirs(entry), _signed(entry.difference, entry.measure.digits)]
        if name == sheet.measures[0]:
            gap, digits = sheet.gaps(name).get(line.row, Gap(None, None)), entry.measure.digits
            mark = "~" if gap.slight else _MARK[gap.agree]
            out += [_signed(gap.ours, digits), f"{_signed(gap.theirs, digits)} {mark}".rstrip()]
    return out


def _title(sheet: ColumnComparison) -> str:
    return f"{sheet.column}  {sheet.label}" + (f", A = {sheet.target:.1%}" if sheet.target else "")


def _better(sheet: ColumnComparison) -> str:
    return f"to {sheet.first.label}"


def _notes(sheet: ColumnComparison) -> list[str]:
    """Say of which rows figures are not all there, rows of the same kind together, and what is missing."""
    by_note: dict[str, list[str]] = {}
    for line in sheet.lines:
        if line.note is not None:
            by_note.setdefault(line.note, []).append(line.label)
    said = [f"{', '.join(labels)}: {note}" for note, labels in by_note.items()]
    first = sheet.first
    if sheet.ran and not any(entry.counted for entry in first.entries.values()):
        said.append(f"{first.label} has not been run, so there are no gaps to it: name {first.row} in --methods too")
    return [*said, sheet.missing] if sheet.missing else said


def _ours(entry: MeasureComparison) -> str:
    if not entry.values:
        return "diverged" if entry.diverged else "·"
    if entry.measure.rounds:
        return tables.format_rounds([None if value == NEVER else int(value) for value in entry.counted.values()])
    values = list(entry.values.values())
    spread = statistics.stdev(values) if len(values) > 1 else None
    return format_mean(statistics.fmean(values), spread, entry.measure.digits)


def _theirs(entry: MeasureComparison) -> str:
    if entry.paper is None:
        return ""
    if entry.paper.mean is None:
        return "-"
    return format_mean(entry.paper.mean, entry.paper.spread, entry.measure.digits)


def _signed(value: float | None, digits: int) -> str:
    if value is None:
        return ""
    if math.isinf(value):
        return "better" if value > 0 else "worse"
    return against_paper.signed(value, digits)
