"""Plots of runs for print (extra `plots`).

Each function draws one figure of groups of runs. It returns the figure, or the reason why there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep import forgetting as fg
from fedkeep._util.text import format_value, join_names, short_name
from fedkeep._util.validate import require_choice
from fedkeep.analysis.anatomy import loss_by_class
from fedkeep.analysis.compare import most_accurate_first
from fedkeep.analysis.groups import Group, Problem, Run
from fedkeep.analysis.run_set import read_runs
from fedkeep.errors import FedkeepError
from fedkeep.plots import clients, local_course, local_models, one_client, personal, recorded
from fedkeep.plots.style import (
    COLOUR_SCALE,
    COLOURS,
    MAX_BELOW,
    figure,
    grid,
    legend,
    line_style,
    make_folder,
    over_rounds,
    parse_formats,
    plot_style,
    save,
    set_panel_title,
    tick_classes,
)
from fedkeep.runs.label_counts import count_labels, label_counts_of

_MOST_NAMED = 30  # clients with names on an axis

log = logging.getLogger("fedkeep")


def plot(
    paths: Sequence[str | Path],
    folder: str | Path,
    formats: str = "pdf,png",
    only: Sequence[str] = (),
    methods: Sequence[str] = (),
) -> list[Path]:
    """Draw runs into a folder and return the files; a plot without data is skipped with a warning.

    `only` names some of `ALL_PLOTS`; without it, those of `PLOTS` are drawn. `methods` names the methods or labels to
    draw, in this order; without it, all are drawn, the most accurate first. Different problems are drawn into different
    files, which end in the number of the problem. If nothing can be drawn, that is an error.
    """
    names = [require_choice("only", name, ALL_PLOTS, "plot") for name in only] or list(PLOTS)
    extensions = parse_formats(formats)
    files: list[Path] = []
    skipped: list[tuple[str, str]] = []  # names of plots, and why there is none
    with plot_style():
        problems = _chosen(read_runs(paths).problems, methods)
        for number, problem in enumerate(problems, start=1):
            several = len(problems) > 1
            for name in names:
                plotted = ALL_PLOTS[name](problem.groups)
                if isinstance(plotted, str):
                    skipped.append((name, plotted))
                    continue
                if several:
                    plotted.suptitle(problem.title, fontsize=8)
                files += save(plotted, make_folder(folder), f"{name}-{number}" if several else name, extensions)
        if not files:
            raise _nothing_drawn(skipped, problems)
    for name, reason in skipped:
        log.warning("plot %s is skipped: %s", name, reason)
    return files


def _chosen(problems: Sequence[Problem], methods: Sequence[str]) -> list[Problem]:
    """Return the problems with the groups of these methods or labels, in their order; without names, by accuracy."""
    names = {name for problem in problems for g in problem.groups for name in _names(g)}
    for name in methods:
        require_choice("methods", name, sorted(names), "method")
    chosen = []
    for problem in problems:
        ranked = most_accurate_first(problem.groups)
        if methods:
            ranked = list(dict.fromkeys(g for name in methods for g in ranked if name in _names(g)))
        if ranked:
            chosen.append(Problem(problem.title, problem.tables, ranked))
    return chosen


def _names(g: Group) -> set[str]:
    """Return the names by which a group can be chosen: its method, the label that the user gave, and that of plots."""
    return {g.setting["method"]["name"], g.setting.get("label", g.label), g.label}


def _nothing_drawn(skipped: Sequence[tuple[str, str]], problems: Sequence[Problem]) -> FedkeepError:
    """Return the error that says why no plot was drawn, and which ones these runs have the data for."""
    possible = [name for name, draw in ALL_PLOTS.items() if not all(isinstance(draw(p.groups), str) for p in problems)]
    reasons = "; ".join(f"{name}: {reason}" for name, reason in dict.fromkeys(skipped))
    return FedkeepError(
        f"nothing is drawn. {reasons}. These runs have the data for {join_names(possible)}",
        key="only",
        value=[name for name, _ in skipped],
        valid=possible,
    )


def accuracy(groups: Sequence[Group]) -> Any:
    """Plot test accuracy over rounds: the mean over seeds; for a few groups with a band of one standard deviation."""
    fig = figure(3.5, 2.6)
    axes = fig.subplots()
    for k, g in enumerate(groups):
        rounds, values = over_rounds(g, lambda run: run.accuracy)
        mean = 100 * values.mean(0)
        axes.plot(rounds, mean, label=g.label, marker="o" if len(rounds) == 1 else None, **line_style(k))
        if len(values) > 1 and len(groups) <= MAX_BELOW:
            spread = 100 * values.std(0, ddof=1)
            band = (np.maximum(mean - spread, 0), np.minimum(mean + spread, 100))
            axes.fill_between(rounds, *band, color=line_style(k)["color"], alpha=0.15, linewidth=0)
    axes.set(xlabel="round", ylabel="test accuracy (%)", ylim=(0, 100))
    axes.margins(x=0.01)
    legend(fig, axes, len(groups))
    return fig


def classes(groups: Sequence[Group]) -> Any:
    """Plot the accuracy of each class over rounds as a heat map per group, mean over seeds: gaps are forgetting."""
    across, down = grid(len(groups))
    shown = [over_rounds(g, lambda run: run.class_accuracy) for g in groups]
    tall = max(1.2, min(3.0, 0.16 * shown[0][1].shape[-1]))
    fig = figure(1.0 + 2.3 * across, 0.6 + (tall + 0.35) * down)
    panels = fig.subplots(down, across, squeeze=False, sharey=True)
    for axes in panels.flat[len(groups) :]:
        axes.set_axis_off()
    image = None
    for axes, g, (rounds, values) in zip(panels.flat, groups, shown, strict=False):
        mean = values.mean(0).T
        edges = (rounds[0] - 0.5, rounds[-1] + 0.5, len(mean) - 0.5, -0.5)
        image = axes.imshow(
            mean, aspect="auto", cmap=COLOUR_SCALE, vmin=0, vmax=1, extent=edges, interpolation="nearest"
        )
        set_panel_title(axes, g.label)
        axes.set_xlabel("round")
        tick_classes(axes.yaxis, groups[0].runs[0].history, len(mean))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=2)
    for axes in panels[:, 0]:
        axes.set_ylabel("class")
    fig.colorbar(image, ax=panels, label="accuracy", shrink=0.9, pad=0.01, aspect=25)
    return fig


def round_forgetting(groups: Sequence[Group]) -> Any:
    """Plot the distribution of round forgetting (Flashback figure 4) and its course over rounds (figure 14)."""
    usable = [(k, g, lost) for k, g in enumerate(groups) if (lost := _round_forgetting(g)) is not None]
    if not usable:
        return "every round must have been evaluated (eval_every=1), and at least two"
    fig = figure(7.0, 2.6)
    distribution, course = fig.subplots(1, 2)
    for k, g, (rounds, values) in usable:
        ordered = np.sort(values.ravel())
        share = np.arange(1, len(ordered) + 1) / len(ordered)
        distribution.step(np.r_[0, ordered], np.r_[0, share], where="post", label=g.label, **line_style(k))
        course.plot(rounds, values.mean(0), **{**line_style(k), "linewidth": 1.0})
    distribution.set(xlabel="round forgetting", ylabel="cumulative share of rounds", ylim=(0, 1.01))
    distribution.set_xlim(left=0)
    course.set(xlabel="round", ylabel="round forgetting")
    course.set_ylim(bottom=0)
    course.margins(x=0.01)
    legend(fig, distribution, len(usable), columns=4)
    return fig


def where(groups: Sequence[Group]) -> Any:
    """Plot what each class lost in local training and in aggregation, mean over clients, rounds (from 2) and seeds."""
    by_group = [(g, [anatomy for run in g.runs for anatomy in run.anatomies]) for g in groups]
    usable = [(g, loss_by_class(anatomies)) for g, anatomies in by_group if anatomies]
    if not usable:
        return local_models.NOT_EVALUATED
    number = len(usable[0][1][0])
    across, down = grid(len(usable))
    fig = figure(0.6 + max(2.2, 0.24 * number) * across, 0.5 + 1.9 * down)
    panels = fig.subplots(down, across, squeeze=False, sharey=True, sharex=True)
    for axes in panels.flat[len(usable) :]:
        axes.set_axis_off()
    for axes, (g, (local, aggregation)) in zip(panels.flat, usable, strict=False):
        at = np.arange(number)
        axes.bar(at - 0.2, local, 0.4, color=COLOURS[0], label="local training")
        axes.bar(at + 0.2, aggregation, 0.4, color=COLOURS[4], label="aggregation")
        set_panel_title(axes, g.label)
        axes.set_xlabel("class")
        axes.tick_params(labelbottom=True)  # also above other panels, where shared axes have none
        if g.runs[0].history.class_names is not None:
            tick_classes(axes.xaxis, g.runs[0].history, number)
        elif number <= 20:
            axes.set_xticks(at)
    for axes in panels[:, 0]:
        axes.set_ylabel("accuracy lost")
    fig.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


def split(groups: Sequence[Group]) -> Any:
    """Plot the label counts of the clients in the first run: the area of a circle is the number of examples."""
    history = groups[0].runs[0].history
    table = _label_counts(groups[0].runs[0])
    if isinstance(table, str):
        return table
    counts, ids = np.array(table["counts"]), table["ids"]
    clients, number = counts.shape
    fig = figure(min(7.0, max(3.0, 0.9 + 0.16 * clients)), max(1.4, 0.7 + 0.16 * min(number, 40)))
    axes = fig.subplots()
    title = [f"{clients} of {table['clients']} clients"] if clients < table["clients"] else []
    if clients <= 60 and number <= 40:
        k, c = np.nonzero(counts)
        axes.grid(color="#e5e5e5", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.scatter(k, c, s=90 * counts[k, c] / counts.max(), color=COLOURS[0], linewidths=0)
        title.append(f"largest circle: {counts.max()} examples")
        axes.set(xlim=(-0.7, clients - 0.3), ylim=(number - 0.3, -0.7))
        axes.set_yticks(range(0, number, 1 if number <= 12 else 5))
        if history.class_names is not None:
            tick_classes(axes.yaxis, history, number)
    else:
        image = axes.imshow(counts.T, aspect="auto", cmap=COLOUR_SCALE, interpolation="nearest")
        fig.colorbar(image, ax=axes, label="examples")
    axes.set_title("; ".join(title), fontweight="normal", fontsize=8)
    axes.set(xlabel="client", ylabel="class")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if history.client_names and clients <= _MOST_NAMED:
        names = [short_name(history.client_name(k), 16) for k in ids]
        axes.set_xticks(range(clients), names, rotation=45, ha="right", rotation_mode="anchor", fontsize=7)
        return fig
    # a column is the k-th client shown: its tick is that client's id
    axes.xaxis.set_major_formatter(lambda k, _: str(ids[round(k)]) if 0 <= round(k) < clients else "")
    return fig


PLOTS: dict[str, Callable[[Sequence[Group]], Any]] = {
    "accuracy": accuracy,
    "classes": classes,
    "round_forgetting": round_forgetting,
    "where": where,
    "split": split,
    "local": local_models.local,
    "anatomy": local_models.anatomy,
    "consistency": local_models.consistency,
}
# also those that few runs have the data for
ALL_PLOTS = {**PLOTS, **clients.PLOTS, **one_client.PLOTS, **recorded.PLOTS, **local_course.PLOTS, **personal.PLOTS}


def _round_forgetting(g: Group) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the rounds from the second on and the round forgetting, [runs, rounds]; None if rounds are missing."""
    rounds, accuracies = over_rounds(g, lambda run: run.class_accuracy)
    if len(rounds) < 2 or (np.diff(rounds) != 1).any():
        return None
    return rounds[1:], np.stack([fg.round_forgetting(one) for one in accuracies])


def _label_counts(run: Run) -> dict[str, Any] | str:
    """Return a run's label counts, computed again from its experiment file if needed, or why that is not possible."""
    if (recorded := label_counts_of(run.history)) is not None:
        return recorded
    from fedkeep.experiments.build import load_data_and_clients
    from fedkeep.experiments.experiment import Experiment
    from fedkeep.experiments.own_parts import is_own
    from fedkeep.runs.federation_copy import with_own_files

    about = run.history.about
    if is_own("data", source := about["data"].get("source")):
        return (
            f"the split of {run.history.folder} was not recorded, and no code is run for a plot "
            f"(data.source = {format_value(source)})"
        )
    try:
        own = with_own_files(about, run.history.folder) if run.history.folder else about
        data, clients = load_data_and_clients(Experiment.from_dict(own))
    except FedkeepError as error:
        return f"the split of {run.history.folder} was not recorded and cannot be computed again: {error}"
    return count_labels(clients, data.y_train, data.n_classes)
