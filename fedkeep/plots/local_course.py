"""Plots of how local models depart from the global one, as instruments recorded it during runs (Flashback)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedkeep.analysis.groups import Group
from fedkeep.plots.recorded import not_recorded
from fedkeep.plots.style import COLOURS, figure, grid, line_style


def losses(groups: Sequence[Group]) -> Any:
    """Plot the test loss of the global model, of the local models (mean) and of the next global model (Flashback, 5).

    One panel per group, first run; a dot is a mean over local models, half a round after the model they start from.
    """
    shown = [(g, found) for g in groups if (found := _recorded(g, "losses"))]
    if not shown:
        return not_recorded("losses", every=1)
    fig, panels = _panels(len(shown))
    for axes, (g, found) in zip(panels.flat, shown, strict=False):
        before, local, after = (np.array([r[key] for _, r in found]) for key in ("before", "mean_of_clients", "after"))
        rounds = np.array([t for t, _ in found], dtype=float)
        at = np.stack([rounds, rounds + 0.5, rounds + 1, np.full(len(rounds), np.nan)], axis=1)
        course = np.stack([before, local, after, np.full(len(rounds), np.nan)], axis=1)
        axes.plot(at.ravel(), course.ravel(), **{**line_style(0), "linewidth": 0.7})
        axes.plot(rounds + 0.5, local, ".", color=COLOURS[1], markersize=2.5, label="local models (mean)")
        axes.plot(rounds + 1, after, ".", color=COLOURS[0], markersize=2.5, label="global model")
        axes.set_title(g.label)
        axes.margins(x=0.01)
    panels.flat[0].set_ylim(bottom=0)
    _label(panels, len(shown), "round", "test loss")
    fig.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, markerscale=3)
    return fig


def probabilities(groups: Sequence[Group]) -> Any:
    """Plot the mean probability of each class in local models against its label count (Flashback, 9).

    One panel per group, all recorded rounds and seeds; counts are divided by the largest of the class.
    """
    shown = [(g, found) for g in groups if (found := _recorded(g, "probabilities", every_run=True))]
    if not shown:
        return not_recorded("probabilities", every=1)
    fig, panels = _panels(len(shown))
    for axes, (g, found) in zip(panels.flat, shown, strict=False):
        share = np.concatenate([np.ravel(r["label_counts"] / np.maximum(r["largest"], 1)) for _, r in found])
        probability = np.concatenate([np.ravel(r["clients"]) for _, r in found])
        axes.scatter(share, probability, s=5, alpha=0.35, color=COLOURS[0], linewidths=0)
        r = np.corrcoef(share, probability)[0, 1]
        axes.set_title(f"{g.label}: r = {r:.2f}")
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    _label(panels, len(shown), "label count / largest of the class", "mean probability of the class")
    return fig


PLOTS: dict[str, Callable[[Sequence[Group]], Any]] = {"losses": losses, "probabilities": probabilities}


def _recorded(g: Group, study: str, every_run: bool = False) -> list[tuple[int, dict[str, Any]]]:
    """Return the round after which a study was made, and its result, in the first run of a group or in all."""
    runs = g.runs if every_run else g.runs[:1]
    return [(one["after_round"], one[study]) for run in runs for one in run.history.instruments if study in one]


def _panels(number: int) -> tuple[Any, Any]:
    """Return a figure with so many panels that share their axes, and the grid of panels."""
    across, down = grid(number)
    fig = figure(0.6 + (3.2 if across == 1 else 2.3) * across, 0.5 + 2.0 * down)
    panels = fig.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for axes in panels.flat[number:]:
        axes.set_axis_off()
    return fig, panels


def _label(panels: Any, number: int, x: str, y: str) -> None:
    """Label the axes at the left and at the bottom of a grid with so many panels."""
    for axes in panels[:, 0]:
        axes.set_ylabel(y)
    for axes in panels.flat[max(0, number - panels.shape[1]) : number]:  # those without a panel below
        axes.set_xlabel(x)
        axes.tick_params(labelbottom=True)
