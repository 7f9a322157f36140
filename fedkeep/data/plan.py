"""Client plans: the order of examples and all random numbers of one client's round, drawn beforehand.

A plan depends only on (seed, round, client), so every engine trains on the same batches. The cohort of a round depends
only on (seed, round), so methods are compared on the same cohorts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fedkeep._util.batches import count_batches, held_positions
from fedkeep.data.augment import Augment
from fedkeep.data.seeds import AUGMENT, DROPOUT, MODULE, NOISE, ORDER, REHEARSAL, STEP_NOISE, generator, seed_stream


@dataclass(frozen=True)
class ClientPlan:
    """One client's round: S steps of at most B examples. In a step, real examples come first, then padding."""

    key: tuple[int, int, int]  # seed, round, client
    n: int  # number of the client's examples
    index: np.ndarray  # [S, B] positions among the client's own examples
    size: np.ndarray  # [S] number of real examples in each step
    augment: dict[str, np.ndarray]  # random parameters of the augmentation, [S, B] each
    per_epoch: int  # steps per epoch
    dropped: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # that epoch 1 leaves out
    held: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # that no epoch has

    @property
    def steps(self) -> int:
        """The number of local steps."""
        return len(self.index)

    @cached_property
    def noise(self) -> np.ndarray:
        """One uniform random number per example, [n], for the hook `select_examples`."""
        return generator(NOISE, *self.key).random(self.n)

    @cached_property
    def noise_seed(self) -> int:
        """The seed of the random numbers of every step, `batch["noise"]`: a whole number of 64 bits, with a sign."""
        return int(seed_stream(STEP_NOISE, *self.key).generate_state(1, np.uint64).view(np.int64)[0])

    @cached_property
    def rehearsal(self) -> np.ndarray:
        """The positions of the examples that each step rehearses, [S, B]: one random order, repeated in every epoch."""
        width = self.index.shape[1]
        order = generator(REHEARSAL, *self.key).permutation(self.n)[: self.per_epoch * width]
        index = np.zeros(self.per_epoch * width, dtype=np.int64)
        index[: len(order)] = order
        return np.resize(index.reshape(self.per_epoch, width), self.index.shape)

    @cached_property
    def seed(self) -> int:
        """The seed for modules that draw random numbers themselves."""
        return int(seed_stream(MODULE, *self.key).generate_state(1)[0])

    @cached_property
    def dropout_keys(self) -> np.ndarray:
        """The key of each step's dropout, [S] int64: with fewer steps, the first ones are the same."""
        words = generator(DROPOUT, *self.key).bit_generator.random_raw(self.steps)
        return np.asarray(words, dtype=np.uint64).view(np.int64)

    @property
    def one_pass(self) -> list[np.ndarray]:
        """The batches of one pass over all of the client's examples: those of the first epoch, and what it dropped.

        Held-out examples are not in it.
        """
        batches = [self.index[s, : self.size[s]] for s in range(self.per_epoch)]
        return [*batches, self.dropped] if len(self.dropped) else batches

    @property
    def refine_batches(self) -> list[np.ndarray]:
        """The batches of one pass for the hook `refine`: over the held-out examples, or without any, over all."""
        width = self.index.shape[1]
        return [self.held[start : start + width] for start in range(0, len(self.held), width)] or self.one_pass

    @property
    def mask(self) -> np.ndarray:
        """Whether each place holds a real example, [S, B]; False is padding."""
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
    drop_last: bool = False,
    hold_out: float = 0.0,
) -> ClientPlan:
    """Return a client's plan: `epochs` passes over its n examples, each in a new order.

    The last batch of an epoch may be smaller than the others; with `drop_last` it is left out, unless it is the only
    one. The share `hold_out` of the examples, evenly spaced, is in no epoch.

    >>> make_plan(seed=0, round=1, client=3, n=5, epochs=2, batch_size=2).size.tolist()
    [2, 2, 1, 2, 2, 1]
    >>> make_plan(seed=0, round=1, client=3, n=5, epochs=2, batch_size=2, drop_last=True).size.tolist()
    [2, 2, 2, 2]
    >>> make_plan(seed=0, round=1, client=3, n=5, epochs=2, batch_size=2, hold_out=0.4).held.tolist()
    [1, 4]
    """
    key = (seed, round, client)
    held = held_positions(n, hold_out)
    trained = np.delete(np.arange(n), held)
    width = min(batch_size, len(trained))
    per_epoch = count_batches(len(trained), width, drop_last)
    used = min(len(trained), per_epoch * width)  # examples of an epoch
    order = generator(ORDER, *key)
    orders = np.stack([trained[order.permutation(len(trained))] for _ in range(epochs)])
    index = np.zeros((epochs, per_epoch * width), dtype=np.int64)
    index[:, :used] = orders[:, :used]
    size = np.full((epochs, per_epoch), width)
    size[:, -1] = used - width * (per_epoch - 1)
    steps = epochs * per_epoch
    return ClientPlan(
        key=key,
        n=n,
        index=index.reshape(steps, width),
        size=size.reshape(steps),
        augment=augment.draw(generator(AUGMENT, *key), steps, width, image) if augment else {},
        per_epoch=per_epoch,
        dropped=orders[0, used:].copy(),
        held=held,
    )
