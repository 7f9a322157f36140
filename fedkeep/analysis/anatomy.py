"""One round taken apart (Flashback, figure 2): the global model before, every client's model, the global model after.

Shapes: C classes, K clients of the round's cohort.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedkeep import forgetting
from fedkeep.runs.history import History, Record


@dataclass(frozen=True)
class Anatomy:
    """The class accuracies of all models of a round, and whose examples made them."""

    round: int
    before: np.ndarray  # [C]
    clients: np.ndarray  # [K, C]
    after: np.ndarray  # [C]
    ids: list[int]  # [K]
    label_counts: np.ndarray  # [K, C]

    @property
    def lost_locally(self) -> np.ndarray:
        """[C] what a client's training lost of what the global model knew, mean over clients, gains ignored."""
        return np.asarray(forgetting.local_forgetting(self.before, self.clients).mean(0))

    @property
    def lost_in_aggregation(self) -> np.ndarray:
        """[C] what the new global model lost of what a client knew, mean over clients, gains ignored."""
        return np.asarray(forgetting.aggregation_forgetting(self.clients, self.after).mean(0))


def anatomies(history: History) -> list[Anatomy]:
    """Take apart every round whose local models were evaluated, and the global model before and after it."""
    evaluated = {r["round"]: r for r in history.records if "confusion" in r}
    rounds = [t for t, r in evaluated.items() if "local" in r and t - 1 in evaluated]
    return [_anatomy(evaluated[t - 1], evaluated[t]) for t in rounds]


def _anatomy(before: Record, record: Record) -> Anatomy:
    local = record["local"]
    total = np.array(local["total"], dtype=float)
    return Anatomy(
        record["round"],
        forgetting.class_accuracy(before["confusion"]),
        np.array(local["hits"]) / np.where(total > 0, total, np.nan),
        forgetting.class_accuracy(record["confusion"]),
        list(record["cohort"]),
        np.array(local["label_counts"]),
    )


def where(rounds: Iterable[Anatomy]) -> dict[str, float] | None:
    """Say how much a round loses in local training and how much in aggregation, mean over rounds and classes."""
    found = list(rounds)
    if not found:
        return None
    return {
        "local": float(np.mean([np.nanmean(a.lost_locally) for a in found])),
        "aggregation": float(np.mean([np.nanmean(a.lost_in_aggregation) for a in found])),
    }
