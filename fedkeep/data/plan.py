"""Plans: all randomness of a run, laid out beforehand and keyed so that no runtime can change it.

What a client does in a round depends on (seed, round, client) alone; who takes part, on (seed, round) alone, so that
methods are compared on the same cohorts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from fedkeep.data.augment import Augment
from fedkeep.errors import FedkeepError

# numpy's SeedSequence takes [1, 2] and [1, 2, 0] for the same entropy, so every purpose has its own spawn key:
# without it the sampling of a round and the plan of client 0 would be one stream.
_SAMPLING, _SERVER, _ORDER, _AUGMENT, _NOISE, _MODULE, _CLIENTS, _PUBLIC, _TEST, _HELD = range(10)


def _stream(purpose: int, *key: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(key, spawn_key=(purpose,))


def _rng(purpose: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(_stream(purpose, *key))


@dataclass(frozen=True)
class Plan:
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
        return _rng(_NOISE, *self.key).random(self.n)

    @cached_property
    def seed(self) -> int:
        """For modules that are random themselves (dropout)."""
        return int(_stream(_MODULE, *self.key).generate_state(1)[0])

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
) -> Plan:
    """Lay out a client's round: `epochs` passes over its n examples, each in a new order, the last batch short.

    >>> plan = make_plan(seed=0, round=1, client=3, n=5, epochs=2, batch_size=2)
    >>> plan.size.tolist()
    [2, 2, 1, 2, 2, 1]
    """
    key = (seed, round, client)
    width = min(batch_size, n)
    per_epoch = -(-n // width)
    order = _rng(_ORDER, *key)
    index = np.zeros((epochs, per_epoch * width), dtype=np.int64)
    for epoch in range(epochs):
        index[epoch, :n] = order.permutation(n)
    size = np.full((epochs, per_epoch), width)
    size[:, -1] = n - width * (per_epoch - 1)
    steps = epochs * per_epoch
    return Plan(
        key=key,
        n=n,
        index=index.reshape(steps, width),
        size=size.reshape(steps),
        augment=augment.draw(_rng(_AUGMENT, *key), steps, width, image) if augment else {},
        per_epoch=per_epoch,
    )


def sample_cohort(seed: int, round: int, n_clients: int, size: int) -> np.ndarray:
    """Choose who takes part in a round, in increasing order of id."""
    if size == n_clients:
        return np.arange(n_clients)
    return np.sort(_rng(_SAMPLING, seed, round).choice(n_clients, size, replace=False, shuffle=False))


def server_seed(seed: int, round: int) -> int:
    """Give the seed of whatever the server does at random in a round."""
    return int(_stream(_SERVER, seed, round).generate_state(1)[0])


def split_rng(seed: int, what: Literal["clients", "public", "test", "held"]) -> np.random.Generator:
    """Give the generator that divides data: into clients, public and private, test and training, used and held back."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise FedkeepError(f"seed must be a whole number of at least 0, not {seed!r}")
    return _rng({"clients": _CLIENTS, "public": _PUBLIC, "test": _TEST, "held": _HELD}[what], seed)
