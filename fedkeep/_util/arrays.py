"""Helpers for numpy arrays."""

from __future__ import annotations

import numpy as np


def evenly_spaced(n: int, most: int) -> np.ndarray:
    """Return at most `most` indices below n, evenly spaced, the first and the last included.

    >>> evenly_spaced(10, 4).tolist(), evenly_spaced(3, 4).tolist()
    ([0, 3, 6, 9], [0, 1, 2])
    """
    return np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(int))
