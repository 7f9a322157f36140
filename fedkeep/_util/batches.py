"""Numbers of batches, and examples that are in none of them."""

from __future__ import annotations

import numpy as np


def count_batches(n: int, batch_size: int, drop_last: bool = False) -> int:
    """Return the number of batches in one pass over n examples; a smaller last one counts unless it is dropped.

    It is not dropped if it is the only one.

    >>> count_batches(5, 2), count_batches(5, 2, drop_last=True), count_batches(1, 2, drop_last=True)
    (3, 2, 1)
    """
    return max(n // batch_size, 1) if drop_last else -(-n // batch_size)


def count_held(n: int, share: float) -> int:
    """Return how many of n examples a client holds out: a share of them, rounded down, and never all.

    >>> count_held(10, 0.2), count_held(4, 0.2), count_held(1, 1.0)
    (2, 0, 0)
    """
    return max(0, min(int(n * share + 1e-9), n - 1))


def held_positions(n: int, share: float) -> np.ndarray:
    """Return the positions of the examples that a client with n of them holds out: evenly spaced.

    >>> held_positions(10, 0.2).tolist(), held_positions(4, 0.2).tolist()
    ([4, 9], [])
    """
    count = count_held(n, share)
    return (np.arange(1, count + 1) * n) // max(count, 1) - 1
