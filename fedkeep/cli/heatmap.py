"""Heat maps on a terminal: the label counts of a split, and class accuracies over rounds."""

from __future__ import annotations

import numpy as np
from rich.text import Text

from fedkeep._util.text import printable
from fedkeep.runs.history import History

MARGIN = 12  # columns of a label count map that are not clients
BLOCKS = " ▁▂▃▄▅▆▇█"
# From dark to light in steps of equal contrast, distinguishable for colour-blind readers too (after viridis).
COLOURS = ("#440154", "#472c7a", "#3b518b", "#2c718e", "#21908d", "#27ad81", "#5cc863", "#aadc32", "#fde725")


def label_count_map(counts: np.ndarray, width: int) -> Text:
    """Draw a row per class and a column per client; a full block is as many examples as the largest client holds."""
    shown = counts[: max(1, width - MARGIN)]
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


def append_cells(text: Text, accuracies: np.ndarray) -> None:
    """Append one block per accuracy; higher and brighter means more accurate."""
    for value in accuracies:
        level = 0 if np.isnan(value) else round(value * (len(BLOCKS) - 1))
        text.append(BLOCKS[level], style=COLOURS[level])


def heat_map(name: str, history: History, width: int = 60) -> Text:
    """Draw class accuracies: a row per class, a column per round (or every n-th round); a drop is forgetting."""
    accuracy, rounds = history.class_accuracy, history.rounds
    every = max(1, -(-len(rounds) // width))
    text = Text(f"{printable(name)}: accuracy of each class over rounds {rounds[0]} to {rounds[-1]}\n", style="bold")
    for c, row in enumerate(accuracy[::every].T):
        text.append(f"  class {c:<3} ", style="dim")
        append_cells(text, row)
        text.append("\n")
    return text
