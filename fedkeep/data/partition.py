"""Partitions: division of a data set among clients.

Every function depends only on its arguments and its seed, and gives each example to exactly one client. A division
that is impossible raises a PartitionError with the reason.

>>> clients = shards([0, 0, 1, 1, 2, 2, 3, 3], n_clients=2, s=2, seed=0)
>>> len(clients), sorted(map(int, clients[0])) != sorted(map(int, clients[1]))
(2, True)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fedkeep._util.text import format_value, one_line
from fedkeep._util.validate import require_bool, require_number, require_whole
from fedkeep.data.client_indices import Partition
from fedkeep.data.convert import as_ids
from fedkeep.data.dirichlet_draws import MOST_TRIES, draw_counts
from fedkeep.data.federation_file import read_clients
from fedkeep.data.heterogeneity import heterogeneity
from fedkeep.data.seeds import split_rng
from fedkeep.errors import PartitionError

__all__ = [
    "Partition",
    "by_id",
    "dirichlet",
    "from_file",
    "heterogeneity",
    "iid",
    "label_quantity",
    "shards",
    "summarize_label_counts",
]

_MOST = 2**31  # of clients, examples and classes


def iid(y: Any, n_clients: int, seed: int = 0) -> Partition:
    """Divide the shuffled examples evenly."""
    y = _to_labels(y, n_clients)
    n = len(y)
    return Partition(split_rng(seed, "clients").permutation(n), _even_offsets(n, n_clients), labels=y)


def shards(y: Any, n_clients: int, s: int, seed: int = 0) -> Partition:
    """Sort by label, cut into n_clients * s shards of equal size, and give each client s random shards.

    FedNTD appendix B.5, after McMahan et al. Where class sizes are multiples of the shard size, as in CIFAR-10, every
    shard holds one class. Otherwise a shard at the border of two classes holds both.
    """
    y = _to_labels(y, n_clients)
    total = n_clients * require_whole("s", s, low=1, high=_MOST, error=PartitionError)
    if total > len(y):
        raise PartitionError(
            f"{n_clients} clients with s = {s} need {total} shards, but there are only {len(y)} examples",
            key="s",
            value=s,
        )
    rng = split_rng(seed, "clients")
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    bounds = _even_offsets(len(y), total)
    shard_order = rng.permutation(total)
    start, size = bounds[shard_order], np.diff(bounds)[shard_order]
    offsets = np.concatenate([[0], np.cumsum(size)])
    within = np.arange(len(y)) - np.repeat(offsets[:-1], size)
    return Partition(order[np.repeat(start, size) + within], offsets[::s], labels=y)


def dirichlet(
    y: Any,
    n_clients: int,
    alpha: float,
    seed: int = 0,
    min_size: int = 10,
    cap: bool = True,
    tries: int | None = None,
    group: int | None = None,
    even: bool = False,
) -> Partition:
    """Divide each class among the clients in proportions drawn from Dirichlet(alpha).

    A small alpha gives clients few classes and unequal sizes.

    - `min_size`: the draw is repeated until every client has this many examples, as in the papers' code, at most
      `tries` times. By default at most 200,000 times; after 2,000 draws it stops if the smallest clients so far show
      that this would not be enough.
    - `cap`: classes are divided one after the other, and a client that has reached 1 / n_clients of all examples gets
      none of the remaining classes. This follows the papers' code.
    - `group`: examples are first divided evenly among groups of this many clients, and then within each group. FedGKD's
      code uses groups of 10, in which every client gets at least half of an even share.
    - `even`: clients get equal sizes. The clients' examples, each client's sorted by class, are concatenated and cut
      into parts of equal size, so that surplus examples go to the next client. This also follows FedGKD's code.
    """
    require_bool("cap", cap, PartitionError)
    if require_bool("even", even, PartitionError):
        return _with_equal_sizes(dirichlet(y, n_clients, alpha, seed, min_size, cap, tries, group), np.asarray(y))
    y = _to_labels(y, n_clients)
    require_number("alpha", alpha, above=0, high=1e30, error=PartitionError)
    require_whole("min_size", min_size, low=0, high=_MOST, error=PartitionError)
    if tries is not None:
        require_whole("tries", tries, low=1, high=MOST_TRIES, error=PartitionError)
    if min_size * n_clients > len(y):
        raise PartitionError(
            f"min_size = {min_size}: {n_clients} clients cannot have {min_size} examples each, because there are "
            f"{len(y)}",
            key="min_size",
            value=min_size,
        )
    rng = split_rng(seed, "clients")
    if group is not None and require_whole("group", group, low=1, high=_MOST, error=PartitionError) < n_clients:
        if n_clients % group:
            raise PartitionError(
                f"{n_clients} clients cannot be divided into groups of {group}", key="group", value=group
            )
        pieces = np.array_split(rng.permutation(len(y)), n_clients // group)
        seeds = rng.integers(0, 2**63, len(pieces))
        parts = [
            piece[client]
            for piece, s in zip(pieces, seeds, strict=True)
            for client in dirichlet(y[piece], group, alpha, int(s), min_size, cap, tries)
        ]
        return replace(Partition.from_parts(parts), labels=y)
    by_class = [rng.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]
    counts = draw_counts(rng, [len(c) for c in by_class], n_clients, alpha, cap, min_size, tries)
    return _assign(by_class, counts, y)


def label_quantity(y: Any, n_clients: int, k: int, seed: int = 0) -> Partition:
    """Give every client exactly k classes, and divide each class evenly among the clients that have it.

    FedSSD's "#K = k". Classes are assigned like cards from shuffled decks, so the numbers of clients per class differ
    by at most one.
    """
    y = _to_labels(y, n_clients)
    classes = np.unique(y)
    require_whole("k", k, low=1, high=_MOST, error=PartitionError)
    if k > len(classes):
        raise PartitionError(f"k = {k} classes per client, but the data has {len(classes)}", key="k", value=k)
    if n_clients * k < len(classes):
        raise PartitionError(
            f"{n_clients} clients with k = {k} have at most {n_clients * k} of the {len(classes)} classes, but every "
            "example needs a client",
            key="k",
            value=k,
        )
    rng = split_rng(seed, "clients")
    has_class = _assign_classes(rng, len(classes), n_clients, k)  # [classes, clients]
    by_class = [rng.permutation(np.flatnonzero(y == c)) for c in classes]
    counts = np.zeros((len(classes), n_clients), dtype=np.int64)
    for c, members in enumerate(by_class):
        owners = rng.permutation(np.flatnonzero(has_class[c]))
        if len(owners) > len(members):
            raise PartitionError(
                f"k = {k}: class {classes[c]} has {len(members)} examples, too few for the {len(owners)} clients that "
                "should have it",
                key="k",
                value=k,
            )
        counts[c, owners] = np.diff(_even_offsets(len(members), len(owners)))
    return _assign(by_class, counts, y)


def by_id(ids: Any) -> Partition:
    """Make one client for each distinct id, such as a writer or a hospital, in sorted order of the ids."""
    ids = as_ids(ids, error=PartitionError)
    if not len(ids):
        raise PartitionError("ids is empty: at least one id is needed", key="ids", value=[])
    owners, owner = np.unique(ids, return_inverse=True)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner))])
    return Partition(np.argsort(owner, kind="stable"), offsets, owners=owners)


def from_file(y: Any, file: str | os.PathLike[str], overlap: bool = False) -> Partition:
    """Read the split from a federation file, such as `fk.save_federation` and `fedkeep partition --save` write.

    The file is JSON: `{"clients": [[0, 5, 7], [1, 2]]}` are the examples of client 0, of client 1, and so on. Examples
    without a client are not used. `overlap` allows an example to be there more than once.
    """
    if not isinstance(file, str | os.PathLike):
        raise PartitionError(f"file must be a path, not {format_value(file)}", key="file", value=file)
    y = _to_labels(y, 1)
    return replace(read_clients(file, y, require_bool("overlap", overlap, PartitionError)), labels=y)


def summarize_label_counts(counts: np.ndarray) -> str:
    """Return a summary of how much the clients differ; counts are [clients, classes].

    >>> summarize_label_counts(np.array([[10, 0], [0, 20]])).partition(";")[0]
    '2 clients with 10 to 20 examples (median 15) and 1 to 1 classes (median 1)'
    """
    sizes = counts.sum(1)
    nonempty = counts[sizes > 0]
    classes = (nonempty > 0).sum(1)
    changed = heterogeneity(counts)["earth_movers"]
    return (
        f"{len(counts)} clients with {sizes.min()} to {sizes.max()} examples (median {np.median(sizes):g}) and "
        f"{classes.min()} to {classes.max()} classes (median {np.median(classes):g}); on average {changed:.0%} "
        "of a client's labels would have to change to match the label distribution of all clients"
    )


def _to_labels(y: Any, n_clients: int) -> np.ndarray:
    try:
        labels: np.ndarray = np.asarray(y).reshape(-1)
        np.unique(labels)  # they must have an order
    except (ValueError, TypeError, RuntimeError) as error:
        raise PartitionError(f"y must be one class per example: {one_line(error)}", key="y") from error
    if not len(labels):
        raise PartitionError("y is empty: there are no examples to divide", key="y", value=[])
    if require_whole("n_clients", n_clients, low=1, high=_MOST, error=PartitionError) > len(labels):
        raise PartitionError(
            f"n_clients = {n_clients}, but there are {len(labels)} examples: some clients would have none",
            key="n_clients",
            value=n_clients,
        )
    return labels


def _even_offsets(n: int, parts: int) -> np.ndarray:
    """Return [parts + 1] bounds that cut n examples into parts whose sizes differ by at most one."""
    return np.asarray(np.arange(parts + 1) * n // parts)


def _assign_classes(rng: np.random.Generator, n_classes: int, n_clients: int, k: int) -> np.ndarray:
    """Give k different classes to every client, from shuffled decks of all classes, [classes, clients]."""
    has_class = np.zeros((n_classes, n_clients), dtype=bool)
    deck: list[int] = []
    for client in range(n_clients):
        hand: list[int] = []
        while len(hand) < k:
            new = [c for c in deck if c not in hand]
            if not new:
                deck += rng.permutation(n_classes).tolist()
                continue
            hand.append(new[0])
            deck.remove(new[0])
        has_class[hand, client] = True
    return has_class


def _assign(by_class: list[np.ndarray], counts: np.ndarray, y: np.ndarray) -> Partition:
    """Return the partition that assigns each class's examples, in order, by counts [classes, clients]."""
    owner = np.concatenate([np.repeat(np.arange(counts.shape[1]), row) for row in counts])
    indices = np.concatenate(by_class)
    offsets = np.concatenate([[0], np.cumsum(counts.sum(0))])
    return Partition(indices[np.argsort(owner, kind="stable")], offsets, labels=y)


def _with_equal_sizes(clients: Partition, y: np.ndarray[Any, Any]) -> Partition:
    """Concatenate the clients' examples, each client's sorted by class, and cut them into parts of equal size."""
    examples = np.concatenate([own[np.argsort(y[own], kind="stable")] for own in clients])
    return replace(Partition.from_parts(np.array_split(examples, len(clients))), labels=y)


KINDS: dict[str, Callable[..., Partition]] = {
    "iid": iid,
    "shards": shards,
    "dirichlet": dirichlet,
    "label_quantity": label_quantity,
    "by_id": by_id,
    "file": from_file,
}
