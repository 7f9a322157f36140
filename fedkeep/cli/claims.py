"""Output of `fedkeep reproduce`: the claims of a figure, or of all in the ledger, with our gaps and a verdict."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from fedkeep.cli.ledger import STYLES, by_table, grid, json_gap, judged, markdown_table
from fedkeep.cli.paper_tables import format_gap
from fedkeep.reproduce.ledger import NOT_RUN, REPEATED, VERDICTS, ClaimEntry

_HEADINGS = ["better", "than", "measure", "seeds", "better by, here", "verdict"]
_NARROW = ["better", "than", "seeds", "by, here", "verdict"]


def print_claims(console: Console, claims: Sequence[ClaimEntry], without: Sequence[str]) -> None:
    """Print the claims that were judged as tables, the others as lines."""
    for heading, some, others in _sections(claims, without):
        console.print(Text(f"\n{heading}", style="bold") + Text(f"  {_counts(some)}", style="not bold"))
        for table, entries in by_table(some):
            console.print(Text(table.name, style="bold"))
            _print_figure(console, entries)
        if others:
            console.print(Padding(Text(_without_claim(others), style="dim"), (0, 0, 0, 0)))


def print_claims_of_figure(console: Console, claims: Sequence[ClaimEntry]) -> None:
    """Print the claims of one figure, below its table."""
    if claims:
        console.print(Text("\nClaims", style="bold") + Text(f"  {_counts(claims)}", style="not bold"))
        _print_figure(console, claims)


def _print_figure(console: Console, entries: Sequence[ClaimEntry]) -> None:
    for text, some in _by_claim(judged(entries)):
        console.print(Padding(Text(f"{text}, by {some[0].measure.head}", style="italic"), (0, 0, 0, 1)))
        rows = [[Text(cell, style=STYLES.get(e.verdict, "")) for cell in _cells(e)] for e in some]
        console.print(Padding(grid(_NARROW, [[*row[:2], *row[3:]] for row in rows], text_last=True), (0, 0, 0, 2)))
    for text in _not_judged(entries):
        console.print(Padding(Text(text, style="dim"), (0, 0, 0, 1)))


def format_markdown(claims: Sequence[ClaimEntry], without: Sequence[str]) -> str:
    """Format the claims as Markdown."""
    out: list[str] = []
    for heading, some, others in _sections(claims, without):
        out += [*([""] if out else []), f"## {heading}", "", f"{_counts(some)}."]
        for table, entries in by_table(some):
            out += ["", f"### {table.name}: {table.title}", "", f"{table.paper}.", ""]
            out += _markdown_of_figure(entries)
        out += ["", f"{_without_claim(others)}."] if others else []
    return "\n".join(out)


def _sections(
    claims: Sequence[ClaimEntry], without: Sequence[str]
) -> Iterator[tuple[str, list[ClaimEntry], Sequence[str]]]:
    """Yield the papers' claims, with the names of figures without one, and fedkeep's own."""
    papers, own = ([entry for entry in claims if entry.table.own == is_own] for is_own in (False, True))
    if papers or without:
        yield "Figures", papers, without
    if own:
        yield "fedkeep's own comparisons", own, ()


def format_claims_of_figure(claims: Sequence[ClaimEntry]) -> str:
    """Format the claims of one figure as Markdown, to stand below its table."""
    return "\n".join([f"{_counts(claims)}.", "", *_markdown_of_figure(claims)])


def _markdown_of_figure(entries: Sequence[ClaimEntry]) -> list[str]:
    out = []
    for text, some in _by_claim(judged(entries)):
        out += [f"{text}:", "", *markdown_table(_HEADINGS, [_cells(entry) for entry in some]), ""]
    out += [f"- {text}" for text in _not_judged(entries)]
    return out if out[-1] else out[:-1]


def as_data(claims: Sequence[ClaimEntry]) -> list[dict[str, Any]]:
    """Return the claims as JSON data."""
    return [
        {"table": e.table.name, "claim": e.claim.claim, "measure": e.claim.of, "better": e.better, "than": e.than}
        | {"seeds": e.seeds, "gap": json_gap(e.gap), "verdict": e.verdict, "reason": e.reason}
        for e in claims
    ]


def _counts(claims: Sequence[ClaimEntry]) -> str:
    counts = Counter(entry.verdict for entry in claims)
    parts = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
    one = len({entry.table.name for entry in claims}) == 1
    who = "the paper's text makes" if one else "the papers' texts make"
    if claims and claims[0].table.own:
        who = "fedkeep makes"
    return f"Comparisons that {who}: {', '.join(parts) or 'none'}"


def _by_claim(entries: Sequence[ClaimEntry]) -> Iterator[tuple[str, list[ClaimEntry]]]:
    for text, some in itertools.groupby(entries, key=lambda entry: entry.claim.claim):
        yield text, list(some)


def _not_judged(entries: Sequence[ClaimEntry]) -> list[str]:
    """Return one text per claim with comparisons that were not run or are repeated: how many, and the reasons."""
    out = []
    for claim, some in _by_claim(entries):
        parts = []
        for verdict in (NOT_RUN, REPEATED):
            found = [entry for entry in some if entry.verdict == verdict]
            reasons = list(dict.fromkeys(entry.reason for entry in found if entry.reason))
            number = "" if len(found) == len(some) else f"{len(found)} "
            parts += [f"{number}{verdict}" + (f" ({'; '.join(reasons)})" if reasons else "")] if found else []
        out += [f"{claim}: {', '.join(parts)}"] if parts else []
    return out


def _without_claim(names: Sequence[str]) -> str:
    return f"Without a claim that a measure here can decide: {', '.join(names)}"


def _cells(entry: ClaimEntry) -> list[str]:
    gap = format_gap(entry.gap, entry.measure.digits)
    verdict = entry.verdict + (f": {entry.reason}" if entry.reason else "")
    return [entry.better, entry.than, entry.measure.head, str(entry.seeds), gap, verdict]
