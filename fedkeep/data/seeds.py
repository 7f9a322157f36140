"""Seeds and random generators: every purpose has its own stream, keyed by seed, round and client."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedkeep.errors import FedkeepError

# numpy's SeedSequence takes [1, 2] and [1, 2, 0] for the same entropy, so every purpose has its own spawn key:
# without it the sampling of a round and the plan of client 0 would be one stream.
SAMPLING, SERVER, ORDER, AUGMENT, NOISE, MODULE, CLIENTS, PUBLIC, TEST, HELD = range(10)


def seed_stream(purpose: int, *key: int) -> np.random.SeedSequence:
    """Return the seed sequence of one purpose for this key."""
    return np.random.SeedSequence(key, spawn_key=(purpose,))


def generator(purpose: int, *key: int) -> np.random.Generator:
    """Return the random generator of one purpose for this key."""
    return np.random.default_rng(seed_stream(purpose, *key))


def sample_cohort(seed: int, round: int, n_clients: int, size: int) -> np.ndarray:
    """Choose who takes part in a round, in increasing order of id."""
    if size == n_clients:
        return np.arange(n_clients)
    return np.sort(generator(SAMPLING, seed, round).choice(n_clients, size, replace=False, shuffle=False))


def server_seed(seed: int, round: int) -> int:
    """Give the seed of whatever the server does at random in a round."""
    return int(seed_stream(SERVER, seed, round).generate_state(1)[0])


def split_rng(seed: int, what: Literal["clients", "public", "test", "held"]) -> np.random.Generator:
    """Give the generator that divides data: into clients, public and private, test and training, used and held back."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise FedkeepError(f"seed must be a whole number of at least 0, not {seed!r}")
    return generator({"clients": CLIENTS, "public": PUBLIC, "test": TEST, "held": HELD}[what], seed)
