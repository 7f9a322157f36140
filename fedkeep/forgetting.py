"""The instruments: formulas on class accuracies.

`class_accuracy` is [T, C]: one row per evaluated round, the untrained model not among them. A class that the test set
lacks is NaN there and is left out of every mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def class_accuracy(confusion: Any) -> np.ndarray:
    """Turn confusion matrices [..., true, predicted] into class accuracies [..., C]; NaN for absent classes."""
    confusion = np.asarray(confusion, dtype=float)
    total = confusion.sum(-1)
    hits = np.diagonal(confusion, axis1=-2, axis2=-1)
    return np.asarray(np.divide(hits, total, out=np.full(total.shape, np.nan), where=total > 0))


def accuracy(confusion: Any) -> np.ndarray:
    """Turn confusion matrices into the share of all examples that were right."""
    confusion = np.asarray(confusion, dtype=float)
    return np.asarray(np.trace(confusion, axis1=-2, axis2=-1) / confusion.sum((-2, -1)))


def forgetting(class_accuracy: Any) -> float:
    """Average over classes the gap between the best earlier accuracy and the last (FedNTD eq. 5).

    F = 1/C sum_c max_{t < T} (A_c^t - A_c^T). Not clamped: a class at its best in the end counts negatively. NaN with
    fewer than two rows, where nothing can have been forgotten yet.

    >>> round(forgetting([[0.9, 0.2], [0.5, 0.4], [0.6, 0.3]]), 6)
    0.2
    """
    a = _rounds(class_accuracy)
    if len(a) < 2:
        return float("nan")
    return float(_mean(a[:-1].max(0) - a[-1]))


def round_forgetting(class_accuracy: Any) -> np.ndarray:
    """Average over classes what was lost from each round to the next, gains ignored (Flashback section 3), [T-1].

    F_t = -1/C sum_c min(0, A_c^t - A_c^{t-1}).

    >>> round_forgetting([[0.9, 0.2], [0.5, 0.4]]).tolist()
    [0.2]
    """
    a = _rounds(class_accuracy)
    return _mean(-np.minimum(0, np.diff(a, axis=0)))


def forgetting_degree(before: Any, after: Any, xi: float = 1e-3) -> np.ndarray:
    """Say per class which share of the global model's accuracy local training lost (FedKA eq. 1).

    (before - after) / (before + xi): up to 1 for all of it, negative for a gain. Heavy-tailed where the class was
    hardly known before: summarise by the median.

    >>> forgetting_degree([0.8, 0.5], [0.4, 1.0], xi=0).tolist()
    [0.5, -1.0]
    """
    before, after = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    return np.asarray((before - after) / (before + xi))


def in_local(class_accuracy: Any, label_counts: Any) -> np.ndarray:
    """Weigh class accuracies by the client's own label distribution: sum_c p_c A_c (FedNTD eq. 6).

    >>> float(in_local([1.0, 0.5, 0.0], [3, 1, 0]))
    0.875
    """
    return _weighted(class_accuracy, _shares(label_counts))


def out_local(class_accuracy: Any, label_counts: Any) -> np.ndarray:
    """Weigh class accuracies by what the client lacks: sum_c (1 - p_c)/(C - 1) A_c (FedNTD eq. 7).

    >>> float(out_local([1.0, 0.5, 0.0], [2, 2, 0]))
    0.375
    """
    p = _shares(label_counts)
    return _weighted(class_accuracy, (1 - p) / (p.shape[-1] - 1))


def rounds_to(accuracy: Any, target: float, rounds: Any = None) -> int | None:
    """Return the first round whose accuracy reaches the target, or None.

    Rounds count from 1; where not every round was evaluated, `rounds` says which ones these are.

    >>> rounds_to([0.1, 0.5, 0.4], 0.5), rounds_to([0.1], 0.5)
    (2, None)
    """
    accuracy = np.asarray(accuracy, dtype=float)
    reached = np.flatnonzero(accuracy >= target)
    if not len(reached):
        return None
    rounds = np.arange(1, len(accuracy) + 1) if rounds is None else np.asarray(rounds)
    return int(rounds[reached[0]])


def smoothed(accuracy: Any, smoothing: float = 0.6) -> np.ndarray:
    """Return the exponential moving average s_t = smoothing s_{t-1} + (1 - smoothing) a_t, from s_1 = a_1.

    FedNTD's table 1 shows its last value at smoothing 0.6.

    >>> smoothed([0.0, 1.0]).tolist()
    [0.0, 0.4]
    """
    out = np.array(accuracy, dtype=float)
    for t in range(1, len(out)):
        out[t] = smoothing * out[t - 1] + (1 - smoothing) * out[t]
    return out


def _rounds(class_accuracy: Any) -> np.ndarray:
    a = np.asarray(class_accuracy, dtype=float)
    if a.ndim != 2:
        raise ValueError(f"class accuracies are [rounds, classes], not {a.shape}")
    return a[:, ~np.isnan(a).all(0)]


def _mean(per_class: np.ndarray) -> np.ndarray:
    return np.asarray(np.nanmean(per_class, axis=-1))


def _shares(label_counts: Any) -> np.ndarray:
    counts = np.asarray(label_counts, dtype=float)
    with np.errstate(invalid="ignore"):  # no examples, no shares: NaN
        return np.asarray(counts / counts.sum(-1, keepdims=True))


def _weighted(class_accuracy: Any, weight: np.ndarray) -> np.ndarray:
    """Average with weights, over the classes that were tested; NaN where none of them weighs anything."""
    a = np.asarray(class_accuracy, dtype=float)
    weight = np.where(np.isnan(a), 0.0, weight)
    with np.errstate(invalid="ignore"):
        return np.asarray((np.nan_to_num(a) * weight).sum(-1) / weight.sum(-1))
