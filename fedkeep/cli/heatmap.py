"""Heat maps on a terminal: the label counts of a split, and class accuracies over rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from fedkeep._util.text import printable, short_name
from fedkeep.runs.history import History

_LONGEST = 16  # cells of a class name
BLOCKS = " ▁▂▃▄▅▆▇█"
# From dark to light in steps of equal contrast, distinguishable for colour-blind readers too (after viridis).
COLOURS = ("#440154", "#472c7a", "#3b518b", "#2c718e", "#21908d", "#27ad81", "#5cc863", "#aadc32", "#fde725")


def row_labels(n_classes: int, names: Sequence[str] | None, width: int) -> list[str]:
    """Return what stands before the row of each class: its name, or its number, padded to the same width.

    >>> row_labels(2, ["cat", "elephant"], 4), row_labels(2, None, 4)
    (['cat       ', 'elephant  '], ['class 0    ', 'class 1    '])
    """
    if names is None:
        return [f"class {c:<{width}} " for c in range(n_classes)]
    shown = [short_name(name, _LONGEST) for name in names]
    cells = max(map(cell_len, shown)) + 2
    return [set_cell_size(name, cells) for name in shown]


def label_count_margin(n_classes: int, names: Sequence[str] | None) -> int:
    """Return how many columns of a label count map are not clients."""
    return cell_len(row_labels(n_classes, names, 4)[0]) + 1


def label_count_map(counts: np.ndarray, width: int, names: Sequence[str] | None = None) -> Text:
    """Draw a row per class and a column per client; a full block is as many examples as the largest client holds."""
    labels = row_labels(counts.shape[1], names, 4)
    shown = counts[: max(1, width - label_count_margin(counts.shape[1], names))]
    share = shown / np.maximum(counts.sum(1).max(), 1)
    text = Text()
    for c in range(counts.shape[1]):
        text.append(labels[c], style="dim")
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
    labels = row_labels(accuracy.shape[1], history.class_names, 3)
    for label, row in zip(labels, accuracy[::every].T, strict=True):
        text.append(f"  {label}", style="dim")
        append_cells(text, row)
        text.append("\n")
    return text
