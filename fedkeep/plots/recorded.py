"""Plots of what instruments recorded in runs (`fedkeep.instruments.Every`), with one panel or line per group.

A plot of a single round shows the last analysed one of each group's first run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from fedkeep._util.text import short_name
from fedkeep.analysis.groups import Group
from fedkeep.plots import features
from fedkeep.plots.features import Shown, class_colours, class_legend
from fedkeep.plots.style import COLOUR_SCALE, COLOURS, class_labels, figure, legend, line_style
from fedkeep.runs.history import History


def of_last_round(study: str, plot: Callable[[Shown], Any]) -> Callable[[Sequence[Group]], Any]:
    """Return the plot of a study's last results in groups of runs; where there are none, it returns a reason."""

    def draw(groups: Sequence[Group]) -> Any:
        shown = [
            (g.label, with_names(found[-1], g.runs[0].history))
            for g in groups
            if (found := _results(g.runs[0].history.instruments, study))
        ]
        return plot(shown) if shown else not_recorded(study)

    return draw


def with_names(result: dict[str, Any], history: History) -> dict[str, Any]:
    """Return a study's result with what its client and the classes are called, where it has them."""
    client = result.get("client")
    named = {} if client is None else {"client_name": short_name(history.client_name(client))}
    names = history.class_names
    return {**result, **named, "class_names": None if names is None else class_labels(history, len(names))}


def not_recorded(study: str, every: int = 10) -> str:
    """Return why a study cannot be drawn."""
    return f"the instrument {study} must have been recorded during the run (--instruments {study} --every {every})"


def distances(groups: Sequence[Group]) -> Any:
    """Plot weight divergence against distribution distance, and the course of both (FedNTD figure 8).

    A point is a client of an analysed round, darker in later rounds.
    """
    usable = [(k, g, found) for k, g in enumerate(groups) if (found := _rounds(g, "divergence"))]
    if not usable:
        return not_recorded("divergence")
    fig = figure(7.0, 4.6)
    across = max(2, min(3, len(usable)))
    panels = fig.subplots(1 + -(-len(usable) // across), across, squeeze=False)
    shared = None
    for (k, g, found), axes in zip(usable, panels[:-1].flat, strict=False):
        if shared is not None:
            axes.sharex(shared)
            axes.sharey(shared)
        shared = shared or axes
        _scatter_distances(axes, k, g.label, found)
    for axes in [*panels[:-1].flat[len(usable) :], *panels[-1, 2:]]:
        axes.set_axis_off()
    names = {"weight_divergence": "weight divergence", "distribution_distance": "distribution distance"}
    for axes, (key, name) in zip(panels[-1], names.items(), strict=False):
        for k, g, found in usable:
            rounds = [number for number, _ in found]
            means = [np.mean([value for result in results for value in result[key]]) for _, results in found]
            marker = "o" if len(rounds) == 1 else None
            axes.plot(rounds, means, label=g.label, marker=marker, **line_style(k))
        axes.set(xlabel="round", ylabel=name)
        axes.set_title("mean over clients", fontweight="normal")
        axes.xaxis.get_major_locator().set_params(integer=True)
    legend(fig, panels[-1, 0], len(usable), columns=4)
    return fig


def _scatter_distances(axes: Any, k: int, label: str, found: list[tuple[int, list[dict[str, Any]]]]) -> None:
    points: list[tuple[float, float]] = []
    for at, (_, results) in enumerate(found):
        now = [pair for r in results for pair in zip(r["distribution_distance"], r["weight_divergence"], strict=True)]
        opacity = 0.15 + 0.7 * (at + 1) / len(found)
        axes.scatter(*zip(*now, strict=True), s=9, color=COLOURS[k % len(COLOURS)], alpha=opacity, linewidths=0)
        points += now
    x, y = np.array(points, dtype=float).T
    if len(x) > 1 and np.ptp(x) > 0 and np.ptp(y) > 0:
        axes.set_title(f"{label}, r = {np.corrcoef(x, y)[0, 1]:.2f}")
    else:
        axes.set_title(label)
    axes.set(xlabel="distribution distance", ylabel="weight divergence")


def training(shown: Shown) -> Any:
    """Plot the local models' accuracy during local training, mean and standard deviation over clients (FedNTD, 6)."""
    fig = figure(6.4, 2.7)
    panels = fig.subplots(1, 2, sharey=True)
    titles = {"in_local": "on the client's own distribution", "out_local": "on what the client lacks"}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for k, (label, r) in enumerate(shown):
            values = 100 * np.array(r[key], dtype=float)  # [epochs, clients]
            style = {"marker": "o", "markersize": 3, "capsize": 2, **line_style(k)}
            axes.errorbar(r["epochs"], np.nanmean(values, axis=1), np.nanstd(values, axis=1), label=label, **style)
        axes.set_title(title, fontweight="normal")
        axes.set_xlabel("local epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set(ylabel="accuracy of local models (%)", ylim=(0, 102))
    legend(fig, panels[0], len(shown), columns=4)
    return fig


def confusion(shown: Shown) -> Any:
    """Plot the confusion matrices of the global model and of one client's model after training (FedSSD figure 4)."""
    fig = figure(0.8 + 2.5 * len(shown), 5.0)
    panels = fig.subplots(2, len(shown), squeeze=False)
    image = None
    for (label, r), column in zip(shown, panels.T, strict=True):
        models = {"before": "global model", "local": r["client_name"]}
        for axes, (key, title) in zip(column, models.items(), strict=True):
            counts = np.array(r[key], dtype=float)
            shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
            image = axes.imshow(shares, cmap=COLOUR_SCALE, vmin=0, vmax=1, interpolation="nearest")
            accuracy = np.trace(counts) / max(counts.sum(), 1)
            axes.set_title(f"{label}\n{title}, {accuracy:.0%}", fontsize=8)
            axes.spines[:].set_visible(False)
            axes.set(xlabel="predicted class", ylabel="true class")
            if len(counts) <= 12:
                names = r.get("class_names") or [str(c) for c in range(len(counts))]
                turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if r.get("class_names") else {}
                axes.set_xticks(range(len(counts)), names, **turned)
                axes.set_yticks(range(len(counts)), names)
        held = np.array(r["label_counts"])
        if len(held) <= 12:  # the classes that the client holds, larger dots for more examples
            sizes = 40 * held / max(held.max(), 1)
            at = np.flatnonzero(held)
            column[1].scatter(np.full(len(at), len(held) - 0.1), at, s=sizes[at], color=COLOURS[1], clip_on=False)
    fig.colorbar(image, ax=panels, label="share of the true class", shrink=0.7, pad=0.02, aspect=25)
    if len(shown[0][1]["label_counts"]) <= 12:
        fig.supxlabel("dots: the classes that the client holds", fontsize=8)
    return fig


def neurons(shown: Shown) -> Any:
    """Plot the class that each neuron of the last hidden layer prefers in every model of a round (FedNTD figure 17).

    Neurons are sorted by their preference in the global model that the clients start from.
    """
    usable = [(label, r) for label, r in shown if r["models"]]
    if not usable:
        return "the model has no hidden neurons below a dense layer"
    hues = class_colours(1 + max(max(map(max, r["preferences"])) for _, r in usable))
    rows = max(len(r["models"]) for _, r in usable)
    fig = figure(6.6, 0.7 + len(usable) * (0.5 + 0.17 * rows))
    panels = fig.subplots(len(usable), 1, squeeze=False)[:, 0]
    for axes, (label, r) in zip(panels, usable, strict=True):
        classes = np.array(r["preferences"])
        order = np.argsort(classes[0], kind="stable")
        axes.imshow(hues[classes[:, order]], aspect="auto", interpolation="nearest")
        kept = (classes[1:-1] == classes[0]).mean()
        axes.set_title(f"{label}: {kept:.0%} of the neurons keep their class in the clients' models")
        axes.set_yticks(range(len(r["models"])), ["global before", *r["models"][1:-1], "global after"], fontsize=6)
        for edge in (0.5, len(classes) - 1.5):
            axes.axhline(edge, color="white", linewidth=2)
        axes.spines[:].set_visible(False)
    panels[-1].set_xlabel("neuron, sorted by its class in the global model before")
    class_legend(fig, hues, usable[0][1].get("class_names"))
    return fig


def regions(shown: Shown) -> Any:
    """Plot which class each model predicts where, with the examples of its client (FedGKD figure 5).

    At most three clients of the round are shown, then the new global model with the examples of the whole cohort.
    """
    usable = [(label, r) for label, r in shown if r["models"]]
    if not usable:
        return "the examples must be points in a plane"
    clients = min(3, max(len(r["points"]) for _, r in usable))
    fig = figure(0.5 + 1.75 * (clients + 1), 0.7 + 1.85 * len(usable))
    panels = fig.subplots(len(usable), clients + 1, squeeze=False, sharex=True, sharey=True)
    hues = class_colours(1 + int(max(point[2] for _, r in usable for points in r["points"] for point in points)))
    for (label, r), row in zip(usable, panels, strict=True):
        models = [*range(1, 1 + min(clients, len(r["points"]))), len(r["models"]) - 1]
        for axes, at in zip([*row[: len(models) - 1], row[-1]], models, strict=True):
            own = r["points"][at - 1] if at < len(r["models"]) - 1 else [p for points in r["points"] for p in points]
            x, y, classes = np.array(own, dtype=float).T
            pale = 0.65 + 0.35 * hues[..., :3]
            edges = (r["x"][0], r["x"][-1], r["y"][0], r["y"][-1])
            axes.imshow(pale[np.array(r["classes"][at])], origin="lower", extent=edges, aspect="auto")
            axes.scatter(x, y, s=4, color=hues[classes.astype(int)], linewidths=0)
            axes.set_title("global model" if at == len(r["models"]) - 1 else r["models"][at], fontsize=8)
            axes.tick_params(length=2, labelsize=7)
        row[0].set_ylabel(label, fontweight="bold")
    return fig


def surfaces(shown: Shown) -> Any:
    """Plot the loss around a client's model along two directions, and under noise on the weights (FedNTD figure 14)."""
    fig = figure(2.2 + 2.3 * len(shown), 2.6)
    *planes, noise = fig.subplots(1, len(shown) + 1, width_ratios=(*[1.0] * len(shown), 1.1))
    log_losses = [np.log10(np.maximum(np.array(r["losses"], dtype=float), 1e-6)) for _, r in shown]
    levels = np.linspace(min(map(np.min, log_losses)), max(map(np.max, log_losses)), 21)
    if levels[0] == levels[-1]:
        levels = levels[0] + np.linspace(-0.5, 0.5, 21)
    filled = None
    for axes, (label, r), losses in zip(planes, shown, log_losses, strict=True):
        filled = axes.contourf(r["axis"], r["axis"], losses.T, levels=levels, cmap=COLOUR_SCALE)
        axes.plot(0, 0, marker="x", color="white")
        axes.set_title(f"{label}\n{r['client_name']}", fontsize=8)
        axes.set(xlabel="first direction", aspect="equal")
    planes[0].set_ylabel("second direction")
    bar = fig.colorbar(filled, ax=planes, shrink=0.8, format=lambda x, _: f"{10**x:.2g}")
    bar.set_label("loss")
    for k, (label, r) in enumerate(shown):
        noise.plot(r["sigma"], r["under_noise"], marker="o", markersize=3, label=label, **line_style(k))
    noise.set(xlabel="noise on the weights", ylabel="loss")
    noise.set_ylim(bottom=0)
    legend(fig, noise, len(shown), columns=4)
    return fig


def _results(lines: Iterable[dict[str, Any]], study: str) -> list[dict[str, Any]]:
    return [line[study] for line in lines if study in line]


def _rounds(g: Group, study: str) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return a study's results of all runs, by round."""
    found: dict[int, list[dict[str, Any]]] = {}
    for line in (line for run in g.runs for line in run.history.instruments if study in line):
        found.setdefault(line["after_round"], []).append(line[study])
    return sorted(found.items())


PLOTS: dict[str, Callable[[Sequence[Group]], Any]] = {
    "distances": distances,
    "training": of_last_round("training", training),
    "confusion": of_last_round("confusion", confusion),
    "neurons": of_last_round("neurons", neurons),
    "surfaces": of_last_round("surface", surfaces),
    "regions": of_last_round("regions", regions),
    "tsne": of_last_round("tsne", features.by_class_and_model),
    "tsne_global_and_client": of_last_round("tsne", features.global_and_client),
    "circle": of_last_round("circle", features.on_circle),
}
