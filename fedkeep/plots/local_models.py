"""Plots of the local models (of runs with `eval_local_every`), and of how stable class accuracies are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from fedkeep import forgetting as fg
from fedkeep._util.text import short_name
from fedkeep.analysis.anatomy import Anatomy
from fedkeep.analysis.groups import Group
from fedkeep.plots.style import (
    COLOUR_SCALE,
    figure,
    grid,
    legend,
    line_style,
    over_rounds,
    set_panel_title,
    tick_classes,
)

NOT_EVALUATED = "local models must have been evaluated (eval_local_every=1)"

# name -> the accuracies of one round's clients [K]
_LOCAL: dict[str, Callable[[Anatomy], np.ndarray]] = {
    "on all classes": lambda a: np.nanmean(a.clients, axis=1),
    "on the client's own distribution": lambda a: fg.in_local(a.clients, a.label_counts),
    "on what the client lacks": lambda a: fg.out_local(a.clients, a.label_counts),
}


def local(groups: Sequence[Group]) -> Any:
    """Plot the local models' accuracy over rounds, mean over clients and seeds, on three distributions (FedNTD, 4)."""
    usable = [(k, g) for k, g in enumerate(groups) if any(run.anatomies for run in g.runs)]
    if not usable:
        return NOT_EVALUATED
    fig = figure(7.0, 2.6)
    panels = fig.subplots(1, len(_LOCAL), sharey=True)
    for axes, (title, accuracy) in zip(panels, _LOCAL.items(), strict=True):
        for k, g in usable:
            by_round: dict[int, list[float]] = {}
            for anatomy in (one for run in g.runs for one in run.anatomies):
                by_round.setdefault(anatomy.round, []).append(100 * float(np.nanmean(accuracy(anatomy))))
            rounds = sorted(by_round)
            marker = "o" if len(rounds) == 1 else None
            axes.plot(rounds, [np.mean(by_round[t]) for t in rounds], label=g.label, marker=marker, **line_style(k))
        axes.set_title(title, fontweight="normal")
        axes.set_xlabel("round")
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set(ylabel="accuracy of local models (%)", ylim=(0, 100))
    legend(fig, panels[0], len(usable), columns=4)
    return fig


def anatomy(groups: Sequence[Group]) -> Any:
    """Plot one round's models by class: the global model before, every client's, the global model after (Flashback, 2).

    The round is the middle one of those that can be shown, in the first run of each group.
    """
    shown = [(g, found[len(found) // 2]) for g in groups if (found := g.runs[0].anatomies)]
    if not shown:
        return NOT_EVALUATED
    across, down = grid(len(shown))
    tall = max(1.4, min(3.0, 0.16 * (2 + max(len(a.ids) for _, a in shown))))
    fig = figure(1.2 + 2.4 * across, 0.6 + (tall + 0.4) * down)
    panels = fig.subplots(down, across, squeeze=False)
    for axes in panels.flat[len(shown) :]:
        axes.set_axis_off()
    image = None
    for axes, (g, a) in zip(panels.flat, shown, strict=False):
        models = np.vstack([a.before, a.clients, a.after])
        image = axes.imshow(models, aspect="auto", cmap=COLOUR_SCALE, vmin=0, vmax=1, interpolation="nearest")
        labels = [f"round {a.round - 1}", *_client_names(g, a.ids), f"round {a.round}"]
        if len(labels) <= 16:
            axes.set_yticks(range(len(labels)), labels, fontsize=6)
        else:
            axes.set_yticks([0, len(labels) - 1], [labels[0], labels[-1]], fontsize=6)
        set_panel_title(axes, g.label)
        axes.set_xlabel("class")
        if g.runs[0].history.class_names is not None:
            tick_classes(axes.xaxis, g.runs[0].history, models.shape[1])
        axes.spines[:].set_visible(False)
    fig.colorbar(image, ax=panels, label="accuracy", shrink=0.9, pad=0.01, aspect=25)
    return fig


def consistency(groups: Sequence[Group]) -> Any:
    """Plot the cosine of the class accuracies of consecutive rounds, mean over seeds (FedNTD, 2b)."""
    fig = figure(3.5, 2.6)
    axes = fig.subplots()
    drawn = 0
    for k, g in enumerate(groups):
        rounds, values = over_rounds(g, lambda run: run.class_accuracy)
        if len(rounds) < 2:
            continue
        cosine = np.stack([fg.consistency(one) for one in values]).mean(0)
        axes.plot(rounds[-len(cosine) :], cosine, label=g.label, **{**line_style(k), "linewidth": 1.0})
        drawn += 1
    if not drawn:
        return "at least two rounds must have been evaluated"
    axes.set(xlabel="round", ylabel="consistency of class accuracies")
    axes.set_ylim(top=1.01)
    axes.margins(x=0.01)
    legend(fig, axes, drawn)
    return fig


def _client_names(g: Group, ids: Iterable[int]) -> list[str]:
    return [short_name(g.runs[0].history.client_name(int(k)), 16) for k in ids]
