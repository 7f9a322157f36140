"""How a run is doing, while it goes on: accuracy, forgetting, and the classes over the last rounds."""

from __future__ import annotations

from collections import deque

import numpy as np
from rich.text import Text

from fedkeep import forgetting
from fedkeep.history import Record

BLOCKS = " ▁▂▃▄▅▆▇█"
# Dark to light in steps of equal contrast, told apart by the colour-blind too (after viridis).
COLOURS = ("#440154", "#472c7a", "#3b518b", "#2c718e", "#21908d", "#27ad81", "#5cc863", "#aadc32", "#fde725")


class Pulse:
    """The last rounds of one run, kept up to date record by record.

    >>> pulse = Pulse()
    >>> pulse.update({"round": 1, "confusion": [[9, 1], [10, 0]]})
    >>> pulse.update({"round": 2, "confusion": [[3, 7], [2, 8]]})
    >>> pulse.line()
    'round 2: accuracy 0.550, forgetting -0.100'
    """

    def __init__(self, rounds: int = 60) -> None:
        self.round = 0
        self.accuracy = float("nan")
        self.recent: deque[np.ndarray] = deque(maxlen=rounds)  # class accuracies [C] of the last evaluated rounds
        self._best: np.ndarray | None = None  # [C] of the rounds before the last

    def update(self, record: Record) -> None:
        """Take in a round's record."""
        if record["round"] < 1:
            return
        self.round = record["round"]
        if "confusion" not in record:
            return
        if self.recent:
            last = self.recent[-1]
            self._best = last if self._best is None else np.maximum(self._best, last)
        self.accuracy = float(forgetting.accuracy(record["confusion"]))
        self.recent.append(forgetting.class_accuracy(record["confusion"]))

    @property
    def lost(self) -> np.ndarray | None:
        """[C] by how much each class is below its best earlier round; None before the second."""
        return None if self._best is None else self._best - self.recent[-1]

    def line(self) -> str:
        """Say it in words."""
        if not self.recent:
            return f"round {self.round}: not evaluated yet"
        lost = self.lost
        told = "" if lost is None else f", forgetting {np.nanmean(lost):.3f}"
        return f"round {self.round}: accuracy {self.accuracy:.3f}{told}"

    def strip(self, most: int = 10) -> Text:
        """Draw the last rounds, a row per class; of many classes those that have lost most."""
        text = Text()
        if not self.recent:
            return text
        accuracy = np.stack(self.recent)
        for c in self._shown(most):
            text.append(f"  class {c:<4} ", style="dim")
            append_cells(text, accuracy[:, c])
            text.append("\n")
        return text

    def _shown(self, most: int) -> list[int]:
        classes = len(self.recent[-1])
        if classes <= most or self.lost is None:
            return list(range(min(classes, most)))
        worst = np.argsort(-np.nan_to_num(self.lost, nan=-1.0), kind="stable")[:most]
        return sorted(int(c) for c in worst)


def append_cells(text: Text, accuracies: np.ndarray) -> None:
    """Append a block for every accuracy: the higher and the brighter, the better known."""
    for value in accuracies:
        level = 0 if np.isnan(value) else round(value * (len(BLOCKS) - 1))
        text.append(BLOCKS[level], style=COLOURS[level])
