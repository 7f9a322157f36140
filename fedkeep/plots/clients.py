"""Plots that compare the global model with local models over rounds (of runs with `eval_local_every`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedkeep._util.text import short_name
from fedkeep.analysis.anatomy import Anatomy
from fedkeep.analysis.groups import Group
from fedkeep.plots.local_models import NOT_EVALUATED
from fedkeep.plots.style import COLOUR_SCALE, class_labels, figure, legend, line_style


def global_and_local(groups: Sequence[Group]) -> Any:
    """Plot the global model's accuracy against that of the local models, and their difference (FedSSD figure 2).

    A point is a round: the accuracy of the global model that was sent out, and the mean accuracy of the clients'
    models after training it.
    """
    usable = [(k, g, found) for k, g in enumerate(groups) if (found := [a for run in g.runs for a in run.anatomies])]
    if not usable:
        return NOT_EVALUATED
    fig = figure(6.4, 2.9)
    points, course = fig.subplots(1, 2)
    for k, g, anatomies in usable:
        local, sent = (100 * np.array(values) for values in zip(*map(_accuracies, anatomies), strict=True))
        points.scatter(local, sent, s=8, color=line_style(k)["color"], alpha=0.6, linewidths=0)
        by_round: dict[int, list[float]] = {}
        for anatomy, difference in zip(anatomies, sent - local, strict=True):
            by_round.setdefault(anatomy.round, []).append(float(difference))
        rounds = sorted(by_round)
        means, marker = [np.mean(by_round[t]) for t in rounds], "o" if len(rounds) == 1 else None
        course.plot(rounds, means, label=g.label, marker=marker, **line_style(k))
    end = 1.05 * max(points.get_xlim()[1], points.get_ylim()[1])
    points.plot([0, end], [0, end], color="#999999", linewidth=0.8, zorder=1)
    points.set(xlim=(0, end), ylim=(0, end), xlabel="local models, mean (%)", ylabel="global model (%)", aspect="equal")
    course.axhline(0, color="#999999", linewidth=0.8, zorder=1)
    course.set(xlabel="round", ylabel="global - local (points)")
    course.xaxis.get_major_locator().set_params(integer=True)
    legend(fig, course, len(usable), columns=4)
    return fig


def client(groups: Sequence[Group]) -> Any:
    """Plot the class accuracies of the global model and of one client's model over rounds (FedSSD figure 3).

    The client is the one that was evaluated most often in the group's first run; of several, the first.
    """
    usable = [(g, found) for g in groups if (found := g.runs[0].anatomies)]
    if not usable:
        return NOT_EVALUATED
    fig = figure(1.2 + 2.6 * len(usable), 4.2)
    panels = fig.subplots(2, len(usable), squeeze=False, sharex="col")
    image = None
    for (g, anatomies), column in zip(usable, panels.T, strict=True):
        history = g.runs[0].history
        visits = Counter(int(k) for a in anatomies for k in a.ids)
        one = min(visits, key=lambda k: (-visits[k], k))
        rounds = [a for a in anatomies if one in a.ids]
        counts = rounds[0].label_counts[rounds[0].ids.tolist().index(one)]
        models = {
            "global model": [a.before for a in rounds],
            short_name(history.client_name(one)): [_of(a, one) for a in rounds],
        }
        for axes, (name, accuracies) in zip(column, models.items(), strict=True):
            edges = (rounds[0].round - 0.5, rounds[-1].round + 0.5, len(counts) - 0.5, -0.5)
            image = axes.imshow(
                np.array(accuracies).T,
                aspect="auto",
                cmap=COLOUR_SCALE,
                vmin=0,
                vmax=1,
                extent=edges,
                interpolation="nearest",
            )
            axes.set_title(f"{g.label}, {name}", fontsize=8)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=2)
            axes.xaxis.get_major_locator().set_params(integer=True)
        if len(counts) <= 20:
            classes = class_labels(history, len(counts))
            column[0].set_yticks(range(len(counts)), classes)
            held = [f"{c} ({n})" for c, n in zip(classes, counts, strict=True)]
            column[1].set_yticks(range(len(counts)), held, fontsize=7)
        column[1].set_xlabel("round")
    panels[0, 0].set_ylabel("class")
    panels[1, 0].set_ylabel("class (client's examples)")
    fig.colorbar(image, ax=panels, label="accuracy", shrink=0.8, pad=0.01, aspect=25)
    return fig


def _accuracies(anatomy: Anatomy) -> tuple[float, float]:
    """Return the mean accuracy of a round's local models, and that of the global model that was sent out."""
    return float(np.nanmean(anatomy.clients)), float(np.nanmean(anatomy.before))


def _of(anatomy: Anatomy, client: int) -> np.ndarray:
    """Return the class accuracies of one client's model."""
    return np.asarray(anatomy.clients[anatomy.ids.tolist().index(client)])


PLOTS: dict[str, Callable[[Sequence[Group]], Any]] = {"global_and_local": global_and_local, "client": client}
