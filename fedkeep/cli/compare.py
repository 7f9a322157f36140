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
    from fedkeep.analysis.metric_columns import Chosen
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
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Columns to show instead of the usual ones, separated by commas: macro_f1, auc, ece, recall.CLASS, "
            "metrics of your own, final, ...",
        ),
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC", help="Also show this metric for each owner of test examples: accuracy, auc, ..."
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
    from fedkeep.analysis.comparison import Comparison
    from fedkeep.analysis.metric_columns import Chosen
    from fedkeep.analysis.run_set import read_runs

    if target is not None:
        require_number("--target", target, above=0, high=1)
    runs = read_runs(folders)
    chosen = Chosen.parse(runs.groups, metrics, sites)
    comparison = Comparison(runs, against, target, chosen)
    if markdown:
        print(comparison.to_markdown())
    elif as_json:
        print(to_json(comparison.as_data(), indent=2))
    else:
        show(Console(), runs, against, target, chosen)
    if runs.incomplete:
        raise typer.Exit(1)


def show(
    console: Console,
    runs: RunSet,
    against: str | None = None,
    target: float | None = None,
    chosen: Chosen | None = None,
) -> None:
    """Print, for each problem, the table of its groups and the result of the comparison in sentences."""
    for number, problem in enumerate(runs.problems, start=1):
        if len(runs.problems) > 1:
            heading = f"Problem {number} of {len(runs.problems)}: {problem.title}"
            console.print(f"\n{heading}" if number > 1 else heading, style="bold", highlight=False, markup=False)
        show_problem(console, problem.groups, against, target, chosen)
    if len(runs.problems) > 1:
        note = "Results of different problems are not compared with each other."
        console.print(f"\n{note}", highlight=False, markup=False)


def show_problem(
    console: Console,
    groups: list[Group],
    against: str | None = None,
    target: float | None = None,
    chosen: Chosen | None = None,
) -> None:
    """Print the table of the groups of one problem, the most accurate first, and the comparison in sentences."""
    from fedkeep.analysis.compare import default_target, most_accurate_first
    from fedkeep.analysis.comparison import label_within
    from fedkeep.analysis.sentences import bytes_sentence, sentences
    from fedkeep.cli import tables

    groups = most_accurate_first(groups)
    numbers = {len(g.runs) for g in groups}
    if numbers == {1}:
        title, named = "", {g.label: g for g in groups}
    elif len(numbers) == 1:
        title, named = f"Mean±standard deviation over {min(numbers)} runs", {g.label: g for g in groups}
    else:
        title = "Mean±standard deviation over runs; number of runs in brackets"
        named = {f"{g.label} [{len(g.runs)}]": g for g in groups}
    if chosen and chosen.columns:
        console.print(tables.chosen_metrics(title, named, chosen.columns))
    else:
        console.print(tables.comparison(title, named))
    if chosen and chosen.sites and (by_site := chosen.by_site(groups)):
        console.print(tables.site_table(chosen.sites, by_site))
    tables.print_personal(console, groups)
    if target is not None:
        console.print(tables.target_table(named, target))
    lines = sentences(groups, label_within(groups, against))
    if target is None and (reference := default_target(groups)) is not None:
        lines.append(bytes_sentence(groups, reference))
    if lines:
        console.print()
        for sentence in lines:
            console.print(sentence, highlight=False, markup=False)
