"""Figures of a table: its runs drawn as the papers draw theirs.

A plot of runs (`fedkeep.plots.runs.ALL_PLOTS`) is drawn for every column, with one line or panel per row. `against`
draws the table's measures over its columns, one line per row.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedkeep.analysis.groups import Group, Run
from fedkeep.plots.runs import ALL_PLOTS, PLOTS
from fedkeep.plots.style import figure, legend, line_style, make_folder, parse_formats, plot_style, save
from fedkeep.reproduce.against_paper import ColumnComparison
from fedkeep.reproduce.cells import Job, Results
from fedkeep.reproduce.spec import AGAINST


def draw(
    job: Job, results: Results, comparisons: Sequence[ColumnComparison], folder: Path, formats: str = "png"
) -> tuple[list[Path], list[str]]:
    """Draw the plots of a table into a folder; return the files, and why some plots could not be drawn."""
    extensions = parse_formats(formats)
    files: list[Path] = []
    skipped: list[str] = []
    with plot_style():
        for name, drawn in _plots(job, results, comparisons):
            if isinstance(drawn, str):
                skipped.append(f"{name}: {drawn}")
            else:
                files += save(drawn, make_folder(folder), f"{job.table.name.replace('/', '-')}-{name}", extensions)
    return files, skipped


def _plots(job: Job, results: Results, comparisons: Sequence[ColumnComparison]) -> list[tuple[str, Any]]:
    """Return the name of every plot, and the figure or the reason why there is none."""
    out: list[tuple[str, Any]] = []
    for kind in job.table.plots or list(PLOTS)[:2]:
        if kind == AGAINST:
            out += [(f"{kind}-{measure}", against(comparisons, measure)) for measure in job.table.measures]
            continue
        for column in job.columns:
            groups = _groups(job, results, column)
            out.append((f"{column}-{kind}", ALL_PLOTS[kind](groups) if groups else "no run has finished"))
    return out


def _groups(job: Job, results: Results, column: str) -> list[Group]:
    """Return the finished runs of a column as groups, in the order of the rows."""
    found = {row: results.cells[column, row].histories for row in job.rows}
    return [
        Group(job.table.rows[row].label, {}, [Run(history) for _, history in sorted(histories.items())])
        for row, histories in found.items()
        if histories
    ]


def against(comparisons: Sequence[ColumnComparison], measure: str) -> Any:
    """Plot a measure over the columns, mean and standard deviation over seeds; the paper's figures as crosses."""
    fig = figure(3.8, 2.8)
    axes = fig.subplots()
    rows = [row for row in comparisons[0].rows if any(_ours(c, row.name, measure) for c in comparisons)]
    if not rows:
        return "no run has finished"
    for k, row in enumerate(rows):
        points = [(at, _ours(column, row.name, measure)) for at, column in enumerate(comparisons)]
        shown = [(at, values) for at, values in points if values]
        spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for _, values in shown]
        means = [statistics.fmean(values) for _, values in shown]
        places = [at for at, _ in shown]
        axes.errorbar(places, means, spread, label=row.label, marker="o", markersize=3, capsize=2, **line_style(k))
        printed = [(at, _printed(column, row.name, measure)) for at, column in enumerate(comparisons)]
        crosses = [(at, value) for at, value in printed if value is not None]
        if crosses:
            axes.plot(*zip(*crosses, strict=True), "x", color=line_style(k)["color"], markersize=4)
    axes.set_xticks(range(len(comparisons)), [column.label for column in comparisons], rotation=20, ha="right")
    axes.set_ylabel(rows[0].measures[measure].measure.head)
    legend(fig, axes, len(rows))
    return fig


def _ours(column: ColumnComparison, row: str, measure: str) -> list[float]:
    """Return our finite values of one cell."""
    found = next(one for one in column.rows if one.name == row).measures[measure].values.values()
    return [value for value in found if abs(value) != float("inf")]


def _printed(column: ColumnComparison, row: str, measure: str) -> float | None:
    paper = next(one for one in column.rows if one.name == row).measures[measure].paper
    return None if paper is None else paper.mean
