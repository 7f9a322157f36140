"""Plots of one client's models over the rounds it took part in (of runs with `eval_local_every=1`).

The client is the one with the most visits; among several, the one with the most kinds of classes (dominant,
non-dominant and missing ones), then the one with the most examples. Runs with the same seed show the same client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkeep import forgetting as fg
from fedkeep._util.text import short_name
from fedkeep.analysis.groups import Group, Run
from fedkeep.plots.local_models import NOT_EVALUATED
from fedkeep.plots.style import COLOUR_SCALE, COLOURS, class_labels, figure, grid, legend, line_style
from fedkeep.runs.history import History

DOMINANT = 0.05  # the share of a client's examples from which on a class is dominant (FedKA's gamma)
_GAIN_TO_LOSS = "RdBu_r"  # blue to red by way of white


@dataclass(frozen=True)
class Visits:
    """The visits of one client, T of them: its model's class accuracies, and the global model's before and after."""

    client: int
    history: History
    rounds: np.ndarray  # [T]
    before: np.ndarray  # [T, C]
    local: np.ndarray  # [T, C]
    counts: np.ndarray  # [T, C] label counts

    @classmethod
    def of(cls, run: Run, client: int) -> Visits:
        """Return the visits of a client."""
        found = [(a, int(np.flatnonzero(a.ids == client)[0])) for a in run.anatomies if client in a.ids]
        rounds, before = np.array([a.round for a, _ in found]), np.stack([a.before for a, _ in found])
        local, counts = (np.stack([getattr(a, name)[k] for a, k in found]) for name in ("clients", "label_counts"))
        return cls(client, run.history, rounds, before, local, counts)

    @property
    def name(self) -> str:
        """What the client is called."""
        return short_name(self.history.client_name(self.client))

    @property
    def label_counts(self) -> np.ndarray:
        """[C] label counts at the first visit."""
        return np.asarray(self.counts[0])

    @property
    def degree(self) -> np.ndarray:
        """[T, C] forgetting degree (FedKA eq. 1)."""
        return fg.forgetting_degree(self.before, self.local)

    @property
    def minor_class(self) -> int | None:
        """The non-dominant class with the most examples; None if there is none."""
        minor = np.where(self.label_counts < DOMINANT * self.label_counts.sum(), self.label_counts, 0)
        return int(minor.argmax()) if minor.max() > 0 else None


def visits(groups: Sequence[Group]) -> Any:
    """Plot the class accuracies of one client's models beside its label counts, in the first run (Flashback, 8)."""
    shown = _shown(groups)
    if not shown:
        return NOT_EVALUATED
    number = shown[0][1].local.shape[1]
    tall = max(1.2, min(3.0, 0.16 * number))
    fig = figure(5.2, 0.6 + (tall + 0.35) * len(shown))
    panels = fig.subplots(len(shown), 2, squeeze=False, sharey="row", width_ratios=(3, 1))
    image = None
    for (accuracy, counts), (g, v) in zip(panels, shown, strict=True):
        image = accuracy.imshow(v.local.T, aspect="auto", cmap=COLOUR_SCALE, vmin=0, vmax=1, interpolation="nearest")
        accuracy.set_title(f"{g.label}: {v.name}")
        accuracy.set(xlabel="round", ylabel="class")
        _label_visits(accuracy, v.rounds)
        counts.barh(np.arange(number), v.label_counts, color=COLOURS[0])
        counts.set_xlabel("examples")
        if number <= 12:
            accuracy.set_yticks(range(number), class_labels(v.history, number))
    fig.colorbar(image, ax=panels[:, 0], label="accuracy", shrink=0.9, pad=0.01, aspect=25)
    return fig


def degree(groups: Sequence[Group]) -> Any:
    """Plot the forgetting degree of one client's classes, most examples first, in the first run (FedKA, 2b)."""
    shown = _shown(groups)
    if not shown:
        return NOT_EVALUATED
    number = shown[0][1].local.shape[1]
    across, down = grid(len(shown))
    fig = figure(1.2 + 3.0 * across, 0.6 + (max(1.4, min(4.0, 0.18 * number)) + 0.35) * down)
    panels = fig.subplots(down, across, squeeze=False)
    for axes in panels.flat[len(shown) :]:
        axes.set_axis_off()
    image = None
    for axes, (g, v) in zip(panels.flat, shown, strict=False):
        order = np.argsort(-v.label_counts, kind="stable")
        image = axes.imshow(
            v.degree[:, order].T, aspect="auto", cmap=_GAIN_TO_LOSS, vmin=-1, vmax=1, interpolation="nearest"
        )
        if number <= 20:
            classes = class_labels(v.history, number)
            axes.set_yticks(range(number), [f"{classes[c]} ({v.label_counts[c]})" for c in order], fontsize=7)
        axes.set_title(f"{g.label}: {v.name}")
        axes.set(xlabel="round", ylabel="class (examples)")
        axes.spines[:].set_visible(False)
        _label_visits(axes, v.rounds)
    bar = fig.colorbar(image, ax=panels, label="forgetting degree", shrink=0.9, pad=0.01, aspect=25)
    bar.set_ticks([-1, 0, 1], labels=["gained", "0", "lost"])
    return fig


def minor_class(groups: Sequence[Group]) -> Any:
    """Plot forgetting degree and local accuracy of a non-dominant class of one client, median over seeds (FedKA, 6).

    It is the client's non-dominant class with the most examples.
    """
    usable = [(k, g, found) for k, g in enumerate(groups) if (found := _of_minor_class(g))]
    if not usable:
        return f"{NOT_EVALUATED}, and a client must have a class with less than {DOMINANT:.0%} of its examples"
    fig = figure(7.0, 2.7)
    panels = fig.subplots(1, 2)
    for axes, position, scale in zip(panels, (0, 1), (1, 100), strict=True):
        for k, g, found in usable:
            by_round: dict[int, list[float]] = {}
            for rounds, *values in found:
                for t, value in zip(rounds, values[position], strict=True):
                    by_round.setdefault(int(t), []).append(scale * float(value))
            shown = sorted(by_round)
            axes.plot(shown, [np.median(by_round[t]) for t in shown], label=g.label, **line_style(k))
        axes.set_xlabel("round")
        axes.margins(x=0.01)
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].axhline(0, color="#999999", linewidth=0.6)
    panels[0].set(ylabel="forgetting degree", ylim=(max(-1.05, panels[0].dataLim.y0 - 0.05), 1.05))
    panels[1].set(ylabel="accuracy of the local model (%)", ylim=(0, 100))
    panels[0].set_title(_describe_minor_class(usable[0][1]), fontweight="normal", fontsize=8)
    legend(fig, panels[0], len(usable), columns=4)
    return fig


def reduced(groups: Sequence[Group]) -> Any:
    """Plot the forgetting degree of a class whose examples are removed during the run, and their number (FedKA, 3).

    One panel for each group whose setting `reductions` names a client and a class; median over seeds.
    """
    shown = [(g, found) for g in groups if (found := _of_reduced_class(g))]
    if not shown:
        return "the runs must have reductions, and their local models must have been evaluated (eval_local_every=1)"
    across, down = grid(len(shown))
    fig = figure(0.9 + 3.1 * across, 0.6 + 2.1 * down)
    panels = fig.subplots(down, across, squeeze=False)
    for axes in panels.flat[len(shown) :]:
        axes.set_axis_off()
    for axes, (g, (first, class_id, rounds, lost)) in zip(panels.flat, shown, strict=False):
        right = axes.twinx()
        right.step(first.rounds, first.counts[:, class_id], where="post", color=COLOURS[1], linestyle="--", linewidth=1)
        right.set_ylabel("examples (dashed)", color=COLOURS[1])
        right.set_ylim(bottom=0)
        right.yaxis.get_major_locator().set_params(integer=True)
        right.spines["right"].set_visible(True)
        axes.axhline(0, color="#999999", linewidth=0.6)
        axes.plot(rounds, lost, color=COLOURS[0], linewidth=1)
        axes.set(xlabel="round", ylabel="forgetting degree", ylim=(max(-1.05, float(lost.min()) - 0.05), 1.05))
        axes.set_title(f"{g.label}: {_class_name(first, class_id)} of {first.name}", fontsize=8)
        axes.margins(x=0.01)
        axes.xaxis.get_major_locator().set_params(integer=True)
    return fig


PLOTS: dict[str, Callable[[Sequence[Group]], Any]] = {
    "visits": visits,
    "degree": degree,
    "minor_class": minor_class,
    "reduced": reduced,
}


def _choose(run: Run) -> int:
    """Return the client of a run that is shown."""
    counts: dict[int, np.ndarray] = {}
    found: dict[int, int] = {}
    for a in run.anatomies:
        for k, own in zip(a.ids.tolist(), a.label_counts, strict=True):
            counts.setdefault(k, own)
            found[k] = found.get(k, 0) + 1
    return max(found, key=lambda k: (found[k], _kinds(counts[k]), counts[k].sum(), -k))


def _kinds(label_counts: np.ndarray) -> int:
    """Return how many of three kinds of classes a client has: dominant, non-dominant and missing.

    >>> _kinds(np.array([90, 9, 1, 0])), _kinds(np.array([50, 50]))
    (3, 1)
    """
    share = label_counts / label_counts.sum()
    return int((share >= DOMINANT).any()) + int(((share > 0) & (share < DOMINANT)).any()) + int((share == 0).any())


def _shown(groups: Sequence[Group]) -> list[tuple[Group, Visits]]:
    """Return the visits of the chosen client in each group's first run, where local models were evaluated."""
    return [(g, Visits.of(g.runs[0], _choose(g.runs[0]))) for g in groups if g.runs[0].anatomies]


def _of_minor_class(g: Group) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return rounds, forgetting degree and local accuracy of the chosen client's minor class, for every run."""
    found = [Visits.of(run, _choose(run)) for run in g.runs if run.anatomies]
    return [(v.rounds, v.degree[:, c], v.local[:, c]) for v in found if (c := v.minor_class) is not None]


def _of_reduced_class(g: Group) -> tuple[Visits, int, np.ndarray, np.ndarray] | None:
    """Return the visits in the first run, the first class that is reduced, rounds, and its degree over seeds."""
    reductions = g.runs[0].history.settings.get("reductions")
    if not reductions:
        return None
    k, c = reductions[0]["client"], reductions[0]["class_id"]
    found = [Visits.of(run, k) for run in g.runs if any(k in a.ids for a in run.anatomies)]
    if not found:
        return None
    common = sorted(set.intersection(*(set(v.rounds.tolist()) for v in found)))
    lost = [v.degree[np.isin(v.rounds, common), c] for v in found]
    return found[0], c, np.array(common), np.median(lost, axis=0)


def _describe_minor_class(g: Group) -> str:
    """Return which class of which client is shown, or of how many seeds."""
    found = [v for run in g.runs if run.anatomies and (v := Visits.of(run, _choose(run))).minor_class is not None]
    if len(found) > 1:
        return f"one class of one client per seed; median of {len(found)} seeds"
    [v] = found
    counts = v.label_counts
    held = f"{counts[v.minor_class]} of {counts.sum()} examples"
    return f"{_class_name(v, v.minor_class or 0)} of {v.name}: {held}"


def _class_name(v: Visits, c: int) -> str:
    return short_name(v.history.class_name(c))


def _label_visits(axes: Any, rounds: np.ndarray) -> None:
    """Label columns of a heat map with the rounds of the visits."""
    step = -(-len(rounds) // 8)
    axes.set_xticks(range(0, len(rounds), step), rounds[::step].tolist())
