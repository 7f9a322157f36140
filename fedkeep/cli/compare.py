"""The command `fedkeep compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedkeep._util.json import to_json
from fedkeep._util.validate import require_number
from fedkeep.cli.options import AsJson, Runs

if TYPE_CHECKING:
    from fedkeep.analysis.groups import Group


def compare(
    folders: Runs,
    against: Annotated[
        str | None,
        typer.Option(metavar="LABEL", help="Test each group against this one (a label or a method), not all pairs."),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Also show the rounds to fractions of this accuracy, such as 0.8 (Flashback table 1)."),
    ] = None,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """Compare runs: mean and spread over seeds, ranking, significance tests.

    Example: fedkeep compare runs/ --against fedavg
    """
    from fedkeep.analysis.compare import comparison_as_data, comparison_as_markdown, group_named
    from fedkeep.analysis.groups import group_runs

    if target is not None:
        require_number("--target", target, above=0, high=1)
    groups = group_runs(folders)
    if against is not None:
        group_named(groups, against)
    if markdown:
        print(comparison_as_markdown(groups))
    elif as_json:
        print(to_json(comparison_as_data(groups, against, target), indent=2))
    else:
        show(Console(), groups, against, target)


def show(console: Console, groups: list[Group], against: str | None = None, target: float | None = None) -> None:
    """Print the table of groups and the result of the comparison in sentences."""
    from fedkeep.analysis.compare import sentences
    from fedkeep.analysis.groups import FRACTIONS, rounds_to
    from fedkeep.cli import tables

    numbers = {len(g.runs) for g in groups}
    if numbers == {1}:
        title, named = "", {g.label: g for g in groups}
    elif len(numbers) == 1:
        title, named = f"Mean±standard deviation over {min(numbers)} runs", {g.label: g for g in groups}
    else:
        title = "Mean±standard deviation over runs; number of runs in brackets"
        named = {f"{g.label} [{len(g.runs)}]": g for g in groups}
    console.print(tables.comparison(title, named))
    if target is not None:
        reached = {name: rounds_to(g, target) for name, g in named.items()}
        console.print(tables.rounds_table(f"Rounds to A = {target:g}", FRACTIONS, reached))
    if len(groups) > 1:
        console.print()
        for sentence in sentences(groups, against):
            console.print(sentence, highlight=False, markup=False)
