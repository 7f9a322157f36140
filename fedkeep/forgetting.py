"""Measures of forgetting that need only class accuracies; those that need models or data are in `fedkeep.instruments`.

`class_accuracy` is [T, C]: one row per evaluated round, without the untrained model. A class that the test set lacks is
NaN and is left out of every mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def class_accuracy(confusion: Any) -> np.ndarray:
    """Return the class accuracies [..., C] of confusion matrices [..., true, predicted]; NaN for absent classes."""
    confusion = np.asarray(confusion)  # whole numbers stay whole: a copy as floats would cost more than the sums
    total = confusion.sum(-1)
    hits = np.diagonal(confusion, axis1=-2, axis2=-1)
    return np.asarray(np.divide(hits, total, out=np.full(total.shape, np.nan), where=total > 0))


def accuracy(confusion: Any) -> np.ndarray:
    """Return the share of correctly classified examples of confusion matrices."""
    confusion = np.asarray(confusion)
    return np.asarray(np.trace(confusion, axis1=-2, axis2=-1) / confusion.sum((-2, -1)))


def forgetting(class_accuracy: Any) -> float:
    """Return the mean over classes of the best earlier accuracy minus the last one (FedNTD eq. 5).

    F = 1/C sum_c max_{t < T} (A_c^t - A_c^T). Not clamped: a class that ends at its best counts negatively. NaN with
    fewer than two rows.

    >>> round(forgetting([[0.9, 0.2], [0.5, 0.4], [0.6, 0.3]]), 6)
    0.2
    """
    a = _rounds(class_accuracy)
    if len(a) < 2:
        return float("nan")
    return float(_mean(a[:-1].max(0) - a[-1]))


def round_forgetting(class_accuracy: Any) -> np.ndarray:
    """Return the mean over classes of what each round lost, gains ignored, [T-1] (Flashback section 3).

    F_t = -1/C sum_c min(0, A_c^t - A_c^{t-1}).

    >>> round_forgetting([[0.9, 0.2], [0.5, 0.4]]).tolist()
    [0.2]
    """
    a = _rounds(class_accuracy)
    return _mean(-np.minimum(0, np.diff(a, axis=0)))


def recoverable_share(before: float, after: float) -> float:
    """Return the share of the forgetting that a remedy undoes: (before - after) / before.

    Forgetting before and after must be of the same rounds and examples. NaN if nothing was forgotten before; negative
    if more is forgotten after; above 1 if the classes then end above their best earlier accuracy.

    >>> recoverable_share(0.5, 0.125), recoverable_share(0.0, 0.0)
    (0.75, nan)
    """
    return (before - after) / before if before > 0 else float("nan")


def local_forgetting(before: Any, clients: Any) -> np.ndarray:
    """Return what local training lost, [K, C]: the global model before [C] minus each client after [K, C], drops only.

    F_kc = -min(0, A_c(w_k,t) - A_c(w_{t-1})). Flashback (section 3) gives no formula; this is that of its round
    forgetting. `.mean(0)` shows which classes the cohort forgot, `.mean(1)` which clients forgot.

    >>> local_forgetting([0.5, 0.75], [[1.0, 0.0], [0.25, 0.75]]).tolist()
    [[0.0, 0.75], [0.25, 0.0]]
    """
    before, clients = _one_and_many(before, clients)
    return np.asarray(np.maximum(0.0, before - clients))


def aggregation_forgetting(clients: Any, after: Any) -> np.ndarray:
    """Return what averaging lost, [K, C]: each client after training [K, C] minus the new global model [C], drops only.

    F_kc = -min(0, A_c(w_t) - A_c(w_k,t)). Flashback (section 3), same choice as in `local_forgetting`. `.mean(0)` is
    the loss of the average client, `.max(0)` that of the client that was best in the class.

    >>> aggregation_forgetting([[1.0, 0.0], [0.5, 0.75]], [0.5, 0.25]).tolist()
    [[0.5, 0.0], [0.0, 0.5]]
    """
    after, clients = _one_and_many(after, clients)
    return np.asarray(np.maximum(0.0, clients - after))


def forgetting_degree(before: Any, after: Any, xi: float = 1e-3) -> np.ndarray:
    """Return the share of the global model's accuracy that local training lost, per class (FedKA eq. 1).

    (before - after) / (before + xi): at most 1, negative for a gain. Heavy-tailed for classes of low accuracy before:
    summarise by the median.

    >>> forgetting_degree([0.8, 0.5], [0.4, 1.0], xi=0).tolist()
    [0.5, -1.0]
    """
    before, after = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    return np.asarray((before - after) / (before + xi))


def in_local(class_accuracy: Any, label_counts: Any) -> np.ndarray:
    """Return class accuracies weighted by the client's own label distribution: sum_c p_c A_c (FedNTD eq. 6).

    >>> float(in_local([1.0, 0.5, 0.0], [3, 1, 0]))
    0.875
    """
    return _weighted(class_accuracy, _shares(label_counts))


def out_local(class_accuracy: Any, label_counts: Any) -> np.ndarray:
    """Return class accuracies weighted by what the client lacks: sum_c (1 - p_c)/(C - 1) A_c (FedNTD eq. 7).

    >>> float(out_local([1.0, 0.5, 0.0], [2, 2, 0]))
    0.375
    """
    p = _shares(label_counts)
    return _weighted(class_accuracy, (1 - p) / (p.shape[-1] - 1))


def personalised(class_accuracy: Any, label_counts: Any) -> np.ndarray:
    """Return each client's accuracy on test examples distributed like its own, [K] (FedNTD appendices H and I).

    P_k = sum_c p_kc A_c(w_k), where A [K, C] are the class accuracies of the model that client k would use itself (in
    the paper its own after local training). That is `in_local` of the client's model instead of the global one.

    >>> personalised([[1.0, 0.0], [0.5, 0.5]], [[4, 0], [1, 3]]).tolist()
    [1.0, 0.5]
    """
    a, counts = np.asarray(class_accuracy, dtype=float), np.asarray(label_counts, dtype=float)
    if a.ndim != 2 or a.shape != counts.shape:
        raise ValueError(
            f"class accuracies and label counts are both [clients, classes], not {a.shape}, {counts.shape}"
        )
    return in_local(a, counts)


def consistency(class_accuracy: Any) -> np.ndarray:
    """Return the similarity of the class accuracies of consecutive rounds, [T-1] (FedNTD section 2.1, figure 2b).

    cos(A^t, A^{t-1}) = A^t . A^{t-1} / (|A^t| |A^{t-1}|) of the class-accuracy vectors: 1 if every class keeps its
    share, lower the more they change. NaN for a model without any correct prediction (the paper is silent).

    >>> consistency([[1.0, 0.0], [1.0, 0.0], [0.0, 0.5]]).tolist()
    [1.0, 0.0]
    """
    a = _rounds(class_accuracy)
    lengths = np.sqrt((a**2).sum(-1))
    lengths = lengths[1:] * lengths[:-1]
    return np.asarray(
        np.divide((a[1:] * a[:-1]).sum(-1), lengths, out=np.full(len(lengths), np.nan), where=lengths > 0)
    )


def underlying_distribution(class_accuracy: Any) -> np.ndarray:
    """Return the class accuracies, each row divided by its sum (FedNTD section 5.2, appendix E).

    A_G = a / sum_c a_c: the paper's estimate of the label distribution that the global model was fitted to. (Its text
    divides by the model's test accuracy; only the sum, as in appendix E, gives a distribution.)

    >>> underlying_distribution([0.5, 0.5, 0.25, 0.75]).tolist()
    [0.25, 0.25, 0.125, 0.375]
    """
    a = np.nan_to_num(np.asarray(class_accuracy, dtype=float))
    total = a.sum(-1, keepdims=True)
    return np.asarray(np.divide(a, total, out=np.full(a.shape, np.nan), where=total > 0))


def distribution_distance(class_accuracy: Any, label_counts: Any, order: float = 1) -> np.ndarray:
    """Return |A_G - p_k|: each client's labels against what the global model knows, [K] (FedNTD figure 8).

    The L1 norm, as in the paper's notation (table 3), between 0 and 2; `order=2` gives the Euclidean norm.
    `instruments.weight_divergence` is the other axis.

    >>> distribution_distance([0.5, 0.5], [[3, 3], [6, 0]]).tolist()
    [0.0, 1.0]
    """
    differences = underlying_distribution(class_accuracy) - _shares(label_counts)
    return np.asarray(np.linalg.norm(differences, ord=order, axis=-1))


def rounds_to(accuracy: Any, target: float, rounds: Any = None) -> int | None:
    """Return the first round whose accuracy reaches the target, or None.

    Rounds count from 1; if not every round was evaluated, `rounds` lists the evaluated ones.

    >>> rounds_to([0.1, 0.5, 0.4], 0.5), rounds_to([0.1], 0.5)
    (2, None)
    """
    accuracy = np.asarray(accuracy, dtype=float)
    reached = np.flatnonzero(accuracy >= target)
    if not len(reached):
        return None
    rounds = np.arange(1, len(accuracy) + 1) if rounds is None else np.asarray(rounds)
    return int(rounds[reached[0]])


def rounds_to_fractions(
    accuracy: Any, target: float, fractions: Sequence[float] = (0.5, 0.75, 0.95), rounds: Any = None
) -> dict[float, int | None]:
    """Return the rounds needed to reach fractions of a target accuracy: A_x = A x (Flashback table 1).

    >>> rounds_to_fractions([0.2, 0.5, 0.7], 0.8)
    {0.5: 2, 0.75: 3, 0.95: None}
    """
    # 0.75 * 0.8 is 0.6000000000000001: reaching 0.6 is enough
    return {x: rounds_to(accuracy, x * target * (1 - 1e-12), rounds) for x in fractions}


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


def _one_and_many(one: Any, many: Any) -> tuple[np.ndarray, np.ndarray]:
    one, many = np.asarray(one, dtype=float), np.asarray(many, dtype=float)
    if one.ndim != 1 or many.ndim != 2 or many.shape[1] != len(one):
        raise ValueError(
            f"the global model is [classes], clients are [clients, classes], not {one.shape}, {many.shape}"
        )
    return one, many


def _mean(per_class: np.ndarray) -> np.ndarray:
    return np.asarray(np.nanmean(per_class, axis=-1))


def _shares(label_counts: Any) -> np.ndarray:
    counts = np.asarray(label_counts, dtype=float)
    with np.errstate(invalid="ignore"):  # no examples, no shares: NaN
        return np.asarray(counts / counts.sum(-1, keepdims=True))


def _weighted(class_accuracy: Any, weight: np.ndarray) -> np.ndarray:
    """Return the weighted mean over the tested classes; NaN if their weights are all 0."""
    a = np.asarray(class_accuracy, dtype=float)
    weight = np.where(np.isnan(a), 0.0, weight)
    with np.errstate(invalid="ignore"):
        return np.asarray((np.nan_to_num(a) * weight).sum(-1) / weight.sum(-1))
