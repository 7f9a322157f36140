"""Plot of personalised accuracy over the analysed rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedkeep.analysis.groups import Group
from fedkeep.analysis.personal import DATA, GLOBAL, STUDY, USED, describe_model
from fedkeep.plots.style import COLOURS, figure, legend, line_style

PANELS = {
    "mean": "own data, mean and spread",
    "worst_tenth": "own data, worst tenth",
    "test_set": "whole test set, mean",
}


def personal(groups: Sequence[Group]) -> Any:
    """Plot the accuracy of the clients' models on data like their own, of the worst tenth, and on the whole test set.

    Thin lines are the global model's. The spread is the standard deviation over clients. All are means over seeds.
    """
    usable = [(k, g, found) for k, g in enumerate(groups) if (found := _by_round(g))]
    if not usable:
        return f"the instrument {STUDY} must have been recorded during the run (--instruments {STUDY} --every 10)"
    fig = figure(7.4, 2.9)
    panels = fig.subplots(1, len(PANELS), sharey=True)
    for axes, (key, title) in zip(panels, PANELS.items(), strict=True):
        for k, g, found in usable:
            rounds = [number for number, _ in found]
            marker = "o" if len(rounds) == 1 else None
            mean, spread = (_values(found, USED, name) for name in (key, "spread"))
            axes.plot(rounds, mean, label=_label(g, found), marker=marker, **line_style(k))
            if key == "mean":
                axes.fill_between(rounds, mean - spread, mean + spread, color=COLOURS[k % len(COLOURS)], alpha=0.12,
                                  linewidth=0)  # fmt: skip
            thin = {**line_style(k), "linewidth": 0.6}
            axes.plot(rounds, _values(found, GLOBAL, key), marker=marker, markersize=3, **thin)
        axes.set_title(title, fontweight="normal", fontsize=8)
        axes.set_xlabel("round")
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set(ylabel="accuracy (%)", ylim=(0, 102))
    on = sorted({DATA[result["data"]] for _, _, found in usable for _, results in found for result in results})
    fig.suptitle(f"all clients; own data: {' / '.join(on)}; thin lines: the global model", fontsize=8)
    legend(fig, panels[0], max(2, len(usable)))
    return fig


def _by_round(g: Group) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return the results of all runs of a group, by round, in the rounds that all of them analysed."""
    found: dict[int, list[dict[str, Any]]] = {}
    for line in (line for run in g.runs for line in run.history.instruments if STUDY in line):
        found.setdefault(line["after_round"], []).append(line[STUDY])
    return sorted((number, results) for number, results in found.items() if len(results) == len(g.runs))


def _label(g: Group, found: list[tuple[int, list[dict[str, Any]]]]) -> str:
    last = found[-1][1][0]
    return f"{g.label}: {describe_model(last[USED]['model'], last['epochs'])}"


def _values(found: list[tuple[int, list[dict[str, Any]]]], model: str, key: str) -> np.ndarray:
    """Return a number of a model in every round, in per cent, mean over seeds."""
    return np.array([np.mean([100 * float(result[model][key]) for result in results]) for _, results in found])


PLOTS = {STUDY: personal}
