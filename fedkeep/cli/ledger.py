"""Output of `fedkeep reproduce --ledger`: every printed figure next to ours, on a terminal, in Markdown and as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from fedkeep.cli.paper_tables import format_gap, format_ours, format_paper
from fedkeep.reproduce.against_paper import json_number
from fedkeep.reproduce.gaps import AGREES, DISAGREES
from fedkeep.reproduce.ledger import BASELINE, NOT_RUN, REPEATED, VERDICTS, ClaimEntry, Entry, totals
from fedkeep.reproduce.spec import Table

AnyEntry = TypeVar("AnyEntry", Entry, ClaimEntry)
STYLES = {AGREES: "green", DISAGREES: "red", NOT_RUN: "dim"}
_HEADINGS = ["column", "method", "measure", "paper", "here", "seeds", "vs baseline, paper", "here", "verdict"]
_NARROW = ["\nmethod", "\npaper", "\nhere", "\nseeds", "gap,\npaper", "gap,\nhere", "\nverdict"]


def print_ledger(console: Console, ledger: Sequence[Entry]) -> None:
    """Print the totals and every column with runs; 80 characters are wide enough."""
    if not ledger:
        return
    papers, counts = zip(*_totals(ledger), strict=True)
    console.print(grid(["", *papers], [[verdict, *row] for verdict, *row in zip(VERDICTS, *counts, strict=True)]))
    for table, entries in by_table(ledger):
        console.print(Text(f"\n{table.name}", style="bold") + Text(f"  {table.title}", style="not bold"))
        if rows := _blocks(judged(entries)):
            console.print(grid(_NARROW, rows, text_last=True))
        for text in _not_run(entries):
            console.print(Padding(Text(text, style="dim"), (0, 0, 0, 2)))


def _blocks(entries: Sequence[Entry]) -> list[list[str | Text]]:
    """Return the rows of a table: under a line for each column, and one for each of its measures, the methods."""
    blocks: dict[str, dict[str, list[list[str | Text]]]] = {}
    for entry in entries:
        column, method, measure, *cells = _cells(entry)
        row: list[str | Text] = [Text(cell, style=STYLES.get(entry.verdict, "")) for cell in (f"  {method}", *cells)]
        blocks.setdefault(column, {}).setdefault(measure, []).append(row)
    out: list[list[str | Text]] = []
    for column, measures in blocks.items():
        out.append([Text(column, style="italic")])
        for measure, rows in measures.items():
            out += [[Text(f" {measure}", style="italic")], *rows]
    return out


def format_markdown(ledger: Sequence[Entry]) -> str:
    """Format the ledger as Markdown."""
    if not ledger:
        return ""
    out = markdown_table(["paper", *VERDICTS], [[paper, *counts] for paper, counts in _totals(ledger)])
    for table, entries in by_table(ledger):
        out += ["", f"## {table.name}: {table.title}", "", f"{table.paper}.", ""]
        if rows := [_cells(entry) for entry in judged(entries)]:
            out += [*markdown_table(_HEADINGS, rows), ""]
        out += [f"- {text}" for text in _not_run(entries)]
    return "\n".join(out).rstrip()


def as_data(ledger: Sequence[Entry]) -> dict[str, Any]:
    """Return the ledger as JSON data."""
    figures = [
        {"table": e.table.name, "column": e.column, "row": e.row.name, "measure": e.measure, "seeds": e.seeds}
        | {"values": {str(seed): json_number(value) for seed, value in e.comparison.values.items()}}
        | {"diverged": sorted(e.comparison.diverged)}
        | {"paper": e.comparison.paper.model_dump() if e.comparison.paper else None}
        | {"gap": json_gap(e.ours_gap), "paper_gap": json_gap(e.paper_gap)}
        | {"verdict": e.verdict, "reason": e.reason}
        for e in ledger
    ]  # fmt: skip
    return {"totals": {paper: dict(counts) for paper, counts in totals(ledger).items()}, "figures": figures}


def json_gap(value: float | None) -> float | str | None:
    """Return a gap for JSON, which has no infinities."""
    return json_number(value, "far better", "far worse")


def _totals(ledger: Sequence[Entry]) -> list[tuple[str, list[str]]]:
    """Return the number of figures with each verdict, by paper, and of all papers if there are several."""
    counted = totals(ledger)
    lines = [(paper, [str(counts[verdict]) for verdict in VERDICTS]) for paper, counts in counted.items()]
    if len(lines) == 1:
        return lines
    return [*lines, ("all", [str(sum(counts[verdict] for counts in counted.values())) for verdict in VERDICTS])]


def by_table(ledger: Sequence[AnyEntry]) -> Iterator[tuple[Table, list[AnyEntry]]]:
    """Yield the tables of entries, each with its own."""
    for _, entries in itertools.groupby(ledger, key=lambda entry: entry.table.name):
        listed = list(entries)
        yield listed[0].table, listed


def judged(entries: Sequence[AnyEntry]) -> list[AnyEntry]:
    """Return the entries with runs, judged here for the first time."""
    return [entry for entry in entries if entry.verdict not in (NOT_RUN, REPEATED)]


def _not_run(entries: Sequence[Entry]) -> list[str]:
    """Return one text per column and reason for the figures that were not run, and for those that are repeated."""
    labels: dict[tuple[str, str, str], list[str]] = {}
    for entry in entries:
        if entry.verdict in (NOT_RUN, REPEATED):
            labels.setdefault((entry.column, entry.verdict, entry.reason), []).append(entry.row.label)
    out = []
    for (column, verdict, reason), missing in labels.items():
        methods = list(dict.fromkeys(missing))
        rows = {entry.row.label for entry in entries if entry.column == column}
        who = "all methods" if len(methods) == len(rows) else ", ".join(methods)
        out.append(f"{column}, {verdict}: {who}" + (f" ({reason})" if reason else ""))
    return out


def _cells(entry: Entry) -> list[str]:
    comparison = entry.comparison
    digits = comparison.measure.digits
    gaps = ["", ""] if entry.verdict == BASELINE else [format_gap(g, digits) for g in (entry.paper_gap, entry.ours_gap)]
    verdict = entry.verdict + (f": {entry.reason}" if entry.reason else "")
    head = comparison.measure.head
    return [
        entry.column,
        entry.row.label,
        head,
        format_paper(comparison),
        format_ours(comparison),
        str(entry.seeds),
        *gaps,
        verdict,
    ]


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def grid(headings: Sequence[str], rows: Sequence[Sequence[str | Text]], text_last: bool = False) -> Grid:
    """Return a table of names and numbers; its last column may be text, which is wrapped."""
    grid = Grid(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for i, heading in enumerate(headings):
        text = text_last and i == len(headings) - 1
        grid.add_column(heading, justify="left" if text or not i else "right", no_wrap=not text)
    for row in rows:
        grid.add_row(*row)
    return grid
