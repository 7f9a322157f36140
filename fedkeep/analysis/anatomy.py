"""Anatomy of a round (Flashback, figure 2): the global model before, every client's model, the global model after.

Shapes: C classes, K clients of the round's cohort.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedkeep.runs.history import History


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The class accuracies of all models of one round, the losses of each step, and the clients' label counts."""

    round: int
    ids: np.ndarray  # [K]
    label_counts: np.ndarray  # [K, C]
    before: np.ndarray  # [C]
    clients: np.ndarray  # [K, C]
    after: np.ndarray  # [C]
    local_forgetting: np.ndarray  # [K, C]
    aggregation_forgetting: np.ndarray  # [K, C]
    round_forgetting: np.ndarray  # [C]

    @property
    def lost_locally(self) -> np.ndarray:
        """[C] accuracy lost in local training, mean over clients, gains ignored."""
        return np.asarray(self.local_forgetting.mean(0))

    @property
    def lost_in_aggregation(self) -> np.ndarray:
        """[C] accuracy lost from a client's model to the new global model, mean over clients, gains ignored."""
        return np.asarray(self.aggregation_forgetting.mean(0))


def anatomy_of(history: History, number: int) -> Anatomy:
    """Return the anatomy of one round."""
    return Anatomy(number, **history.anatomy(number))


def anatomies(history: History) -> list[Anatomy]:
    """Return the anatomy of every round with evaluated local models and an evaluated global model before and after."""
    return [anatomy_of(history, number) for number in history.anatomy_rounds]


def trained_before(rounds: Iterable[Anatomy]) -> list[Anatomy]:
    """Return the rounds that start from a trained model: without round 1, unless there is no other.

    What the untrained model gets right is chance, and its loss is no forgetting.
    """
    whole = list(rounds)
    return [a for a in whole if a.round > 1] or whole


def loss_by_class(rounds: Iterable[Anatomy]) -> tuple[np.ndarray, np.ndarray]:
    """Return the accuracy lost in local training and in aggregation, each [C], mean over clients and rounds.

    Round 1 is left out, as in `trained_before`.
    """
    later = trained_before(rounds)
    local, aggregation = [a.lost_locally for a in later], [a.lost_in_aggregation for a in later]
    return np.mean(local, axis=0), np.mean(aggregation, axis=0)


def loss_by_phase(rounds: Iterable[Anatomy]) -> dict[str, float] | None:
    """Return the accuracy lost in `local` training and in `aggregation`, mean over clients, classes and rounds.

    Round 1 is left out, as in `trained_before`. None without rounds.
    """
    anatomies = trained_before(rounds)
    if not anatomies:
        return None
    return {
        "local": float(np.mean([np.nanmean(a.lost_locally) for a in anatomies])),
        "aggregation": float(np.mean([np.nanmean(a.lost_in_aggregation) for a in anatomies])),
    }
