"""Seeds and random generators: each purpose has its own stream, keyed by seed, round and client."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedkeep._util.validate import require_whole

# numpy's SeedSequence treats [1, 2] and [1, 2, 0] as the same entropy. So each purpose has its own spawn key: without
# it, cohort sampling and the plan of client 0 would share one stream.
SAMPLING, SERVER, ORDER, AUGMENT, NOISE, MODULE, CLIENTS, PUBLIC, TEST, HELD, PRIVACY, DROPOUT = range(12)


def seed_stream(purpose: int, *key: int) -> np.random.SeedSequence:
    """Return the seed sequence of one purpose for this key."""
    return np.random.SeedSequence(key, spawn_key=(purpose,))


def generator(purpose: int, *key: int) -> np.random.Generator:
    """Return the random generator of one purpose for this key."""
    return np.random.default_rng(seed_stream(purpose, *key))


def sample_cohort(seed: int, round: int, n_clients: int, size: int) -> np.ndarray:
    """Return the clients of a round, in increasing order."""
    if size == n_clients:
        return np.arange(n_clients)
    return np.sort(generator(SAMPLING, seed, round).choice(n_clients, size, replace=False, shuffle=False))


def server_seed(seed: int, round: int) -> int:
    """Return the seed for everything random that the server does in a round."""
    return int(seed_stream(SERVER, seed, round).generate_state(1)[0])


def split_rng(seed: int, what: Literal["clients", "public", "test", "held"]) -> np.random.Generator:
    """Return the generator for one division of the data.

    `clients`: among clients; `public`: into public set and training data; `test`: into test and training data;
    `held`: into the examples that a client trains on and those it holds out.
    """
    require_whole("seed", seed, low=0, high=2**63 - 1)
    return generator({"clients": CLIENTS, "public": PUBLIC, "test": TEST, "held": HELD}[what], seed)


def share_of_each_class(y: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of a fraction of each class, and those of the rest; always the same ones.

    >>> [len(part) for part in share_of_each_class(np.array([0, 0, 0, 0, 1, 1]), 0.5)]
    [3, 3]
    """
    rng = split_rng(0, "test")
    by_class = [rng.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]
    drawn = np.sort(np.concatenate([members[: round(len(members) * share)] for members in by_class] or [y[:0]]))
    return drawn, np.setdiff1d(np.arange(len(y)), drawn)
