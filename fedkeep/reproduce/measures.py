"""What a table prints of a run: accuracies, forgetting, rounds to a target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedkeep.forgetting import rounds_to, rounds_to_fractions
from fedkeep.runs.history import History

NEVER = math.inf  # rounds to a target that was not reached


@dataclass(frozen=True)
class Measure:
    """One measure: its name in a table's head, which way is better, and how it is taken from a run.

    `take` sees the run, the run of the table's first method (FedAvg) with the same seed, and the column's target
    accuracy; it gives None where something it needs is not there.
    """

    head: str
    higher: bool
    take: Callable[[History, History | None, float | None], float | None]
    digits: int = 2
    of_target: bool = False
    rounds: bool = False  # whole rounds: the median is taken, and `NEVER` may be among them

    @property
    def worst(self) -> float:
        """What a run that diverged counts as."""
        return -math.inf if self.higher else math.inf

    def sum_up(self, values: Sequence[float]) -> float:
        """Make one number of those of several seeds."""
        return statistics.median(values) if self.rounds else statistics.fmean(values)

    def better(self, one: float, other: float) -> float:
        """Say by how much one is better than the other: above 0, below 0, or 0; also where one is `NEVER`."""
        if one == other:
            return 0.0
        return one - other if self.higher else other - one


def _summary(key: str, scale: float) -> Callable[[History, History | None, float | None], float | None]:
    return lambda history, first, target: scale * history.summary()[key]


def _share_of_target(share: float) -> Callable[[History, History | None, float | None], float | None]:
    def take(history: History, first: History | None, target: float | None) -> float | None:
        if target is None:
            return None
        return _or_never(rounds_to_fractions(history.accuracy, target, (share,), history.rounds)[share])

    return take


def _to_first(history: History, first: History | None, target: float | None) -> float | None:
    if first is None:
        return None
    return _or_never(rounds_to(history.accuracy, float(first.accuracy[-1]), history.rounds))


def _or_never(rounds: int | None) -> float:
    return NEVER if rounds is None else float(rounds)


MEASURES = {
    "final": Measure("final %", True, _summary("final", 100)),
    "best": Measure("best %", True, _summary("best", 100)),
    "smoothed": Measure("smoothed %", True, _summary("smoothed", 100)),
    "forgetting": Measure("forgetting", False, _summary("forgetting", 1)),
    "rounds_to_fedavg": Measure("rounds to FedAvg's", False, _to_first, digits=0, rounds=True),
    "rounds_to_50": Measure("rounds to 0.5 A", False, _share_of_target(0.5), 0, True, True),
    "rounds_to_75": Measure("rounds to 0.75 A", False, _share_of_target(0.75), 0, True, True),
    "rounds_to_95": Measure("rounds to 0.95 A", False, _share_of_target(0.95), 0, True, True),
}
