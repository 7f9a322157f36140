"""Groups of runs with everything measured once: reading class accuracies off long records takes its time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedkeep.analysis.anatomy import Anatomy, anatomies, where
from fedkeep.analysis.groups import Group
from fedkeep.runs.history import History


@dataclass(frozen=True, eq=False)
class Run:
    """One run: `rounds` [T] that were evaluated, `class_accuracy` [T, C], `accuracy` [T], and what sums it up."""

    seed: int
    history: History
    rounds: np.ndarray
    class_accuracy: np.ndarray
    accuracy: np.ndarray
    summary: dict[str, float]
    anatomies: list[Anatomy]

    @property
    def below_best(self) -> np.ndarray:
        """[C] by how much each class ends below its best earlier round (FedNTD eq. 5, by class)."""
        a = self.class_accuracy
        return np.asarray(a[:-1].max(0) - a[-1]) if len(a) > 1 else np.full(a.shape[1], np.nan)


@dataclass(frozen=True, eq=False)
class Measured:
    """Runs that differ in their seeds alone."""

    label: str
    setting: dict[str, Any]
    runs: list[Run]

    @cached_property
    def mean(self) -> dict[str, float]:
        """The mean of every summary over the runs."""
        return {key: float(np.mean([r.summary[key] for r in self.runs])) for key in self.runs[0].summary}

    @cached_property
    def spread(self) -> dict[str, float]:
        """The standard deviation of every summary over the runs; NaN for a single one."""
        if len(self.runs) < 2:
            return {key: float("nan") for key in self.runs[0].summary}
        return {key: float(np.std([r.summary[key] for r in self.runs], ddof=1)) for key in self.runs[0].summary}

    @cached_property
    def class_forgetting(self) -> np.ndarray:
        """[C] by how much each class ends below its best earlier round, mean over runs."""
        return np.asarray(np.mean([r.below_best for r in self.runs], axis=0))

    @cached_property
    def where(self) -> dict[str, float] | None:
        """What a round loses in local training and in aggregation, where that was recorded."""
        return where(a for r in self.runs for a in r.anatomies)


def measure(group: Group) -> Measured:
    """Measure every run of a group, in the order of their seeds."""
    runs = [_run(h) for h in sorted(group.histories, key=lambda h: int(h.about["seed"]))]
    return Measured(group.label, group.setting, runs)


def _run(history: History) -> Run:
    return Run(
        seed=int(history.about["seed"]),
        history=history,
        rounds=history.rounds,
        class_accuracy=history.class_accuracy,
        accuracy=history.accuracy,
        summary=history.summary(),
        anatomies=anatomies(history),
    )
