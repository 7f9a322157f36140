"""Plots of runs, fit to be printed. Each function draws one figure of groups of runs (see `compare`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep import forgetting as fg
from fedkeep._util.text import did_you_mean
from fedkeep.analysis.groups import Group, group
from fedkeep.errors import FedkeepError
from fedkeep.plots.style import COLOURS, SCALE, figure, line, parse_formats, save, styled
from fedkeep.runs.reading import find_runs, read_experiment

log = logging.getLogger("fedkeep")


def plot(
    paths: Sequence[str | Path], folder: str | Path, formats: str = "pdf,png", only: Sequence[str] = ()
) -> list[Path]:
    """Draw runs into a folder and return the files; plots that the runs have no figures for are left out, said once."""
    names = list(only) or list(PLOTS)
    for name in names:
        if name not in PLOTS:
            raise FedkeepError(f"unknown plot {name!r}: {did_you_mean(name, PLOTS)}")
    wanted = parse_formats(formats)
    with styled():
        groups, folder = group(paths), Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FedkeepError(f"{folder} cannot be made: {error.strerror}") from error
        files = []
        for name in names:
            drawn = PLOTS[name](groups, paths)
            if isinstance(drawn, str):
                log.warning("%s is left out: %s", name, drawn)
            else:
                files += save(drawn, folder, name, wanted)
    return files


def accuracy(groups: Sequence[Group], paths: Any) -> Any:
    """Test accuracy over rounds: the mean over seeds, and a band of one standard deviation where there are several."""
    fig = figure(3.5, 2.6)
    axes = fig.subplots()
    for k, g in enumerate(groups):
        rounds, values = _over_rounds(g, lambda h: h.accuracy)
        mean = 100 * values.mean(0)
        axes.plot(rounds, mean, label=g.label, marker="o" if len(rounds) == 1 else None, **line(k))
        if len(values) > 1:
            spread = 100 * values.std(0, ddof=1)
            band = (np.maximum(mean - spread, 0), np.minimum(mean + spread, 100))
            axes.fill_between(rounds, *band, color=line(k)["color"], alpha=0.15, linewidth=0)
    axes.set(xlabel="round", ylabel="test accuracy (%)", ylim=(0, 100))
    axes.margins(x=0.01)
    _legend(fig, axes, len(groups))
    return fig


def classes(groups: Sequence[Group], paths: Any) -> Any:
    """Accuracy of each class over rounds, a panel per group, the mean over seeds: gaps are forgetting."""
    across, down = _grid(len(groups))
    shown = [_over_rounds(g, lambda h: h.class_accuracy) for g in groups]
    tall = max(1.2, min(3.0, 0.16 * shown[0][1].shape[-1]))
    fig = figure(1.0 + 2.3 * across, 0.6 + (tall + 0.35) * down)
    panels = fig.subplots(down, across, squeeze=False, sharey=True)
    for axes in panels.flat[len(groups) :]:
        axes.set_axis_off()
    image = None
    for axes, g, (rounds, values) in zip(panels.flat, groups, shown, strict=False):
        mean = values.mean(0).T
        edges = (rounds[0] - 0.5, rounds[-1] + 0.5, len(mean) - 0.5, -0.5)
        image = axes.imshow(mean, aspect="auto", cmap=SCALE, vmin=0, vmax=1, extent=edges, interpolation="nearest")
        axes.set_title(g.label)
        axes.set_xlabel("round")
        if len(mean) <= 20:
            axes.set_yticks(range(0, len(mean), 1 if len(mean) <= 12 else 2))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=2)
    for axes in panels[:, 0]:
        axes.set_ylabel("class")
    fig.colorbar(image, ax=panels, label="accuracy", shrink=0.9, pad=0.01, aspect=25)
    return fig


def round_forgetting(groups: Sequence[Group], paths: Any) -> Any:
    """Round forgetting: its distribution over rounds (Flashback figure 4), and its course (figure 14)."""
    kept = [(k, g, lost) for k, g in enumerate(groups) if (lost := _lost(g)) is not None]
    if not kept:
        return "it needs every round to have been evaluated, and more than one"
    fig = figure(7.0, 2.6)
    spread, course = fig.subplots(1, 2)
    for k, g, (rounds, values) in kept:
        ordered = np.sort(values.ravel())
        share = np.arange(1, len(ordered) + 1) / len(ordered)
        spread.step(np.r_[0, ordered], np.r_[0, share], where="post", label=g.label, **line(k))
        course.plot(rounds, values.mean(0), **{**line(k), "linewidth": 1.0})
    spread.set(xlabel="round forgetting", ylabel="share of rounds up to it", ylim=(0, 1.01))
    spread.set_xlim(left=0)
    course.set(xlabel="round", ylabel="round forgetting")
    course.set_ylim(bottom=0)
    course.margins(x=0.01)
    _legend(fig, spread, len(kept), columns=4)
    return fig


def where(groups: Sequence[Group], paths: Any) -> Any:
    """What each class lost in local training and in averaging, the mean over clients, rounds and seeds."""
    kept = [(g, found) for g in groups if (found := _anatomies(g)) is not None]
    if not kept:
        return "it needs rounds whose local models were evaluated (eval_local_every=1)"
    number = len(kept[0][1][0])
    across, down = _grid(len(kept))
    fig = figure(0.6 + max(2.2, 0.24 * number) * across, 0.5 + 1.9 * down)
    panels = fig.subplots(down, across, squeeze=False, sharey=True, sharex=True)
    for axes in panels.flat[len(kept) :]:
        axes.set_axis_off()
    for axes, (g, (local, averaging)) in zip(panels.flat, kept, strict=False):
        at = np.arange(number)
        axes.bar(at - 0.2, local, 0.4, color=COLOURS[0], label="local training")
        axes.bar(at + 0.2, averaging, 0.4, color=COLOURS[4], label="averaging")
        axes.set_title(g.label)
        axes.set_xlabel("class")
        if number <= 20:
            axes.set_xticks(at)
    for axes in panels[:, 0]:
        axes.set_ylabel("accuracy lost")
    fig.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


def split(groups: Sequence[Group], paths: Sequence[str | Path]) -> Any:
    """Who holds which classes, in the first of the runs: the area of a circle is a number of examples."""
    counts = _label_counts(find_runs(paths)[0])
    if isinstance(counts, str):
        return counts
    clients, number = counts.shape
    fig = figure(min(7.0, max(3.0, 0.9 + 0.16 * clients)), max(1.4, 0.7 + 0.16 * min(number, 40)))
    axes = fig.subplots()
    if clients <= 60 and number <= 40:
        k, c = np.nonzero(counts)
        axes.grid(color="#e5e5e5", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.scatter(k, c, s=90 * counts[k, c] / counts.max(), color=COLOURS[0], linewidths=0)
        axes.set_title(f"largest circle: {counts.max()} examples", fontweight="normal", fontsize=8)
        axes.set(xlim=(-0.7, clients - 0.3), ylim=(number - 0.3, -0.7))
        axes.set_yticks(range(0, number, 1 if number <= 12 else 5))
    else:
        image = axes.imshow(counts.T, aspect="auto", cmap=SCALE, interpolation="nearest")
        fig.colorbar(image, ax=axes, label="examples")
    axes.set(xlabel="client", ylabel="class")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return fig


PLOTS: dict[str, Callable[[Sequence[Group], Sequence[str | Path]], Any]] = {
    "accuracy": accuracy,
    "classes": classes,
    "round_forgetting": round_forgetting,
    "where": where,
    "split": split,
}


def _over_rounds(g: Group, measure: Callable[[Any], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounds that all of a group's runs evaluated, and the measure there, [runs, rounds, ...]."""
    common = sorted(set.intersection(*(set(h.rounds.tolist()) for h in g.histories)))
    values = [measure(h)[np.isin(h.rounds, common)] for h in g.histories]
    return np.array(common), np.stack(values)


def _lost(g: Group) -> tuple[np.ndarray, np.ndarray] | None:
    rounds, accuracies = _over_rounds(g, lambda h: h.class_accuracy)
    if len(rounds) < 2 or (np.diff(rounds) != 1).any():
        return None
    return rounds[1:], np.stack([fg.round_forgetting(one) for one in accuracies])


def _anatomies(g: Group) -> tuple[np.ndarray, np.ndarray] | None:
    found = []
    for h in g.histories:
        evaluated = {r["round"] for r in h.records if "confusion" in r}
        rounds = [r["round"] for r in h.records if "local" in r and {r["round"] - 1, r["round"]} <= evaluated]
        found += [h.anatomy(r) for r in rounds]
    if not found:
        return None
    local, averaging = (
        np.mean([one[key].mean(0) for one in found], axis=0) for key in ("local_forgetting", "aggregation_forgetting")
    )
    return local, averaging


def _label_counts(path: Path) -> np.ndarray | str:
    """Return [clients, classes] of a run, as kept beside it or else made again from its experiment file."""
    kept = path / "split.json"
    if kept.exists():
        return np.array(json.loads(kept.read_text())["counts"])
    from fedkeep.experiments.experiment import Experiment

    try:
        data, clients = Experiment.from_dict(read_experiment(path)).data_and_clients()
    except FedkeepError as error:
        return f"the split cannot be made again from {path}: {error}"
    return clients.label_counts(data.y_train, data.n_classes)


def _grid(panels: int) -> tuple[int, int]:
    """Choose columns and rows: two by two rather than three and one."""
    across = 2 if panels in (2, 4) else min(3, panels)
    return across, -(-panels // across)


def _legend(fig: Any, axes: Any, number: int, columns: int = 2) -> None:
    if number > 1:
        fig.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(columns, number))
