"""How a comparison is shown in a notebook: a table per problem, and what was found in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedkeep._util import html
from fedkeep.analysis.compare import HIGHER_IS_BETTER, most_accurate_first, rank_groups
from fedkeep.analysis.groups import Group, Problem
from fedkeep.analysis.measures import format_measure, heading
from fedkeep.analysis.metric_columns import Column, rank_column
from fedkeep.analysis.sentences import sentences

if TYPE_CHECKING:
    from fedkeep.analysis.run_set import RunSet

_MARKS = {1: " ¹", 2: " ²"}


def run_set_html(runs: RunSet) -> str:
    """Return the comparison of runs for a notebook; problems are shown one below the other."""
    return "".join([*map(problem_html, runs.problems), left_out_html(runs)])


def left_out_html(runs: RunSet) -> str:
    """Return which runs could not be used, and why."""
    return "".join(html.paragraph(f"left out: {one['run']}: {one['reason']}") for one in runs.left_out_as_data())


def problem_html(problem: Problem, against: str | None = None, columns: Sequence[Column] = ()) -> str:
    """Return the table of the groups of one problem, and the result of their comparison in sentences.

    `columns` are shown instead of the usual ones.
    """
    groups, found = most_accurate_first(problem.groups), sentences(problem.groups, against)
    numbers = {len(group.runs) for group in groups}
    title = problem.title or "Comparison"
    over = "" if numbers == {1} else ", mean±standard deviation over runs"
    table = html.table(_chosen_columns(groups, columns) if columns else _usual_columns(groups))
    return html.block(f"{title}{over}", table, _legend(groups), *map(html.paragraph, found))


def _first_columns(groups: Sequence[Group]) -> dict[str, list[str]]:
    return {"method": [group.label for group in groups], "runs": [str(len(group.runs)) for group in groups]}


def _chosen_columns(groups: Sequence[Group], columns: Sequence[Column]) -> dict[str, list[str]]:
    named = {group.label: group for group in groups}
    shown = _first_columns(groups)
    for column in columns:
        places = rank_column(column, named)
        shown[column.head] = [
            column.cell(group) + _MARKS.get(places.get(label, 0), "") for label, group in named.items()
        ]
    return shown


def _usual_columns(groups: Sequence[Group]) -> dict[str, list[str]]:
    places = rank_groups({group.label: group for group in groups})
    shown = _first_columns(groups)
    for key in HIGHER_IS_BETTER:
        shown[heading(key)] = [
            format_measure(key, group.mean[key], group.spread[key]) + _MARKS.get(places[key].get(group.label, 0), "")
            for group in groups
        ]
    return shown | {
        heading(key): [format_measure(key, group.mean[key]) for group in groups] for key in ("bytes", "seconds")
    }


def _legend(groups: Sequence[Group]) -> str:
    ranked = any(rank_groups({group.label: group for group in groups}).values())
    return html.paragraph("¹ best, ² second best") if ranked else ""
