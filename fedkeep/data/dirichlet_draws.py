"""Draws of a Dirichlet split: how many examples of each class every client gets, repeated until all have enough."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedkeep.errors import PartitionError

MOST_TRIES = 200_000  # FedNTD's 100 clients with alpha = 0.05 need about 20,000 draws of CIFAR-10
_FIRST_TRIES = 2000  # draws after which it is estimated whether more could help
_CELLS_AT_ONCE = 2**18  # numbers that are drawn at a time


def draw_counts(
    rng: np.random.Generator,
    class_sizes: list[int],
    n_clients: int,
    alpha: float,
    cap: bool,
    min_size: int,
    tries: int | None = None,
) -> np.ndarray:
    """Return the first draw in which every client has `min_size` examples, [classes, clients].

    Without `tries`, at most 200,000 draws are made, and only about 2,000 if these show that more would not be enough.
    """
    at_once = max(1, _CELLS_AT_ONCE // (len(class_sizes) * n_clients))
    smallest: list[int] = []  # of each draw
    for number in _chunks(tries or MOST_TRIES, at_once):
        counts = draw(rng, class_sizes, n_clients, alpha, cap, number)
        sizes = counts.sum(1).min(1)
        if (sizes >= min_size).any():
            first: np.ndarray = counts[int((sizes >= min_size).argmax())]
            return first
        smallest += sizes.tolist()
        is_first_estimate = len(smallest) - number < _FIRST_TRIES <= len(smallest)
        if tries is None and is_first_estimate and _reach(smallest) < min_size:
            break
    raise PartitionError(
        f"min_size = {min_size} was not reached in {len(smallest)} draws for {n_clients} clients with alpha = {alpha}: "
        f"the smallest client had at most {max(smallest)} examples; lower min_size, raise alpha, or use fewer clients",
        key="min_size",
        value=min_size,
    )


def draw(
    rng: np.random.Generator, class_sizes: list[int], n_clients: int, alpha: float, cap: bool, number: int
) -> np.ndarray:
    """Return so many draws, [draws, classes, clients]; they do not depend on how many are made at a time."""
    even = sum(class_sizes) / n_clients
    shares = rng.dirichlet(np.full(n_clients, alpha), size=(number, len(class_sizes)))
    counts = np.zeros(shares.shape, dtype=np.int64)
    held = np.zeros((number, n_clients), dtype=np.int64)
    for c, size in enumerate(class_sizes):
        share = shares[:, c]
        if cap:
            has_room = held < even
            share = share * has_room
            only_full = ~(share.sum(1) > 0)  # only clients that are full were drawn
            share[only_full] = has_room[only_full]
        bounds = np.floor(np.cumsum(share / share.sum(1, keepdims=True), 1) * size + 1e-9).astype(np.int64)
        bounds[:, -1] = size
        counts[:, c] = np.diff(bounds, axis=1, prepend=0)
        held += counts[:, c]
    return counts


def _chunks(total: int, most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... up to `most` again and again, `total` in all: the first draw is often enough."""
    number, done = 1, 0
    while done < total:
        number = min(number, total - done)
        yield number
        done, number = done + number, min(2 * number, most)


def _reach(smallest: list[int]) -> int:
    """Return the most that the smallest client could have after 100 times as many draws, estimated generously.

    The best of all draws exceeds the best of a tenth of them, and that the best of a hundredth. The larger of these two
    differences, at least 2, is what ten times as many draws add. A hundred times as many add it twice. The result is
    doubled, because it is random.
    """
    ordered = sorted(smallest, reverse=True)
    best, of_tenth, of_hundredth = ordered[0], ordered[len(ordered) // 100], ordered[len(ordered) // 10]
    return best + 2 * 2 * max(best - of_tenth, of_tenth - of_hundredth, 2)
