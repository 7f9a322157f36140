"""Is it more than chance? Tests of differences that are paired over seeds.

Two settings run with the same seeds share splits, cohorts and initial weights, so their difference on one seed is one
observation, and far less noisy than the two results themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

EXACT = 16  # up to as many observations, all sign patterns are tried
FEWEST = 3  # with fewer, nothing can be tested


def paired_t(differences: Any) -> float:
    """Return the two-sided p-value of a paired t-test: Student's t of mean(d) / (sd(d) / sqrt(n)) at n - 1 degrees.

    Assumes that the differences are normally distributed. Where all are equal the test does not exist, and the p-value
    is that of `sign_flip`. NaN for fewer than three differences.

    >>> round(paired_t([1.0, 2.0, 3.0]), 4), paired_t([1.0, 2.0])
    (0.0742, nan)
    """
    from scipy.special import stdtr

    d = np.asarray(differences, dtype=float)
    if len(d) < FEWEST:
        return float("nan")
    spread = d.std(ddof=1)
    if spread <= 1e-12 * np.abs(d).max():  # all equal, but for rounding
        return sign_flip(d)
    t = d.mean() / (spread / np.sqrt(len(d)))
    return float(2 * stdtr(len(d) - 1, -abs(t)))


def sign_flip(differences: Any, draws: int = 100_000) -> float:
    """Return the two-sided p-value of the sign-flip test: how often random signs would give as large a sum.

    Were there no difference, each d_i would as well have been -d_i. Assumes nothing more. Exact over all 2^n signs for
    up to 16 differences, else over random ones (the same ones each time). It cannot fall below 2 / 2^n, so with fewer
    than six differences it never reaches 0.05. NaN for fewer than three.

    >>> sign_flip([1.0, 2.0, 3.0]), sign_flip([1.0, -1.0, 0.0])
    (0.25, 1.0)
    """
    d = np.asarray(differences, dtype=float)
    n = len(d)
    if n < FEWEST:
        return float("nan")
    if n <= EXACT:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1, 1], size=(draws, n))
        signs[0] = 1  # what was observed is one of the possibilities
    sums = np.abs(signs @ d)
    return float((sums >= abs(d.sum()) - 1e-9 * np.abs(d).sum()).mean())


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm, 1979): the chance of any false alarm among them stays below the level.

    The k-th smallest of m is multiplied by m - k + 1, and none falls below a smaller one's; NaN stays, uncounted.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=float)
    out = np.full(len(p), np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    out[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return [float(value) for value in out]
