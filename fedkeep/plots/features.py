"""Plots of features in two dimensions: t-SNE embeddings, and angles on a circle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedkeep.plots.style import COLOURS, figure

Shown = Sequence[tuple[str, dict[str, Any]]]  # label of a group, and the result of a study


def by_class_and_model(shown: Shown) -> Any:
    """Plot the features of all models of a round, coloured by class and by model (FedNTD figures 19-21)."""
    fig = figure(7.0, 0.3 + 3.0 * len(shown))
    panels = fig.subplots(len(shown), 2, squeeze=False)
    for (label, r), (left, right) in zip(shown, panels, strict=True):
        points, y = np.array(r["points"]), np.array(r["y"])
        _scatter_classes(left, points.reshape(-1, 2), np.tile(y, len(points)), r.get("class_names"))
        _scatter_models(right, points, r["models"])
        for axes, title in ((left, "by class"), (right, "by model")):
            axes.set_title(f"{label}, {title}" if label else title)
            axes.set_axis_off()
        if len(points) <= 14:
            right.legend(loc="center left", bbox_to_anchor=(1, 0.5), markerscale=2, fontsize=8)
    class_legend(fig, _hues_of(shown), shown[0][1].get("class_names"))
    return fig


def global_and_client(shown: Shown) -> Any:
    """Plot the features of the global model and of the first client's model, coloured by class (FedGKD figure 2)."""
    fig = figure(0.4 + 2.2 * len(shown), 4.8)
    panels = fig.subplots(2, len(shown), squeeze=False)
    for (label, r), column in zip(shown, panels.T, strict=True):
        for axes, at in zip(column, (0, 1), strict=True):
            _scatter_classes(axes, np.array(r["points"][at]), np.array(r["y"]), r.get("class_names"))
            axes.set_title(f"{label}\n{'global model' if at == 0 else r['models'][at]}", fontsize=8)
            axes.set_axis_off()
    class_legend(fig, _hues_of(shown), shown[0][1].get("class_names"))
    return fig


def on_circle(shown: Shown) -> Any:
    """Plot the angles of two-dimensional features: points on a circle, and densities by class (FedNTD figure 18).

    The global model before, at most three clients, and the global model after. A point's distance from the circle only
    separates it from others.
    """
    usable = [(label, r) for label, r in shown if r["models"]]
    if not usable:
        return "the model must have two features"
    hues = class_colours(1 + max(max(r["y"]) for _, r in usable))
    at = [[0, *range(1, 1 + min(3, len(r["models"]) - 2)), len(r["models"]) - 1] for _, r in usable]
    across = max(map(len, at))
    fig = figure(0.5 + 1.5 * across, 0.8 + 2.9 * len(usable))
    panels = fig.subplots(2 * len(usable), across, squeeze=False, height_ratios=[1.5, 1] * len(usable))
    for row, (label, r) in enumerate(usable):
        y = np.array(r["y"])
        for column, model in enumerate(at[row]):
            circle, density = panels[2 * row : 2 * row + 2, column]
            name = _model_name(r["models"], model)
            circle.set_title(name if column else f"{label}\n{name}", fontsize=8)
            _draw_circle(circle, density, np.array(r["angles"][model]), y, hues)
    for axes in panels[1::2, 0]:
        axes.set_ylabel("density")
    class_legend(fig, hues, usable[0][1].get("class_names"))
    return fig


def _draw_circle(circle: Any, density: Any, angles: np.ndarray, y: np.ndarray, hues: np.ndarray) -> None:
    """Draw the points of one model on a circle, and below it the density of each class over the angle."""
    radius = 1 + 0.08 * np.random.default_rng(0).standard_normal(len(angles))
    circle.scatter(radius * np.cos(angles), radius * np.sin(angles), s=1.5, color=hues[y], linewidths=0)
    circle.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    circle.set_axis_off()
    grid = np.linspace(-np.pi, np.pi, 181)
    for c in np.unique(y):  # a kernel density on the circle, of von Mises' kernel
        kernel = np.exp(25 * (np.cos(grid[:, None] - angles[y == c]) - 1))
        density.plot(grid, kernel.mean(1) / (kernel.mean() * 2 * np.pi), color=hues[c], linewidth=0.9)
    density.set(xlim=(-np.pi, np.pi), xticks=[-np.pi, 0, np.pi], xticklabels=["-π", "0", "π"], ylim=(0, None))
    density.tick_params(length=2, labelsize=7)


def _hues_of(shown: Shown) -> np.ndarray:
    return class_colours(1 + max(max(r["y"]) for _, r in shown))


def _model_name(names: Sequence[str], k: int) -> str:
    return {0: "global before", len(names) - 1: "global after"}.get(k, names[k])


def _marker_size(points: int) -> float:
    """Return the area of a marker: few points are drawn larger, so that a sparse plot can be read."""
    return float(np.clip(2400 / points, 4, 16))


def _scatter_classes(axes: Any, points: np.ndarray, y: np.ndarray, names: Sequence[str] | None) -> None:
    """Draw points in the colour of their class; its name or number is at the point in the middle of the class."""
    from matplotlib.patheffects import withStroke

    hues, size = class_colours(1 + int(y.max())), _marker_size(len(points))
    halo = [withStroke(linewidth=2, foreground="white")]
    for c in np.unique(y):
        at = points[y == c]
        axes.scatter(*at.T, s=size, color=hues[c], linewidths=0)
        middle = at[np.abs(at - np.median(at, axis=0)).sum(1).argmin()]
        style = {"fontsize": 9, "fontweight": "bold", "ha": "center", "va": "center"}
        axes.annotate(names[c] if names else str(c), middle, path_effects=halo, zorder=4, **style)


def _scatter_models(axes: Any, points: np.ndarray, names: Sequence[str]) -> None:
    """Draw every model's points in its own colour; those of the global models are larger and above the others."""
    from matplotlib import colormaps

    middle = colormaps["viridis"](np.linspace(0.05, 0.9, max(1, len(points) - 2)))
    ends = {0: COLOURS[6], len(points) - 1: COLOURS[1]}
    usual = _marker_size(points.shape[0] * points.shape[1])
    for k in range(len(names)):
        colour, size = (ends[k], 1.8 * usual) if k in ends else (middle[k - 1], usual)
        label, above = _model_name(names, k), 3 if k in ends else 2
        axes.scatter(*points[k].T, s=size, color=colour, linewidths=0, label=label, zorder=above)


def class_colours(number: int) -> np.ndarray:
    """Return a colour for each class, [C, 4]."""
    from matplotlib import colormaps

    table = colormaps["tab20" if number > 10 else "tab10"]
    return np.array([table(c % table.N) for c in range(number)])


def class_legend(fig: Any, hues: np.ndarray, names: Sequence[str] | None) -> None:
    """Add the colours of the classes below a figure, if they are few; without names, with their numbers."""
    from matplotlib.patches import Patch

    if len(hues) <= 20:
        handles = [Patch(color=hue, label=names[c] if names else str(c)) for c, hue in enumerate(hues)]
        columns = 5 if names else 10
        fig.legend(handles=handles, loc="outside lower center", ncols=columns, title="class", handlelength=1)
