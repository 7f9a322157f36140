"""Measures that papers' tables report: accuracies, forgetting, rounds to a target."""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedkeep._util.validate import require_choice
from fedkeep.analysis.anatomy import anatomies, loss_by_phase
from fedkeep.errors import ConfigError
from fedkeep.forgetting import rounds_to, rounds_to_fractions
from fedkeep.instruments.headings import heading_of
from fedkeep.reproduce.recorded import is_recorded, value_of
from fedkeep.runs.history import History

NEVER = math.inf  # rounds to a target that was not reached
FromHistory = Callable[[History, History | None, float | None], float | None]  # run, baseline's run, target -> value


@dataclass(frozen=True)
class Measure:
    """One measure: its column heading, whether higher is better, and how it is computed from a run.

    `from_history` gets the run, the baseline's run (FedAvg) with the same seed, and the column's target accuracy. It
    returns None if something it needs is missing.
    """

    head: str
    higher_is_better: bool
    from_history: FromHistory
    digits: int = 2
    needs_target: bool = False
    counts_rounds: bool = False  # seeds are combined by the median, and a value may be `NEVER`

    @property
    def worst(self) -> float:
        """The value of a run that diverged."""
        return -math.inf if self.higher_is_better else math.inf

    def combine_seeds(self, values: Sequence[float]) -> float:
        """Return one number for the values of several seeds: the median of rounds, else the mean."""
        return statistics.median(values) if self.counts_rounds else statistics.fmean(values)

    def improvement(self, one: float, other: float) -> float:
        """Return by how much `one` is better than `other`; negative if it is worse. Either may be infinite."""
        if one == other:
            return 0.0
        return one - other if self.higher_is_better else other - one


def _from_summary(key: str, scale: float) -> FromHistory:
    return lambda history, baseline, target: scale * history.summary()[key]


def _rounds_to_share_of_target(share: float) -> FromHistory:
    def from_history(history: History, baseline: History | None, target: float | None) -> float | None:
        if target is None:
            return None
        return _or_never(rounds_to_fractions(history.accuracy, target, (share,), history.rounds)[share])

    return from_history


def _rounds_to_baseline(history: History, baseline: History | None, target: float | None) -> float | None:
    if baseline is None:
        return None
    return _or_never(rounds_to(history.accuracy, float(baseline.accuracy[-1]), history.rounds))


def _speed_up(history: History, baseline: History | None, target: float | None) -> float | None:
    """Return how many times fewer rounds a run needs for the baseline's final accuracy than the baseline had."""
    rounds = _rounds_to_baseline(history, baseline, target)
    return None if rounds is None or baseline is None else float(baseline.rounds[-1]) / rounds


def _last_rounds(number: int) -> FromHistory:
    return lambda history, baseline, target: 100 * float(history.accuracy[-number:].mean())


def _at_round(number: int) -> FromHistory:
    def from_history(history: History, baseline: History | None, target: float | None) -> float | None:
        found = history.accuracy[history.rounds == number]
        return 100 * float(found[0]) if len(found) else None

    return from_history


def _lost(phase: str) -> FromHistory:
    """Return what a client's local training, or the aggregation, costs a class on average (Flashback)."""

    def from_history(history: History, baseline: History | None, target: float | None) -> float | None:
        phases = loss_by_phase(anatomies(history))
        return None if phases is None else phases[phase]

    return from_history


def _recorded(name: str, scale: float) -> FromHistory:
    def from_history(history: History, baseline: History | None, target: float | None) -> float | None:
        value = value_of(history, name)
        return None if value is None else scale * value

    return from_history


def _or_never(rounds: int | None) -> float:
    return NEVER if rounds is None else float(rounds)


MEASURES = {
    "final": Measure("final %", True, _from_summary("final", 100)),
    "best": Measure("best %", True, _from_summary("best", 100)),
    "smoothed": Measure("smoothed %", True, _from_summary("smoothed", 100)),
    "forgetting": Measure("forgetting", False, _from_summary("forgetting", 1)),
    "rounds_to_fedavg": Measure("rounds to FedAvg's", False, _rounds_to_baseline, digits=0, counts_rounds=True),
    "rounds_to_50": Measure("rounds to 0.5 A", False, _rounds_to_share_of_target(0.5), 0, True, True),
    "rounds_to_75": Measure("rounds to 0.75 A", False, _rounds_to_share_of_target(0.75), 0, True, True),
    "rounds_to_95": Measure("rounds to 0.95 A", False, _rounds_to_share_of_target(0.95), 0, True, True),
    "round_forgetting": Measure("round forgetting", False, _from_summary("round_forgetting", 1), digits=3),
    "local_forgetting": Measure("local forgetting", False, _lost("local"), digits=3),
    "aggregation_forgetting": Measure("aggregation forgetting", False, _lost("aggregation"), digits=3),
    "last10": Measure("last ten %", True, _last_rounds(10)),
    "speed_up": Measure("speed-up", True, _speed_up, digits=1),
}
_AT_ROUND = re.compile(r"at_([1-9][0-9]{0,5})")


@functools.cache
def get_measure(name: str) -> Measure:
    """Return a measure by its name: one of `MEASURES`, `at_<round>`, or a value that an instrument recorded.

    >>> get_measure("at_50").head, get_measure("gradients.diversity").head
    ('round 50 %', 'gradient diversity')
    """
    if is_recorded(name):
        heading = heading_of(name)
        digits = 2 if heading.unit == "%" else 3
        return Measure(str(heading), heading.higher_is_better, _recorded(name, heading.scale), digits)
    if match := _AT_ROUND.fullmatch(name):
        return Measure(f"round {match[1]} %", True, _at_round(int(match[1])))
    require_choice("measures", name, [*MEASURES, "at_<round>", "<study>.<key>"], what="measure", error=ConfigError)
    return MEASURES[name]
