"""The gap between two methods: how much better one is, here and in the paper, and whether the two agree.

A gap is decided in the paper if it exceeds twice the larger printed spread of its two figures (where no spread is
printed, if it is not zero), and here if it has one sign on every seed, of at least two. Two decided gaps agree or
disagree. The tables and the ledger use this rule alike. Of the gaps in a figure, which has no printed numbers, only the
sign is known, and only if the paper's text states it: such a gap is decided in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedkeep.reproduce.measures import Measure
from fedkeep.reproduce.spec import Figure

AGREES, DISAGREES = "agrees", "disagrees"
NOISE_HERE, NOISE_THERE, FEW_SEEDS = "within noise here", "within the paper's noise", "one seed"
UNDECIDED = (NOISE_THERE, NOISE_HERE, FEW_SEEDS)


@dataclass(frozen=True)
class MeasureComparison:
    """One measure of one method: our values by seed, the diverged seeds, and the paper's figure."""

    measure: Measure
    values: Mapping[int, float]
    diverged: frozenset[int] = frozenset()
    paper: Figure | None = None

    @property
    def values_with_diverged(self) -> dict[int, float]:
        """Our values by seed, with the worst possible value for diverged runs."""
        return {**self.values, **dict.fromkeys(self.diverged, self.measure.worst)}

    @property
    def ours(self) -> float | None:
        """Our figure over all seeds, including diverged ones."""
        values = list(self.values_with_diverged.values())
        return self.measure.combine_seeds(values) if values else None

    @property
    def theirs(self) -> float | None:
        """The paper's figure; the worst value for a failed run or a target not reached, None if it prints none."""
        if self.paper is None:
            return None
        return self.measure.worst if self.paper.mean is None else self.paper.mean

    @property
    def difference(self) -> float | None:
        """Ours minus theirs, if both are finite numbers."""
        if self.ours is None or self.theirs is None or not (math.isfinite(self.ours) and math.isfinite(self.theirs)):
            return None
        return self.ours - self.theirs


@dataclass(frozen=True)
class Gap:
    """How much better one method is than another, here and in the paper, and the verdict on it."""

    ours: float | None = None
    theirs: float | None = None
    verdict: str | None = None  # None if the paper does not print both figures

    @property
    def agree(self) -> bool | None:
        """Whether the signs are the same; None if the gap is not decided, here or in the paper."""
        return self.verdict == AGREES if self.verdict in (AGREES, DISAGREES) else None


def gap(one: MeasureComparison, other: MeasureComparison) -> Gap:
    """Return how much better `one` is than `other`, over the seeds that both have."""
    measure, theirs = one.measure, None
    if one.theirs is not None and other.theirs is not None and not one.theirs == other.theirs == measure.worst:
        theirs = measure.improvement(one.theirs, other.theirs)
    ours, by_seed = _ours(one, other)
    if theirs is None:
        return Gap(ours)
    noise = max(2 * _printed_spread(one, other), 1.01 * 10.0**-measure.digits)  # at least the last digit
    return Gap(ours, theirs, _verdict(theirs, noise, by_seed))


def claimed_gap(one: MeasureComparison, other: MeasureComparison) -> Gap:
    """Return how much better `one` is than `other` here, where the paper only says that it is better."""
    ours, by_seed = _ours(one, other)
    return Gap(ours, None, _verdict(math.inf, 0.0, by_seed))


def _ours(one: MeasureComparison, other: MeasureComparison) -> tuple[float | None, list[float]]:
    """Return our gap over the seeds that both have, None if there are none, and by seed."""
    pairs = _paired_values(one, other)
    if not pairs:
        return None, []
    first, second = (one.measure.combine_seeds(values) for values in zip(*pairs, strict=True))
    return one.measure.improvement(first, second), [one.measure.improvement(*pair) for pair in pairs]


def _verdict(theirs: float, noise: float, ours: Sequence[float]) -> str:
    """Return the verdict on a gap, given the paper's with what is noise there, and ours by seed."""
    if abs(theirs) <= noise:
        return NOISE_THERE
    if len(ours) < 2:
        return FEW_SEEDS
    if not (all(one > 0 for one in ours) or all(one < 0 for one in ours)):
        return NOISE_HERE
    return AGREES if ours[0] * theirs > 0 else DISAGREES


def _paired_values(one: MeasureComparison, other: MeasureComparison) -> list[tuple[float, float]]:
    """Return our values of both on every seed that both have, with the worst value for diverged runs."""
    first, second = one.values_with_diverged, other.values_with_diverged
    return [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]


def _printed_spread(one: MeasureComparison, other: MeasureComparison) -> float:
    """Return the larger of the spreads that the paper prints for both; 0 if it prints none."""
    return max((c.paper.spread for c in (one, other) if c.paper and c.paper.spread is not None), default=0.0)
