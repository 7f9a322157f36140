"""Style of the plots: small, readable in print, and readable for the colour-blind and without colour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep._util.optional import require_extra
from fedkeep._util.text import short_name
from fedkeep._util.validate import require_choice
from fedkeep.analysis.groups import Group, Run
from fedkeep.errors import FedkeepError
from fedkeep.runs.files import write_atomic
from fedkeep.runs.history import History

FORMATS = ("pdf", "png", "svg")
# Okabe and Ito's colours without yellow (too light on white); line styles distinguish the lines without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
MAX_BELOW = 6  # lines whose legend is below the axes
COLOUR_SCALE = "cividis"  # dark to light in steps of equal contrast, also for the colour-blind
_SETTINGS = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "pdf.fonttype": 42,  # TrueType: text stays text, as publishers require
    "svg.fonttype": "none",
    "text.parse_math": False,  # a $ in a name is a $
    "text.usetex": False,
    "savefig.dpi": 300,
}


@contextmanager
def plot_style() -> Iterator[None]:
    """Apply the style inside the context; the user's own settings are restored afterwards."""
    matplotlib = require_extra("matplotlib", "plots", "plotting")
    with matplotlib.rc_context(_SETTINGS):
        yield


def figure(width: float, height: float, **kwargs: Any) -> Any:
    """Return a new figure with a size in inches, without pyplot and its global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", **kwargs)


def line_style(k: int) -> dict[str, Any]:
    """Return the colour and the style of the k-th line."""
    return {"color": COLOURS[k % len(COLOURS)], "linestyle": DASHES[k % len(DASHES)]}


def parse_formats(text: str) -> list[str]:
    """Parse "pdf,png" into a list of formats."""
    formats = [item.strip().lower().removeprefix(".") for item in text.split(",") if item.strip()]
    for name in formats:
        require_choice("format", name, FORMATS)
    if not formats:
        raise FedkeepError(
            f"no format to draw in: valid are {', '.join(FORMATS)}", key="format", value=text, valid=FORMATS
        )
    return list(dict.fromkeys(formats))


def make_folder(folder: str | Path) -> Path:
    """Create the folder for the plots if it does not exist, and return it."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedkeepError(
            f"the folder {folder} cannot be created: {error.strerror}", key="output", value=str(folder)
        ) from error
    return folder


def save(fig: Any, folder: Path, name: str, formats: list[str]) -> list[Path]:
    """Write a figure in every format and return the files; the same figure gives the same bytes."""
    paths = [folder / f"{name}.{extension}" for extension in formats]
    for path, extension in zip(paths, formats, strict=True):
        metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(extension)
        image = BytesIO()
        fig.savefig(image, format=extension, metadata=metadata, bbox_inches="tight", pad_inches=0.03)
        write_atomic(path, image.getvalue())
    return paths


def over_rounds(g: Group, measure: Callable[[Run], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounds that all runs of a group evaluated, and the measure there, [runs, rounds, ...]."""
    common = sorted(set.intersection(*(set(run.rounds.tolist()) for run in g.runs)))
    values = [measure(run)[np.isin(run.rounds, common)] for run in g.runs]
    return np.array(common), np.stack(values)


def grid(panels: int) -> tuple[int, int]:
    """Return columns and rows of a grid of panels: two by two rather than three and one, and twice four."""
    across = {2: 2, 4: 2, 7: 4, 8: 4}.get(panels, min(3, panels))
    return across, -(-panels // across)


def set_panel_title(axes: Any, label: str) -> None:
    """Set the title of a panel of a grid, smaller if it is as long as the panel is wide."""
    axes.set_title(label, fontsize=7.5 if len(label) > 24 else None)


def class_labels(history: History, number: int) -> list[str]:
    """Return what the classes are called in a plot: their names, or else their numbers."""
    names = history.class_names
    return [str(c) if names is None else short_name(names[c], 16) for c in range(number)]


def tick_classes(axis: Any, history: History, number: int, most: int = 20) -> None:
    """Label an axis with the classes, unless there are many; names on a horizontal axis are turned."""
    if number > most:
        return
    if history.class_names is None:
        axis.set_ticks(range(0, number, 1 if number <= 12 else 2))
        return
    turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if axis.axis_name == "x" else {}
    axis.set_ticks(range(number), class_labels(history, number), fontsize=7, **turned)


def legend(fig: Any, axes: Any, number: int, columns: int = 2) -> None:
    """Add a legend outside the axes, unless there is only one line: below a few lines, to the right of many.

    For many lines the figure grows, so that the axes keep their size and the legend has room.
    """
    if number < 2:
        return
    handles, labels = axes.get_legend_handles_labels()
    if number <= MAX_BELOW:
        fig.legend(handles, labels, loc="outside lower center", ncols=min(columns, number))
        return
    width, height = fig.get_size_inches()
    longest = max((len(label) for label in labels), default=0)
    fig.set_size_inches(width + 0.5 + 0.065 * longest, max(height, 0.3 + 0.165 * number))
    fig.legend(handles, labels, loc="outside right upper", ncols=1, handlelength=2.5)
