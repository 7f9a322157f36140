"""Quadratic programmes over the simplex."""

from __future__ import annotations

import numpy as np

RIDGE = 1e-15  # of the mean diagonal, added to it: a singular matrix has a solution too


def simplex_minimum(Q: np.ndarray) -> np.ndarray:
    """Return the x that minimises x' Q x over x >= 0, sum x = 1, for a positive semidefinite Q: an active-set method.

    >>> simplex_minimum(np.diag([1.0, 3.0])).round(9).tolist()
    [0.75, 0.25]
    >>> simplex_minimum(np.array([[1.0, 2.0], [2.0, 9.0]])).round(9).tolist()
    [1.0, 0.0]
    """
    Q = (Q + Q.T) / 2
    size = len(Q)
    Q = Q + np.eye(size) * (RIDGE * np.trace(Q) / size + 1e-300)
    x: np.ndarray = np.zeros(size)
    x[np.argmin(np.diag(Q))] = 1.0
    free = x > 0
    for _ in range(50 * size):
        target = _minimum_on(Q, free)
        if (target[free] > 0).all():
            x = target
            slope = Q @ x
            enters = np.where(free, np.inf, slope - x @ slope).argmin() if not free.all() else -1
            if enters < 0 or slope[enters] >= (x @ slope) * (1 - 1e-12):
                return x
            free[enters] = True
        else:  # go as far towards the target as x stays positive, and fix what becomes 0
            shrinks = free & (target <= 0)
            share = np.min(x[shrinks] / (x[shrinks] - target[shrinks]))
            x = np.where(free, x + share * (target - x), 0.0)
            leaves = np.flatnonzero(shrinks)[np.argmin(x[shrinks])]
            x[leaves], free[leaves] = 0.0, False
    return x


def _minimum_on(Q: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Return the minimum with sum x = 1 among vectors that are 0 outside of `free`, of any sign."""
    x = np.zeros(len(Q))
    x[free] = np.linalg.solve(Q[np.ix_(free, free)], np.ones(int(free.sum())))
    x /= x.sum()
    return x
