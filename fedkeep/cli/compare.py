"""The command `fedkeep compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedkeep._util.json import to_json
from fedkeep._util.validate import require_number
from fedkeep.cli.options import AsJson, Runs
from fedkeep.errors import FedkeepError

if TYPE_CHECKING:
    import numpy as np

    from fedkeep.analysis.groups import Group
    from fedkeep.analysis.metric_columns import Column
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
        typer.Option(help="Also show the rounds to fractions of this accuracy, such as 0.8 (Flashback table 1)."),
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
    from fedkeep.analysis.run_set import read_runs

    if target is not None:
        require_number("--target", target, above=0, high=1)
    runs = read_runs(folders)
    if against is not None:
        _require_group(runs, against)
    chosen = Chosen.parse(runs, metrics, sites)
    if markdown:
        print(_as_markdown(runs, chosen))
    elif as_json:
        print(to_json(_as_data(runs, against, target, chosen), indent=2))
    else:
        show(Console(), runs, against, target, chosen)
    if runs.incomplete:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Chosen:
    """What the user chose to see: the columns, if not the usual ones, and a metric by site."""

    columns: tuple[Column, ...] = ()
    sites: str | None = None

    @classmethod
    def parse(cls, runs: RunSet, metrics: str | None, sites: str | None) -> Chosen:
        """Return what the options choose; raise if no run has it."""
        from fedkeep.analysis.metric_columns import parse_columns, site_values

        if sites is not None:
            site_values(runs.groups, sites)
        return cls(tuple(parse_columns(metrics, runs.groups)) if metrics is not None else (), sites)


def show(
    console: Console,
    runs: RunSet,
    against: str | None = None,
    target: float | None = None,
    chosen: Chosen = Chosen(),
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
    chosen: Chosen = Chosen(),
) -> None:
    """Print the table of the groups of one problem and the result of the comparison in sentences."""
    from fedkeep.analysis.groups import FRACTIONS, rounds_to
    from fedkeep.analysis.sentences import sentences
    from fedkeep.cli import tables

    numbers = {len(g.runs) for g in groups}
    if numbers == {1}:
        title, named = "", {g.label: g for g in groups}
    elif len(numbers) == 1:
        title, named = f"Mean±standard deviation over {min(numbers)} runs", {g.label: g for g in groups}
    else:
        title = "Mean±standard deviation over runs; number of runs in brackets"
        named = {f"{g.label} [{len(g.runs)}]": g for g in groups}
    if chosen.columns:
        console.print(tables.chosen_metrics(title, named, chosen.columns))
    else:
        console.print(tables.comparison(title, named))
    if chosen.sites is not None and (by_site := _by_site(groups, chosen.sites)):
        console.print(tables.site_table(chosen.sites, by_site))
    tables.print_personal(console, groups)
    if target is not None:
        reached = {name: rounds_to(g, target) for name, g in named.items()}
        console.print(tables.rounds_table(f"Rounds to A = {target:g}", FRACTIONS, reached))
    if lines := sentences(groups, _within(groups, against)):
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


def _by_site(groups: Sequence[Group], metric: str) -> dict[str, dict[str, np.ndarray]]:
    """Return a metric by group and site; empty for a problem without sites."""
    from fedkeep.analysis.metric_columns import site_values

    try:
        return site_values(groups, metric)
    except FedkeepError:  # another problem has them
        return {}


def _as_data(runs: RunSet, against: str | None, target: float | None, chosen: Chosen) -> dict[str, Any]:
    from fedkeep.analysis.compare import comparison_as_data
    from fedkeep.analysis.sentences import sentences

    problems = []
    for problem in runs.problems:
        name = _within(problem.groups, against)
        found = {"found": sentences(problem.groups, name)}
        data = comparison_as_data(problem.groups, name, target)
        for row, group in zip(data["groups"], problem.groups, strict=True):
            if chosen.columns:
                row["metrics"] = {column.key: column.as_data(group) for column in chosen.columns}
            if chosen.sites is not None:
                row["sites"] = {chosen.sites: _by_site([group], chosen.sites).get(group.label, {})}
        problems.append({"title": problem.title, **data, **found})
    return {"problems": problems, "left_out": runs.left_out_as_data()}


def _as_markdown(runs: RunSet, chosen: Chosen) -> str:
    from fedkeep.analysis.compare import comparison_as_markdown, markdown_text
    from fedkeep.analysis.metric_columns import columns_as_markdown, sites_as_markdown

    def table(groups: list[Group]) -> str:
        usual = columns_as_markdown(groups, chosen.columns) if chosen.columns else comparison_as_markdown(groups)
        by_site = _by_site(groups, chosen.sites) if chosen.sites is not None else {}
        return f"{usual}\n\n{sites_as_markdown(chosen.sites or '', by_site)}" if by_site else usual

    several = len(runs.problems) > 1
    return "\n\n".join(
        (f"**{markdown_text(problem.title)}**\n\n" if several else "") + table(problem.groups)
        for problem in runs.problems
    )
