"""Comparison of run folders as an object: rows, sentences, data and tables. `fedkeep compare` prints the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeep._util.text import printable
from fedkeep._util.validate import require_number
from fedkeep.analysis.compare import (
    HIGHER_IS_BETTER,
    comparison_as_data,
    group_named,
    markdown_text,
    most_accurate_first,
)
from fedkeep.analysis.groups import Group
from fedkeep.analysis.html import left_out_html, problem_html
from fedkeep.analysis.measures import format_measure, heading
from fedkeep.analysis.metric_columns import Chosen
from fedkeep.analysis.run_set import RunSet, read_runs
from fedkeep.analysis.sentences import sentences
from fedkeep.errors import FedkeepError


def compare(
    paths: str | Path | Iterable[str | Path],
    *,
    against: str | None = None,
    target: float | None = None,
    metrics: str | Iterable[str] | None = None,
    sites: str | None = None,
) -> Comparison:
    """Compare runs: mean and spread over seeds, ranks and significance tests, as `fedkeep compare` does.

    `paths` are run folders, or folders that contain run folders. `against` is the label or method that each group is
    tested against. With `target`, the rounds to fractions of this accuracy are in the data too, and the bytes to it;
    those to the baseline's final accuracy by default. `metrics` are shown instead of the usual columns, such as
    "macro_f1,auc,recall.0", and `sites` is a metric to show for each owner of test examples.
    """
    if target is not None:
        require_number("target", target, above=0, high=1)
    runs = read_runs([paths] if isinstance(paths, str | Path) else paths)
    names = metrics if metrics is None or isinstance(metrics, str) else ",".join(metrics)
    return Comparison(runs, against, target, Chosen.parse(runs.groups, names, sites, option=""))


@dataclass(frozen=True, repr=False)
class Comparison:
    """The groups of some run folders, problem by problem; groups of one problem are compared with each other."""

    runs: RunSet
    against: str | None = None
    target: float | None = None
    chosen: Chosen = field(default_factory=Chosen)

    def __post_init__(self) -> None:
        known = any(label_within(problem.groups, self.against) for problem in self.runs.problems)
        if self.against is not None and not known:
            group_named(self.runs.groups, self.against)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per group: its problem, label, method, number of runs and status; mean and `_std` of each measure."""
        return [
            {
                "problem": problem.title,
                "label": group.label,
                "method": group.setting["method"]["name"],
                "runs": len(group.runs),
                "status": group.status,
                **group.mean,
                **{f"{measure}_std": spread for measure, spread in group.spread.items()},
                **{column.key: float(column.values(group).mean()) for column in self.chosen.columns},
            }
            for problem in self.runs.problems
            for group in most_accurate_first(problem.groups)
        ]

    @property
    def sentences(self) -> list[str]:
        """What the comparison shows, in sentences, of all problems."""
        return [
            line
            for problem in self.runs.problems
            for line in sentences(problem.groups, label_within(problem.groups, self.against))
        ]

    def as_data(self) -> dict[str, Any]:
        """Return everything as JSON-compatible data: groups, ranks and tests of each problem, and runs left out."""
        problems = []
        for problem in self.runs.problems:
            name = label_within(problem.groups, self.against)
            shown = {"found": sentences(problem.groups, name)}
            data = comparison_as_data(problem.groups, name, self.target)
            for row, group in zip(data["groups"], problem.groups, strict=True):
                row |= self.chosen.as_data(group)
            problems.append({"title": problem.title, **data, **shown})
        return {"problems": problems, "left_out": self.runs.left_out_as_data()}

    def to_pandas(self) -> Any:
        """Return the rows as a DataFrame."""
        try:
            import pandas as pd
        except ImportError as error:
            raise FedkeepError("to_pandas needs pandas: pip install pandas") from error
        return pd.DataFrame(self.rows)

    def to_markdown(self) -> str:
        """Return a Markdown table per problem."""
        several = len(self.runs.problems) > 1
        return "\n\n".join(
            (f"**{markdown_text(problem.title)}**\n\n" if several else "")
            + self.chosen.as_markdown(most_accurate_first(problem.groups), self.target)
            for problem in self.runs.problems
        )

    def __repr__(self) -> str:
        return "\n\n".join(["\n\n".join(map(self._table, self.runs.problems)), *self._end()])

    def _repr_html_(self) -> str:
        shown = [
            problem_html(problem, label_within(problem.groups, self.against), self.chosen.columns)
            for problem in self.runs.problems
        ]
        return "".join([*shown, left_out_html(self.runs)])

    def _end(self) -> list[str]:
        left_out = [f"{each['run']} is left out: {each['reason']}" for each in self.runs.left_out_as_data()]
        return ["\n".join([*self.sentences, *left_out])] if self.sentences or left_out else []

    def _table(self, problem: Any) -> str:
        """Return a problem's groups as lines of text."""
        columns = self.chosen.columns
        heads = [column.head for column in columns] or [heading(measure) for measure in HIGHER_IS_BETTER]
        lines = [["method", *heads, "runs"]]
        for group in most_accurate_first(problem.groups):
            cells = [column.cell(group) for column in columns] or [
                format_measure(measure, group.mean[measure], group.spread[measure]) for measure in HIGHER_IS_BETTER
            ]
            lines.append([printable(group.label), *cells, str(len(group.runs))])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = []
        for name, *cells in lines:
            padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            text.append("  ".join([name.ljust(widths[0]), *padded]))
        title = [printable(problem.title)] if len(self.runs.problems) > 1 else []
        return "\n".join([*title, *text])


def label_within(groups: Sequence[Group], name: str | None) -> str | None:
    """Return the label of the group that a name means; None without a name, or if it is of another problem."""
    try:
        return group_named(groups, name).label if name is not None else None
    except FedkeepError:
        return None
