"""Heterogeneity of a split: how far the clients' label distributions are from that of all clients."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedkeep.errors import PartitionError


def heterogeneity(counts: Any) -> dict[str, float]:
    """Return how much the labels of clients differ, as means over the clients; counts are [clients, classes].

    With p the label distribution of a client and q that of all clients together:

    - `jensen_shannon`: the Jensen-Shannon distance of p and q, the square root of the divergence in bits, 0 to 1
    - `hellinger`: the Hellinger distance of p and q, 0 to 1
    - `earth_movers`: the earth mover's distance of p and q where any two classes have the distance 1, 0 to 1: the share
      of a client's labels that would have to change
    - `effective_classes`: exp(entropy of p), the number of equally frequent classes with the same entropy

    Clients without examples are left out.

    >>> {name: round(value, 3) for name, value in heterogeneity([[10, 0], [5, 5]]).items()}
    {'jensen_shannon': 0.296, 'hellinger': 0.275, 'earth_movers': 0.25, 'effective_classes': 1.5}
    """
    table = _require_counts(counts)
    q = table.sum(0) / table.sum()
    p = table / table.sum(1, keepdims=True)
    middle = (p + q) / 2
    divergence = _entropy(middle) - (_entropy(p) + _entropy(q)) / 2
    measures = {
        "jensen_shannon": np.sqrt(np.maximum(divergence, 0) / np.log(2)),  # rounding may leave less than 0
        "hellinger": np.sqrt(np.maximum(1 - np.sqrt(p * q).sum(1), 0)),
        "earth_movers": np.abs(p - q).sum(1) / 2,
        "effective_classes": np.exp(_entropy(p)),
    }
    return {name: float(values.mean()) for name, values in measures.items()}


def format_heterogeneity(measures: dict[str, float]) -> str:
    """Return the measures of `heterogeneity` as a line of text."""
    return (
        f"client vs. all clients, mean: Jensen-Shannon distance {measures['jensen_shannon']:.3f}, Hellinger distance "
        f"{measures['hellinger']:.3f}, earth mover's distance {measures['earth_movers']:.3f}; "
        f"{measures['effective_classes']:.1f} effective classes per client"
    )


def _require_counts(counts: Any) -> np.ndarray:
    """Return the counts of the clients that have examples; raise unless they are [clients, classes], some above 0."""
    try:
        table = np.asarray(counts, np.float64)
    except (ValueError, TypeError):
        table = np.empty(0)
    if table.ndim != 2 or not (table >= 0).all() or not 0 < table.sum() < np.inf:
        raise PartitionError(
            "counts must be the numbers of examples, [clients, classes]: at least 0, and some above 0", key="counts"
        )
    return np.asarray(table[table.sum(1) > 0])


def _entropy(p: np.ndarray) -> np.ndarray:
    """Return the entropy of distributions in nats, along the last axis."""
    return np.asarray(-(p * np.log(np.where(p > 0, p, 1))).sum(-1))
