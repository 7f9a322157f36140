"""The command `fedkeep compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedkeep._util.json import to_json
from fedkeep._util.validate import require_number
from fedkeep.cli.options import AsJson, Runs
from fedkeep.errors import FedkeepError

if TYPE_CHECKING:
    from fedkeep.analysis.groups import Group
    from fedkeep.analysis.run_set import RunSet


def compare(
    folders: Runs,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL",
            help="Test each group against this one (a label or a method), not all pairs. "
            "With more than five groups the default is fedavg.",
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="Also show the rounds to fractions of this accuracy, such as 0.8 (Flashback table 1), and the bytes "
            "until it is reached. Without it, the bytes to the final accuracy of fedavg are shown."
        ),
    ] = None,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """Compare runs: mean and spread over seeds, ranking, significance tests.

    Runs of different problems (data, split, rounds) are shown one below the other and not compared. Exits with 1 if a
    run that was named itself cannot be read.

    Example: fedkeep compare runs/ --against fedavg
    """
    from fedkeep.analysis.run_set import read_runs

    if target is not None:
        require_number("--target", target, above=0, high=1)
    runs = read_runs(folders)
    if against is not None:
        _require_group(runs, against)
    if markdown:
        print(_as_markdown(runs, target))
    elif as_json:
        print(to_json(_as_data(runs, against, target), indent=2))
    else:
        show(Console(), runs, against, target)
    if runs.incomplete:
        raise typer.Exit(1)


def show(console: Console, runs: RunSet, against: str | None = None, target: float | None = None) -> None:
    """Print, for each problem, the table of its groups and the result of the comparison in sentences."""
    for number, problem in enumerate(runs.problems, start=1):
        if len(runs.problems) > 1:
            heading = f"Problem {number} of {len(runs.problems)}: {problem.title}"
            console.print(f"\n{heading}" if number > 1 else heading, style="bold", highlight=False, markup=False)
        show_problem(console, problem.groups, against, target)
    if len(runs.problems) > 1:
        note = "Results of different problems are not compared with each other."
        console.print(f"\n{note}", highlight=False, markup=False)


def show_problem(
    console: Console, groups: list[Group], against: str | None = None, target: float | None = None
) -> None:
    """Print the table of the groups of one problem, the most accurate first, and the comparison in sentences."""
    from fedkeep.analysis.compare import default_target, ordered
    from fedkeep.analysis.sentences import bytes_sentence, sentences
    from fedkeep.cli import tables

    order = ordered(groups, "final")
    groups = [*order, *(g for g in groups if g not in order)]
    numbers = {len(g.runs) for g in groups}
    if numbers == {1}:
        title, named = "", {g.label: g for g in groups}
    elif len(numbers) == 1:
        title, named = f"Mean±standard deviation over {min(numbers)} runs", {g.label: g for g in groups}
    else:
        title = "Mean±standard deviation over runs; number of runs in brackets"
        named = {f"{g.label} [{len(g.runs)}]": g for g in groups}
    console.print(tables.comparison(title, named))
    tables.print_personal(console, groups)
    if target is not None:
        console.print(tables.target_table(named, target))
    lines = sentences(groups, _within(groups, against))
    if target is None and (reference := default_target(groups)) is not None:
        lines.append(bytes_sentence(groups, reference))
    if lines:
        console.print()
        for sentence in lines:
            console.print(sentence, highlight=False, markup=False)


def _require_group(runs: RunSet, name: str) -> None:
    """Raise unless some problem has a group of this name."""
    from fedkeep.analysis.compare import group_named

    if not any(_within(problem.groups, name) for problem in runs.problems):
        group_named(runs.groups, name)


def _within(groups: Sequence[Group], name: str | None) -> str | None:
    """Return the name if it names a group of these; a group of another problem is no reference here."""
    from fedkeep.analysis.compare import group_named

    try:
        return group_named(groups, name).label if name is not None else None
    except FedkeepError:
        return None


def _as_data(runs: RunSet, against: str | None, target: float | None) -> dict[str, Any]:
    from fedkeep.analysis.compare import comparison_as_data
    from fedkeep.analysis.sentences import sentences

    problems = []
    for problem in runs.problems:
        name = _within(problem.groups, against)
        found = {"found": sentences(problem.groups, name)}
        problems.append({"title": problem.title, **comparison_as_data(problem.groups, name, target), **found})
    return {"problems": problems, "left_out": runs.left_out_as_data()}


def _as_markdown(runs: RunSet, target: float | None) -> str:
    from fedkeep.analysis.compare import comparison_as_markdown, markdown_text

    several = len(runs.problems) > 1
    return "\n\n".join(
        (f"**{markdown_text(problem.title)}**\n\n" if several else "") + comparison_as_markdown(problem.groups, target)
        for problem in runs.problems
    )
