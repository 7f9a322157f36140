"""Significance tests of differences that are paired over seeds.

Two groups run with the same seeds share splits, cohorts and initial weights. Their difference on one seed is one
observation, and it is far less noisy than the two results themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_EXACT = 16  # up to this number of differences, all sign patterns are enumerated
MIN_SEEDS = 3  # with fewer differences there is no test


def paired_t(differences: Any) -> float:
    """Return the two-sided p-value of a paired t-test.

    Assumes that the differences are normally distributed. If all of them are equal the test does not exist, and the
    p-value is that of `sign_flip`. NaN for fewer than three differences.

    >>> round(paired_t([1.0, 2.0, 3.0]), 4), paired_t([1.0, 2.0])
    (0.0742, nan)
    """
    d = np.asarray(differences, dtype=float)
    if len(d) < MIN_SEEDS:
        return float("nan")
    if d.std(ddof=1) <= 1e-12 * np.abs(d).max():  # all equal, except for rounding
        return sign_flip(d)
    from scipy.special import stdtr  # Student's distribution; scipy.stats takes three times as long to import

    t = d.mean() / (d.std(ddof=1) / np.sqrt(len(d)))
    return float(2 * stdtr(len(d) - 1, -abs(t)))


def sign_flip(differences: Any, draws: int = 100_000) -> float:
    """Return the two-sided p-value of the sign-flip test: how often random signs give at least as large a sum.

    Assumes that, if there is no difference, d_i and -d_i are equally likely: the differences are symmetric around 0.
    Exact over all 2^n sign patterns for up to 16 differences, otherwise over random ones (the same each time). The
    p-value cannot be below 2 / 2^n, so with fewer than six differences it never reaches 0.05. NaN for fewer than three.

    >>> sign_flip([1.0, 2.0, 3.0]), sign_flip([1.0, -1.0, 0.0])
    (0.25, 1.0)
    """
    d = np.asarray(differences, dtype=float)
    if len(d) < MIN_SEEDS:
        return float("nan")
    reached = abs(d.sum()) - 1e-9 * np.abs(d).sum()  # equal sums may differ by rounding
    if len(d) <= MAX_EXACT:
        signs = 1 - 2 * (np.arange(2 ** len(d))[:, None] >> np.arange(len(d)) & 1)
        return float((np.abs(signs @ d) >= reached).mean())
    from scipy.stats import permutation_test  # slow to import

    def reaches(values: np.ndarray, axis: int) -> np.ndarray:
        return np.asarray(np.abs(values.sum(axis)) >= reached, dtype=float)

    test = permutation_test(
        (d,),
        reaches,
        permutation_type="samples",
        vectorized=True,
        alternative="greater",
        n_resamples=draws,
        random_state=np.random.default_rng(0),
    )
    return float(test.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm, 1979): the chance of any false positive stays below the level.

    The k-th smallest of m is multiplied by m - k + 1, and none is below that of a smaller one; NaN stays, uncounted.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=float)
    out = np.full(len(p), np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    out[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return [float(value) for value in out]
