"""Plots of the results of instruments (extra `plots`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep._util.text import join_names, short_name
from fedkeep.errors import FedkeepError
from fedkeep.plots import features, recorded
from fedkeep.plots.recorded import with_names
from fedkeep.plots.style import COLOUR_SCALE, COLOURS, figure, make_folder, parse_formats, plot_style, save
from fedkeep.runs.history import History


def draw(
    results: dict[str, Any], folder: str | Path, formats: str = "pdf,png", history: History | None = None
) -> list[Path]:
    """Draw the studies that have a plot into a folder and return the files; names are those of the history."""
    history = history or History("", {})
    extensions, files = parse_formats(formats), []
    with plot_style():
        folder = make_folder(folder)
        for name, plot in PLOTS.items():
            if name in results:
                named = [short_name(history.client_name(k), 16) for k in results["clients"]]
                files += save(plot(with_names(results[name], history), named), folder, name, extensions)
    return files


def require_plots(studies: Sequence[str]) -> None:
    """Raise if none of these studies has a plot."""
    if not set(studies) & PLOTS.keys():
        raise FedkeepError(
            f"nothing would be drawn: there is no plot of {join_names(studies)}, but of {join_names(list(PLOTS))}",
            key="what",
            value=list(studies),
            valid=list(PLOTS),
        )


def where(r: dict[str, Any], clients: list[str]) -> Any:
    """Plot one round by class: the global model before, every client, the global model after (Flashback figure 2)."""
    rows = np.array([r["before"], *r["clients"], r["after"]], dtype=float)
    fig = figure(max(3.0, 1.4 + 0.28 * rows.shape[1]), 0.8 + 0.2 * len(rows))
    axes = fig.subplots()
    image = axes.imshow(rows, cmap=COLOUR_SCALE, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(rows)), ["global before", *clients, "global after"])
    axes.set_xlabel("class")
    for edge in (0.5, len(rows) - 1.5):
        axes.axhline(edge, color="white", linewidth=2)
    for k, counts in enumerate(r["label_counts"], start=1):
        for c in np.flatnonzero(counts):  # the classes that a client holds
            axes.plot(c, k, marker="o", markersize=2.5, color="white", markeredgecolor="black", markeredgewidth=0.4)
    axes.set_title("dots: classes the client holds", fontweight="normal", fontsize=8)
    axes.spines[:].set_visible(False)
    if (names := r.get("class_names")) and len(names) <= 20:
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor", fontsize=7)
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)
    fig.colorbar(image, ax=axes, label="accuracy")
    return fig


def divergence(r: dict[str, Any], clients: list[str]) -> Any:
    """Plot weight divergence against distribution distance, one point per client (FedNTD figure 8)."""
    fig = figure(3.2, 2.6)
    axes = fig.subplots()
    x, y, fit = np.array(r["distribution_distance"]), np.array(r["weight_divergence"]), r["relation"]
    axes.scatter(x, y, s=18, color=COLOURS[0], linewidths=0)
    if np.isfinite(fit["slope"]):
        ends = np.array([x.min(), x.max()])
        axes.plot(ends, fit["slope"] * ends + fit["intercept"], color=COLOURS[1], linewidth=1)
        axes.set_title(f"r = {fit['pearson']:.2f}", fontweight="normal")
    axes.set_xlabel(r"distribution distance  $|A_G - p_k|_1$", parse_math=True)
    axes.set_ylabel(r"weight divergence  $|w - w_k|_1$", parse_math=True)
    return fig


def surface(r: dict[str, Any], clients: list[str]) -> Any:
    """Plot the loss over the plane of two directions, and under noise on the weights (FedNTD figure 14)."""
    fig = figure(6.4, 2.6)
    plane, noise = fig.subplots(1, 2, width_ratios=(1.2, 1))
    axis, losses = np.array(r["axis"]), np.array(r["losses"])
    filled = plane.contourf(axis, axis, losses.T, levels=20, cmap=COLOUR_SCALE)
    plane.plot(0, 0, marker="x", color="white")
    plane.set(xlabel="first direction", ylabel="second direction")
    plane.set_title(f"{r['client_name']}, {r['directions']}", fontweight="normal")
    fig.colorbar(filled, ax=plane, label="loss")
    noise.plot(r["sigma"], r["under_noise"], marker="o", markersize=3, color=COLOURS[0])
    noise.set(xlabel="standard deviation of noise on the weights", ylabel="loss")
    noise.set_ylim(bottom=0)
    return fig


PLOTS: dict[str, Callable[[dict[str, Any], list[str]], Any]] = {
    "where": where,
    "divergence": divergence,
    "tsne": lambda r, clients: features.by_class_and_model([("", r)]),
    "surface": surface,
    "training": lambda r, clients: recorded.training([("", r)]),
    "confusion": lambda r, clients: recorded.confusion([("", r)]),
    "neurons": lambda r, clients: recorded.neurons([("", r)]),
}
