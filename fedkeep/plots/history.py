"""Plot of one run: `History.plot`."""

from __future__ import annotations

from functools import partial
from io import BytesIO
from typing import Any

from fedkeep._util.text import clip, printable
from fedkeep.plots.style import COLOUR_SCALE, figure, line_style, plot_style
from fedkeep.runs.history import History


def plot_history(history: History) -> Any:
    """Return a figure with the accuracy over rounds, and below it that of each class as a heat map."""
    rounds, classes = history.rounds, history.class_accuracy.T
    with plot_style():
        fig = figure(5.0, 1.9 + max(1.2, min(3.0, 0.16 * len(classes))))
        above, below = fig.subplots(2, 1, sharex=True, height_ratios=[1.4, max(1.2, min(3.0, 0.16 * len(classes)))])
        above.plot(rounds, 100 * history.accuracy, marker="o" if len(rounds) == 1 else None, **line_style(0))
        above.set(ylabel="test accuracy (%)", ylim=(0, 100))
        above.set_title(clip(printable(history.method), 60))
        edges = (rounds[0] - 0.5, rounds[-1] + 0.5, len(classes) - 0.5, -0.5)
        image = below.imshow(
            classes, aspect="auto", cmap=COLOUR_SCALE, vmin=0, vmax=1, extent=edges, interpolation="nearest"
        )
        below.set(xlabel="round", ylabel="" if history.class_names else "class")
        if len(classes) <= 20:
            at = range(0, len(classes), 1 if len(classes) <= 12 else 2)
            names = [history.class_name(c).removeprefix("class ") for c in at]
            below.set_yticks(at, [clip(printable(name), 16) for name in names])
        below.spines[:].set_visible(False)
        below.tick_params(length=2)
        below.xaxis.get_major_locator().set_params(integer=True)
        fig.colorbar(image, ax=below, label="accuracy", pad=0.01, aspect=12)
    fig._repr_png_ = partial(_to_png, fig)  # a notebook shows figures of pyplot only, which keeps global state
    return fig


def _to_png(fig: Any) -> bytes:
    image = BytesIO()
    with plot_style():
        fig.savefig(image, format="png", dpi=110)
    return image.getvalue()
