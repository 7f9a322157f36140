"""Numbers of batches."""

from __future__ import annotations


def count_batches(n: int, batch_size: int, drop_last: bool = False) -> int:
    """Return the number of batches in one pass over n examples; a smaller last one counts unless it is dropped.

    It is not dropped if it is the only one.

    >>> count_batches(5, 2), count_batches(5, 2, drop_last=True), count_batches(1, 2, drop_last=True)
    (3, 2, 1)
    """
    return max(n // batch_size, 1) if drop_last else -(-n // batch_size)
