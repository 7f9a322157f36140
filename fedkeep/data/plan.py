"""Plans: all randomness of a run, laid out beforehand and keyed so that no runtime can change it.

What a client does in a round depends on (seed, round, client) alone; who takes part, on (seed, round) alone, so that
methods are compared on the same cohorts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedkeep.data.augment import Augment
from fedkeep.data.seeds import AUGMENT, MODULE, NOISE, ORDER, generator, seed_stream


@dataclass(frozen=True)
class ClientPlan:
    """One client's round. S steps of at most B examples; a step's examples come first, padding after them."""

    key: tuple[int, int, int]  # seed, round, client
    n: int  # examples of the client
    index: np.ndarray  # [S, B] positions among the client's own examples
    size: np.ndarray  # [S] how many of them are real
    augment: dict[str, np.ndarray]  # [S, B] each
    per_epoch: int  # steps of one pass

    @property
    def steps(self) -> int:
        """The number of local steps."""
        return len(self.index)

    @cached_property
    def noise(self) -> np.ndarray:
        """[n], a uniform number per example, for `draw`."""
        return generator(NOISE, *self.key).random(self.n)

    @cached_property
    def seed(self) -> int:
        """For modules that are random themselves (dropout)."""
        return int(seed_stream(MODULE, *self.key).generate_state(1)[0])

    @property
    def mask(self) -> np.ndarray:
        """[S, B], False in padding."""
        return np.arange(self.index.shape[1]) < self.size[:, None]


def make_plan(
    seed: int,
    round: int,
    client: int,
    n: int,
    epochs: int,
    batch_size: int,
    augment: Augment | None = None,
    image: tuple[int, int] = (0, 0),
) -> ClientPlan:
    """Lay out a client's round: `epochs` passes over its n examples, each in a new order, the last batch short.

    >>> plan = make_plan(seed=0, round=1, client=3, n=5, epochs=2, batch_size=2)
    >>> plan.size.tolist()
    [2, 2, 1, 2, 2, 1]
    """
    key = (seed, round, client)
    width = min(batch_size, n)
    per_epoch = -(-n // width)
    order = generator(ORDER, *key)
    index = np.zeros((epochs, per_epoch * width), dtype=np.int64)
    for epoch in range(epochs):
        index[epoch, :n] = order.permutation(n)
    size = np.full((epochs, per_epoch), width)
    size[:, -1] = n - width * (per_epoch - 1)
    steps = epochs * per_epoch
    return ClientPlan(
        key=key,
        n=n,
        index=index.reshape(steps, width),
        size=size.reshape(steps),
        augment=augment.draw(generator(AUGMENT, *key), steps, width, image) if augment else {},
        per_epoch=per_epoch,
    )
