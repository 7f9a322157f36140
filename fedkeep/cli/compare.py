"""The command `fedkeep compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedkeep._util.json import to_json
from fedkeep.cli.options import AsJson
from fedkeep.errors import FedkeepError

if TYPE_CHECKING:
    from fedkeep.analysis.groups import Group


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.")],
    against: Annotated[
        str | None,
        typer.Option(metavar="LABEL", help="Test each against this one, not all pairs: a label or a method."),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Also show the rounds to shares of this accuracy, such as 0.8 (Flashback table 1)."),
    ] = None,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """Put runs side by side: grouped by setting, mean and spread over seeds; best and second best, and is it chance?

    Example: fedkeep compare runs/ --against fedavg
    """
    from fedkeep.analysis.compare import comparison_as_data, comparison_as_markdown, group_named
    from fedkeep.analysis.groups import group

    if target is not None and not 0 < target <= 1:
        raise FedkeepError(f"--target is an accuracy above 0 and up to 1, such as 0.8, not {target:g}")
    groups = group(folders)
    if against is not None:
        group_named(groups, against)
    if markdown:
        print(comparison_as_markdown(groups))
    elif as_json:
        print(to_json(comparison_as_data(groups, against, target), indent=2))
    else:
        show(Console(), groups, against, target)


def show(console: Console, groups: list[Group], against: str | None = None, target: float | None = None) -> None:
    """Print the table of groups, and what can be said of it."""
    from fedkeep.analysis.compare import sentences
    from fedkeep.analysis.groups import FRACTIONS, rounds_to
    from fedkeep.cli import tables

    numbers = {len(g.histories) for g in groups}
    alike = len(numbers) == 1
    labels = [g.label if alike else f"{g.label} ({len(g.histories)})" for g in groups]
    title = "" if numbers == {1} else "Mean±standard deviation over " + (f"{min(numbers)} runs" if alike else "runs")
    unfinished = [label for label, g in zip(labels, groups, strict=True) if not g.finished]
    histories = [g.histories for g in groups]
    title += "" if alike else ", their number in brackets"
    console.print(tables.comparison(title, dict(zip(labels, histories, strict=True)), unfinished))
    if target is not None:
        reached = {label: rounds_to(g, target) for label, g in zip(labels, groups, strict=True)}
        console.print(tables.rounds_table(f"Rounds to A = {target:g}", FRACTIONS, reached))
    if len(groups) > 1:
        console.print()
        for sentence in sentences(groups, against):
            console.print(sentence, highlight=False, markup=False)
