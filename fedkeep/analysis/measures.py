"""Measures of runs as tables show them: the heading of a column, its scale and its digits."""

from __future__ import annotations

import math
from typing import NamedTuple

from fedkeep._util.text import format_mean


class Shown(NamedTuple):
    """How a measure is shown."""

    head: str
    scale: float = 1
    digits: int = 3


_SHOWN = {
    "final": Shown("final %", 100, 1),
    "best": Shown("best %", 100, 1),
    "smoothed": Shown("smoothed %", 100, 1),
    "forgetting": Shown("forgetting"),
    "round_forgetting": Shown("per round"),
    "accuracy": Shown("accuracy %", 100, 1),
    "balanced_accuracy": Shown("balanced %", 100, 1),
    "macro_precision": Shown("macro precision %", 100, 1),
    "macro_f1": Shown("macro F1 %", 100, 1),
    "precision": Shown("precision %", 100, 1),
    "recall": Shown("recall %", 100, 1),
    "f1": Shown("F1 %", 100, 1),
    "class_auc": Shown("AUC"),
    "auc": Shown("AUC"),
    "ece": Shown("ECE"),
    "bytes": Shown("MB", 1e-6, 1),
    "seconds": Shown("s", 1, 1),
    "examples": Shown("examples", 1, 0),
}


def heading(measure: str) -> str:
    """Return the heading of a measure's column; that of a metric of the user's own is its name."""
    return _SHOWN.get(measure, Shown(measure)).head


def format_measure(measure: str, mean: float, spread: float | None = None, digits: int | None = None) -> str:
    """Return a measure as the cell of a table, by default with the digits that it usually has; "-" for NaN.

    >>> format_measure("final", 0.6, 0.1414), format_measure("auc", 0.75, digits=2), format_measure("ece", math.nan)
    ('60.0±14.1', '0.75', '-')
    """
    if math.isnan(mean):
        return "-"
    shown = _SHOWN.get(measure, Shown(measure))
    return format_mean(mean, spread, shown.digits if digits is None else digits, shown.scale)
