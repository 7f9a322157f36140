"""How a history is shown in a notebook: its figures, and the accuracy of each class over rounds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedkeep._util import html

if TYPE_CHECKING:
    from fedkeep.runs.history import History


def history_html(history: History) -> str:
    """Return a history for a notebook: its figures and its heat map, or that no round was evaluated."""
    reached = history.records[-1]["round"] if history.records else 0
    title = f"{history.method}: {reached} rounds"
    if not any(record["round"] and ("confusion" in record or "hits" in record) for record in history.records):
        return html.block(title, html.paragraph("no round has been evaluated yet"))
    pieces = [html.table({name: [value] for name, value in _figures(history).items()}), heat_map_html(history)]
    if history.diverged is not None:
        pieces.insert(0, html.paragraph(f"diverged: {history.diverged}"))
    elif not history.finished:
        pieces.insert(0, html.paragraph(f"unfinished: {reached} of {history.settings['rounds']} rounds"))
    return html.block(title, *pieces)


def heat_map_html(history: History) -> str:
    """Return the accuracy of each class over rounds as a picture: what goes from bright to dark was forgotten."""
    accuracy = history.class_accuracy.T
    names = [history.class_name(c) for c in range(len(accuracy))]
    return html.heat_map(accuracy, names, [str(r) for r in history.rounds], ("class", "round"))


def _figures(history: History) -> dict[str, str]:
    s = history.summary()
    figures = {f"{key} %": f"{100 * s[key]:.1f}" for key in ("final", "best", "smoothed")}
    figures |= {"forgetting": f"{s['forgetting']:.3f}", "per round": f"{s['round_forgetting']:.3f}"}
    figures = {key: text for key, text in figures.items() if text != "nan"}
    if history.epsilon is not None:
        figures["epsilon"] = f"{history.epsilon:.2f}"
    for key, scale, unit in (("bytes", 1e6, "MB"), ("seconds", 1.0, "s")):
        if math.isfinite(s[key]):
            figures[unit] = f"{s[key] / scale:.1f}"
    return figures
