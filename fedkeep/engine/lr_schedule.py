"""Learning rate schedules: the clients' learning rate in a round, a pure function of the round."""

from __future__ import annotations

import math

from fedkeep._util.validate import require_choice, require_whole
from fedkeep.errors import FedkeepError

SCHEDULES = ("exponential", "cosine")


def check_schedule(schedule: str, warmup: int, rounds: int) -> None:
    """Raise unless there is such a schedule, and a round is left after the warm-up."""
    require_choice("lr_schedule", schedule, SCHEDULES)
    if require_whole("lr_warmup", warmup, 0) >= rounds:
        raise FedkeepError(
            f"lr_warmup = {warmup} rounds, but the run has {rounds}: the warm-up must end before the last round",
            key="lr_warmup",
            value=warmup,
        )


def learning_rate(round: int, rounds: int, lr: float, schedule: str, decay: float, warmup: int) -> float:
    """Return the learning rate of a round; rounds count from 1.

    It rises to `lr` in equal steps over the `warmup` rounds; round warmup + 1 has `lr`. Then it follows the schedule.

    >>> [learning_rate(r, 5, 0.4, "exponential", decay=0.5, warmup=3) for r in range(1, 6)]
    [0.1, 0.2, 0.30000000000000004, 0.4, 0.2]
    >>> [f"{learning_rate(r, 3, 1.0, 'cosine', decay=0.5, warmup=0):.2f}" for r in (1, 2, 3)]
    ['1.00', '0.75', '0.25']
    """
    if round <= warmup:
        return lr * round / (warmup + 1)
    if schedule == "cosine":
        # sin^2 of what is left is (1 + cos) / 2 of what is done, but it is precise, and positive, in the last round.
        left = rounds + 1 - min(round, rounds)  # studies also train after the last round
        return lr * math.sin(math.pi / 2 * left / (rounds - warmup)) ** 2
    try:
        return lr * decay ** (round - warmup - 1)
    except OverflowError:
        return math.inf  # the run diverges
