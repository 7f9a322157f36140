"""The label-by-client picture of a split: on the terminal, and as an SVG file."""

from __future__ import annotations

from html import escape

import numpy as np
from rich.text import Text

from fedkeep.runs.history import History


def label_count_map(counts: np.ndarray, width: int) -> Text:
    """Draw a row per class and a column per client; full blocks are the largest share of one client."""
    shown = counts[: max(1, width - 12)]
    share = shown / np.maximum(counts.sum(1).max(), 1)
    text = Text()
    for c in range(counts.shape[1]):
        text.append(f"class {c:<4} ", style="dim")
        for value in share[:, c]:
            level = int(np.ceil(value * (len(BLOCKS) - 1)))
            text.append(BLOCKS[level], style=COLOURS[level])
        text.append("\n")
    if len(shown) < len(counts):
        text.append(f"(the first {len(shown)} of {len(counts)} clients)\n", style="dim")
    return text


def as_svg(counts: np.ndarray, title: str, most: int = 200) -> str:
    """Draw circles whose area is the number of examples, clients from left to right, classes from top to bottom."""
    shown = counts[:most]
    clients, classes = shown.shape
    step, left, top = 22, 70, 50
    width, height = left + clients * step + 20, top + classes * step + 50
    largest = max(int(shown.max()), 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="24" font-size="14">{escape(title)}</text>',
    ]
    for c in range(classes):
        parts.append(f'<text x="{left - 14}" y="{top + c * step + 15}" text-anchor="end">class {c}</text>')
    for k in range(0, clients, max(1, clients // 20)):
        parts.append(
            f'<text x="{left + k * step + 11}" y="{top + classes * step + 16}" text-anchor="middle">{k}</text>'
        )
    parts.append(f'<text x="{left}" y="{top + classes * step + 36}">client</text>')
    for k, c in zip(*np.nonzero(shown), strict=True):
        n = int(shown[k, c])
        radius = max(1.0, step / 2 * (n / largest) ** 0.5)
        where = f'cx="{left + k * step + 11}" cy="{top + c * step + 11}" r="{radius:.1f}"'
        parts.append(f'<circle {where} fill="#2c718e"><title>client {k}, class {c}: {n} examples</title></circle>')
    return "\n".join([*parts, "</svg>\n"])


BLOCKS = " ▁▂▃▄▅▆▇█"
# Dark to light in steps of equal contrast, told apart by the colour-blind too (after viridis).
COLOURS = ("#440154", "#472c7a", "#3b518b", "#2c718e", "#21908d", "#27ad81", "#5cc863", "#aadc32", "#fde725")


def append_cells(text: Text, accuracies: np.ndarray) -> None:
    """Append a block for every accuracy: the higher and the brighter, the better known."""
    for value in accuracies:
        level = 0 if np.isnan(value) else round(value * (len(BLOCKS) - 1))
        text.append(BLOCKS[level], style=COLOURS[level])


def heat_map(name: str, history: History, width: int = 60) -> Text:
    """Draw class accuracy over rounds: a row per class, a column per round (or every n-th); a drop is forgetting."""
    accuracy, rounds = history.class_accuracy, history.rounds
    every = max(1, -(-len(rounds) // width))
    text = Text(f"{name}: accuracy of each class over rounds {rounds[0]} to {rounds[-1]}\n", style="bold")
    for c, row in enumerate(accuracy[::every].T):
        text.append(f"  class {c:<3} ", style="dim")
        append_cells(text, row)
        text.append("\n")
    return text
