"""How plots look: small, quiet, readable in print, and told apart by the colour-blind and without colour."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedkeep._util.optional import require_extra
from fedkeep._util.text import did_you_mean
from fedkeep.errors import FedkeepError

FORMATS = ("pdf", "png", "svg")
# Okabe and Ito's colours, yellow left out (too light on white); line styles tell the lines apart without them.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
SCALE = "cividis"  # dark to light in steps of equal contrast, the same to the colour-blind
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
    "pdf.fonttype": 42,  # TrueType: text stays text, as publishers ask for
    "svg.fonttype": "none",
    "savefig.dpi": 300,
}


@contextmanager
def styled() -> Iterator[None]:
    """Apply the style within, and leave the user's own settings as they were."""
    matplotlib = require_extra("matplotlib", "plots", "plotting")
    with matplotlib.rc_context(_SETTINGS):
        yield


def figure(width: float, height: float, **kwargs: Any) -> Any:
    """Make a figure in inches, apart from pyplot and its global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", **kwargs)


def line(k: int) -> dict[str, Any]:
    """Give the k-th line its colour and style."""
    return {"color": COLOURS[k % len(COLOURS)], "linestyle": DASHES[k % len(DASHES)]}


def parse_formats(text: str) -> list[str]:
    """Turn "pdf,png" into known formats."""
    formats = [word.strip().lower().removeprefix(".") for word in text.split(",") if word.strip()]
    for one in formats:
        if one not in FORMATS:
            raise FedkeepError(f"unknown format {one!r}: {did_you_mean(one, FORMATS)}")
    if not formats:
        raise FedkeepError(f"no format to draw in: valid are {', '.join(FORMATS)}")
    return list(dict.fromkeys(formats))


def save(drawn: Any, folder: Path, name: str, formats: list[str]) -> list[Path]:
    """Write a figure in every format; the same figure gives the same bytes."""
    paths = [folder / f"{name}.{one}" for one in formats]
    for path, one in zip(paths, formats, strict=True):
        about = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(one)
        try:
            drawn.savefig(path, format=one, metadata=about, bbox_inches="tight", pad_inches=0.03)
        except OSError as error:
            raise FedkeepError(f"{path} could not be written: {error.strerror}") from error
    return paths
