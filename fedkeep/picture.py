"""The label-by-client picture of a split: on the terminal, and as an SVG file."""

from __future__ import annotations

from html import escape

import numpy as np
from rich.text import Text

from fedkeep.terminal import BLOCKS, COLOURS


def describe(counts: np.ndarray) -> str:
    """Say in words how different the clients are; counts are [clients, classes].

    >>> describe(np.array([[10, 0], [0, 10]])).partition(";")[0]
    '2 clients with 10 to 10 examples (median 10) of 1 to 1 classes (median 1)'
    """
    sizes = counts.sum(1)
    filled = counts[sizes > 0]
    classes = (filled > 0).sum(1)
    whole = counts.sum(0) / counts.sum()
    distance = np.abs(filled / filled.sum(1, keepdims=True) - whole).sum(1) / 2
    return (
        f"{len(counts)} clients with {sizes.min()} to {sizes.max()} examples (median {np.median(sizes):g}) of "
        f"{classes.min()} to {classes.max()} classes (median {np.median(classes):g}); on average {distance.mean():.0%} "
        "of a client's labels would have to change to match the whole"
    )


def on_terminal(counts: np.ndarray, width: int) -> Text:
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
