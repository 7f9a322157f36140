"""Recoverable forgetting over the analysed rounds of a run: forgetting before and after the best bias per class.

Each line of `instruments.jsonl` with the study `recoverable` holds the class accuracies of the global model before and
after the bias, on the same examples. From those of several rounds follows how much of the forgetting a bias undoes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkeep import forgetting as fg

STUDY = "recoverable"
PUBLIC, TEST_HALF = "public set", "half of the test set"  # what a bias was fitted on
HALF_KEY = "test_half"  # in the names of values whose bias was fitted on half of the test set
SIDES = ("before", "after")


@dataclass(frozen=True)
class Course:
    """The analysed rounds of a run, before and after the bias: `class_accuracy["after"]` is [T, C]."""

    fitted_on: str
    rounds: np.ndarray  # [T]
    bias: np.ndarray  # [T, C]
    accuracy: dict[str, np.ndarray]  # [T] each
    class_accuracy: dict[str, np.ndarray]  # [T, C] each

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> Course | None:
        """Return the course that lines of instruments record; None if there is none.

        Only rounds whose bias was fitted on the same kind of examples as in the last one count: class accuracies on
        other examples cannot be compared with them.
        """
        found = [(line["after_round"], line[STUDY]) for line in lines if line.get(STUDY, {}).get("fitted_on")]
        if not found:
            return None
        fitted_on = found[-1][1]["fitted_on"]
        found = [(number, result) for number, result in found if result["fitted_on"] == fitted_on]
        results = [result for _, result in found]
        return cls(
            fitted_on,
            np.array([number for number, _ in found]),
            _floats([result["bias"] for result in results]),
            {side: _floats([result["accuracy"][side] for result in results]) for side in SIDES},
            {side: _floats([result[side] for result in results]) for side in SIDES},
        )

    def forgetting(self, side: str) -> float:
        """Return FedNTD's forgetting over the analysed rounds, before or after the bias."""
        return fg.forgetting(self.class_accuracy[side])

    def forgetting_so_far(self, side: str) -> np.ndarray:
        """[T] forgetting up to each analysed round; NaN in the first."""
        a = self.class_accuracy[side]
        return np.array([fg.forgetting(a[: t + 1]) for t in range(len(a))])

    def round_forgetting(self, side: str) -> float:
        """Return the mean round forgetting from one analysed round to the next; NaN if there is only one."""
        lost = fg.round_forgetting(self.class_accuracy[side])
        return float(lost.mean()) if len(lost) else float("nan")

    @property
    def share(self) -> float:
        """The share of the forgetting that the bias undoes; NaN if nothing is forgotten."""
        return fg.recoverable_share(*(self.forgetting(side) for side in SIDES))

    def summary(self) -> dict[str, Any]:
        """Return the numbers of the whole course, as a study's result has them."""
        return {
            "rounds": len(self.rounds),
            "forgetting": {side: self.forgetting(side) for side in SIDES},
            "round_forgetting": {side: self.round_forgetting(side) for side in SIDES},
            "share": self.share,
        }


def _floats(values: Any) -> np.ndarray:
    return np.array(values, dtype=float)  # None, as JSON has it, becomes NaN
