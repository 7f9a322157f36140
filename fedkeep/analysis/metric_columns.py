"""Columns of comparisons that the user chooses: any metric of the runs, of single classes, and of sites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkeep._util.text import did_you_mean, printable
from fedkeep.analysis.compare import comparison_as_markdown, is_higher_better, markdown_text, ranks
from fedkeep.analysis.groups import Group, Run
from fedkeep.analysis.measures import format_measure, heading
from fedkeep.errors import FedkeepError
from fedkeep.runs.history import History
from fedkeep.runs.round_metrics import OF_SITE, site_rows, user_metric_names


@dataclass(frozen=True)
class Column:
    """A metric of the last evaluated round, as the user named it: a measure of the summary, or METRIC.CLASS."""

    key: str
    metric: str
    of_class: str | None = None  # its name or its number; of a name, every run has a number of its own
    class_name: str = ""

    @property
    def head(self) -> str:
        """The heading of the column."""
        head = heading(self.metric)
        if self.of_class is None:
            return head
        name, percent, _ = head.partition(" %")
        return f"{name} {self.class_name}{percent}"

    @property
    def higher_is_better(self) -> bool | None:
        """Whether more is better; None for a metric of the user's own."""
        return is_higher_better(self.metric)

    def values(self, group: Group) -> np.ndarray:
        """Return the metric of every run of a group; NaN where it was not recorded."""
        return np.array([self._value(run) for run in group.runs], dtype=float)

    def cell(self, group: Group, digits: int | None = None) -> str:
        """Return the mean over a group's runs, with the standard deviation if there are several; "-" if unknown."""
        return format_cell(self.metric, self.values(group), digits)

    def as_data(self, group: Group) -> dict[str, Any]:
        """Return mean and standard deviation over a group's runs, and the value of every run."""
        values = self.values(group)
        return {"mean": float(values.mean()), "spread": _spread(values), "runs": values.tolist()}

    def _value(self, run: Run) -> float:
        if self.of_class is None:
            return run.summary.get(self.metric, float("nan"))
        table, number = run.class_metrics.get(self.metric), _class_number(self.of_class, run)
        return float("nan") if table is None or number is None else float(table[number])


def parse_columns(text: str, groups: Sequence[Group], option: str = "--metrics") -> list[Column]:
    """Return the columns that a list of names separated by commas chooses; raise if no run has one of them."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise FedkeepError(f"{option} is empty: {did_you_mean('', _known(groups))}", key=option, value=text)
    return [_parse_column(name, groups, option) for name in names]


def own_columns(histories: Sequence[History]) -> list[Column]:
    """Return a column for each of the user's own metrics in these histories."""
    own = dict.fromkeys(name for history in histories for name in user_metric_names(history.records))
    known = {key for history in histories for key in history.summary()}
    names = [name if name in known else f"macro_{name}" for name in own]
    return [Column(name, name) for name in names if name in known]


def rank_column(column: Column, groups: Mapping[str, Group]) -> dict[str, int]:
    """Return which finished groups are best and second best; nobody by a metric of which that is not known."""
    higher = column.higher_is_better
    finished = {name: g for name, g in groups.items() if g.finished}
    if higher is None or not any(g.learned for g in finished.values()):
        return {}
    return ranks({name: float(column.values(g).mean()) for name, g in finished.items()}, higher)


def columns_as_markdown(groups: Sequence[Group], columns: Sequence[Column]) -> str:
    """Return a Markdown table of the chosen columns; **best**, <u>second</u>."""
    marks = {0: ("", ""), 1: ("**", "**"), 2: ("<u>", "</u>")}
    named = {g.label: g for g in groups}
    places = {column.key: rank_column(column, named) for column in columns}
    lines = [
        f"| method | {' | '.join(markdown_text(c.head) for c in columns)} | runs |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for label, group in named.items():
        cells = []
        for column in columns:
            before, after = marks[places[column.key].get(label, 0)]
            cells.append(f"{before}{column.cell(group)}{after}")
        lines.append(f"| {markdown_text(label)} | {' | '.join(cells)} | {len(group.runs)} |")
    return "\n".join(lines)


def site_values(groups: Iterable[Group], metric: str, option: str = "--sites") -> dict[str, dict[str, np.ndarray]]:
    """Return a metric of the last evaluated round by group and site, one value per run.

    Groups without metrics by site have none; if there are none at all, or of that name, this raises.
    """
    if metric not in OF_SITE:
        suggestion = did_you_mean(metric, OF_SITE)
        raise FedkeepError(
            f"{option}: unknown metric {metric!r}: {suggestion}", key=option, value=metric, valid=OF_SITE
        )
    found: dict[str, dict[str, list[float]]] = {}
    for group in groups:
        for row in (row for run in group.runs for row in _site_rows(run)):
            found.setdefault(group.label, {}).setdefault(row["site"], []).append(row[metric])
    if not found:
        raise FedkeepError(
            f"{option}: no run has metrics by site; they are recorded if the owners of the test examples are known "
            "(test_ids), at most 200 of them",
            key=option,
            value=metric,
        )
    return {label: {site: np.array(values) for site, values in sites.items()} for label, sites in found.items()}


def sites_as_markdown(metric: str, by_group: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """Return a Markdown table of a metric by site."""
    sites = list(dict.fromkeys(site for values in by_group.values() for site in values))
    lines = [f"| {heading(metric)} | {' | '.join(map(markdown_text, sites))} |", "|---" * (len(sites) + 1) + "|"]
    for label, values in by_group.items():
        cells = [format_cell(metric, values.get(site, np.array([]))) for site in sites]
        lines.append(f"| {markdown_text(label)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def format_cell(metric: str, values: np.ndarray, digits: int | None = None) -> str:
    """Return the mean of a metric over runs as a cell of a table; "-" if a run does not have it."""
    return format_measure(metric, float(values.mean()), _spread(values), digits) if len(values) else "-"


def _spread(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def _site_rows(run: Run) -> list[dict[str, Any]]:
    history = run.history
    record = next(r for r in reversed(history.records) if "confusion" in r or "hits" in r)
    return site_rows(record, history.site_names, history.client_names) if "sites" in record else []


def _known(groups: Sequence[Group]) -> list[str]:
    """Return the names that can be chosen; METRIC.CLASS stands for those of single classes."""
    runs = [run for g in groups for run in g.runs]
    scalars = dict.fromkeys(key for run in runs for key in run.summary)
    return [*scalars, *(f"{key}.CLASS" for key in dict.fromkeys(key for run in runs for key in run.class_metrics))]


def _parse_column(name: str, groups: Sequence[Group], option: str) -> Column:
    metric, dot, written = name.partition(".")
    runs = [run for g in groups for run in g.runs]
    if not dot and any(name in run.summary for run in runs):
        return Column(name, name)
    if dot and (of_metric := [run for run in runs if metric in run.class_metrics]):
        return Column(name, metric, written, _shown_class(name, written, of_metric, option))
    valid = _known(groups)
    of_class = f"it has a value for each class, such as {name}.0"
    hint = of_class if f"{name}.CLASS" in valid else did_you_mean(name, valid)
    raise FedkeepError(
        f"{option}: no run has the metric {printable(name)!r}: {hint}",
        key=option,
        value=name,
        valid=valid,
    )


def _class_number(written: str, run: Run) -> int | None:
    """Return the number that a class has in a run; None if the run has no such class."""
    names = run.history.class_names or ()
    number = names.index(written) if written in names else int(written) if written.isdecimal() else -1
    return number if 0 <= number < run.class_accuracy.shape[1] else None


def _shown_class(name: str, written: str, runs: Sequence[Run], option: str) -> str:
    """Return a class, written as its name or its number, as a heading shows it: by its name if the runs agree on it.

    Raise if no run has it.
    """
    found = [(run.history.class_names, number) for run in runs if (number := _class_number(written, run)) is not None]
    if not found:
        valid = list(runs[0].history.class_names or map(str, range(runs[0].class_accuracy.shape[1])))
        raise FedkeepError(
            f"{option}: {printable(name)} names no class: {did_you_mean(written, valid)}",
            key=option,
            value=name,
            valid=valid,
        )
    shown = {names[number] if names else str(number) for names, number in found}
    return printable(shown.pop() if len(shown) == 1 else written)


@dataclass(frozen=True)
class Chosen:
    """What the user chose to see of a comparison: columns instead of the usual ones, and a metric by site."""

    columns: tuple[Column, ...] = ()
    sites: str | None = None

    @classmethod
    def parse(cls, groups: Sequence[Group], metrics: str | None, sites: str | None, option: str = "--") -> Chosen:
        """Return what the options `metrics` and `sites` choose; raise if no run has it."""
        columns = parse_columns(metrics, groups, f"{option}metrics") if metrics is not None else ()
        if sites is not None:
            site_values(groups, sites, f"{option}sites")
        return cls(tuple(columns), sites)

    def by_site(self, groups: Sequence[Group]) -> dict[str, dict[str, np.ndarray]]:
        """Return the chosen metric by group and site; empty if none is chosen, or these groups have no sites."""
        try:
            return site_values(groups, self.sites) if self.sites is not None else {}
        except FedkeepError:  # groups of another problem have them
            return {}

    def as_data(self, group: Group) -> dict[str, Any]:
        """Return what was chosen of a group as JSON-compatible data."""
        data: dict[str, Any] = {}
        if self.columns:
            data["metrics"] = {column.key: column.as_data(group) for column in self.columns}
        if self.sites is not None:
            of_sites = self.by_site([group]).get(group.label, {})
            data["sites"] = {self.sites: {site: values.tolist() for site, values in of_sites.items()}}
        return data

    def as_markdown(self, groups: list[Group], target: float | None = None) -> str:
        """Return the chosen columns, or the usual ones, as a Markdown table, and one by site below it.

        Among the usual columns are the bytes to the target accuracy.
        """
        table = columns_as_markdown(groups, self.columns) if self.columns else comparison_as_markdown(groups, target)
        by_site = self.by_site(groups)
        return f"{table}\n\n{sites_as_markdown(self.sites or '', by_site)}" if by_site else table
