"""Who gets what: divisions of a data set among clients.

Every function is deterministic in its seed, gives each example to exactly one client, and refuses at once, with the
reason, what cannot be done.

>>> clients = shards([0, 0, 1, 1, 2, 2, 3, 3], n_clients=2, s=2, seed=0)
>>> len(clients), sorted(map(int, clients[0])) != sorted(map(int, clients[1]))
(2, True)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkeep.data.seeds import split_rng
from fedkeep.errors import PartitionError


@dataclass(frozen=True)
class Partition:
    """Client k's examples are `indices[offsets[k]:offsets[k + 1]]`: two arrays, however many clients.

    Indices are kept in 32 bits where they fit: with a million clients that is most of what a partition weighs.
    """

    indices: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        if self.indices.dtype == np.int64 and len(self.indices) < 2**31 and self.indices.max(initial=0) < 2**31:
            object.__setattr__(self, "indices", self.indices.astype(np.int32))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, k: int) -> np.ndarray:
        if not 0 <= k < len(self):
            raise IndexError(f"client {k} of {len(self)}")
        return self.indices[self.offsets[k] : self.offsets[k + 1]].astype(np.int64)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[k] for k in range(len(self)))

    @property
    def sizes(self) -> np.ndarray:
        """[N] examples of each client."""
        return np.diff(self.offsets)

    def label_counts(self, y: Any, n_classes: int | None = None) -> np.ndarray:
        """[N, C] examples of each client and class."""
        y = np.asarray(y)
        seen = int(y.max()) + 1
        n_classes = n_classes or seen
        if seen > n_classes:
            raise PartitionError(f"there is a label {seen - 1}, but n_classes = {n_classes}")
        owner = np.repeat(np.arange(len(self)), self.sizes)
        flat = np.bincount(owner * n_classes + y[self.indices], minlength=len(self) * n_classes)
        return flat.reshape(len(self), n_classes)

    def hold_out(self, share: float, seed: int = 0) -> Partition:
        """Take a share of every client's examples away, drawn at random: what a client keeps to validate with.

        A client keeps at least one example to train on. Flashback's clients train on 90% of theirs.
        """
        if isinstance(share, bool) or not isinstance(share, int | float | np.number) or not 0 <= share < 1:
            raise PartitionError(f"the share of its examples that a client holds back is in [0, 1), not {share!r}")
        keep = np.maximum(self.sizes - np.floor(share * self.sizes + 1e-9).astype(np.int64), np.minimum(self.sizes, 1))
        order = split_rng(seed, "held").random(len(self.indices))
        owner = np.repeat(np.arange(len(self)), self.sizes)
        drawn = np.lexsort([order, owner])  # each client's places, shuffled
        place = np.arange(len(drawn)) - np.repeat(self.offsets[:-1], self.sizes)
        kept = np.sort(drawn[place < np.repeat(keep, self.sizes)])
        return Partition(self.indices[kept], np.concatenate([[0], np.cumsum(keep)]))

    @classmethod
    def of(cls, clients: Partition | Iterable[Any], n: int) -> Partition:
        """Take a partition or any iterable of index arrays, and check it against n examples."""
        if isinstance(clients, Partition):
            part = clients
        else:
            if isinstance(clients, Mapping):
                clients = clients.values()
            if not isinstance(clients, Iterable):
                raise PartitionError(f"clients are given as one index array each, not as {clients!r}")
            parts = [_indices(k, c) for k, c in enumerate(clients)]
            if not parts:
                raise PartitionError("there are no clients")
            part = _join([p.astype(np.int64) for p in parts])
        if len(part.indices) and not (part.indices.min() >= 0 and part.indices.max() < n):
            bad = part.indices.max() if part.indices.max() >= n else part.indices.min()
            raise PartitionError(f"a client holds example {bad}, but the training data has examples 0 to {n - 1}")
        if not len(part.indices):
            raise PartitionError("no client holds any example")
        return part


def iid(y: Any, n_clients: int, seed: int = 0) -> Partition:
    """Deal the shuffled examples out evenly."""
    n = len(_labels(y, n_clients))
    return Partition(split_rng(seed, "clients").permutation(n), _even_offsets(n, n_clients))


def shards(y: Any, n_clients: int, s: int, seed: int = 0) -> Partition:
    """Sort by label, cut into n_clients * s shards of the same size, deal each client s of them at random.

    FedNTD appendix B.5, after McMahan et al. A shard holds one class where the classes' sizes are multiples of the
    shard size, as in CIFAR-10; elsewhere the shard at a border of two classes holds both.
    """
    y = _labels(y, n_clients)
    total = n_clients * _at_least_one("s", s)
    if total > len(y):
        raise PartitionError(
            f"{n_clients} clients with s = {s} need {total} shards, but there are only {len(y)} examples"
        )
    rng = split_rng(seed, "clients")
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    bounds = _even_offsets(len(y), total)
    dealt = rng.permutation(total)
    start, size = bounds[dealt], np.diff(bounds)[dealt]
    offsets = np.concatenate([[0], np.cumsum(size)])
    within = np.arange(len(y)) - np.repeat(offsets[:-1], size)
    return Partition(order[np.repeat(start, size) + within], offsets[::s])


def dirichlet(
    y: Any,
    n_clients: int,
    alpha: float,
    seed: int = 0,
    min_size: int = 10,
    cap: bool = True,
    tries: int = 1000,
    group: int | None = None,
    even: bool = False,
) -> Partition:
    """Share out each class among the clients in proportions drawn from Dirichlet(alpha).

    Small alpha: few classes and unequal sizes. As in the papers' code, a client that has its even share gets no more
    of the classes still to come (`cap`), and the draw is repeated until every client has `min_size` examples, at most
    `tries` times. With `group`, examples are first dealt out evenly to groups of so many clients, and each group
    shares out its own (10 in FedGKD's code, where every client has half the even share or more). With `even`, what
    the clients drew is then laid end to end, each client's by class, and cut into parts of the same size: what is over
    even goes to the neighbour (FedGKD's code again).
    """
    if even:
        return _evened(dirichlet(y, n_clients, alpha, seed, min_size, cap, tries, group), np.asarray(y))
    y = _labels(y, n_clients)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float | np.number) or not 0 < alpha < np.inf:
        raise PartitionError(f"alpha must be a number above 0, not {alpha!r}")
    if isinstance(min_size, bool) or not isinstance(min_size, int | np.integer):
        raise PartitionError(f"min_size must be a whole number, not {min_size!r}")
    if min_size * n_clients > len(y):
        raise PartitionError(
            f"{n_clients} clients cannot have {min_size} examples each: there are {len(y)} (see min_size)"
        )
    rng = split_rng(seed, "clients")
    if group is not None and _at_least_one("group", group) < n_clients:
        if n_clients % group:
            raise PartitionError(f"{n_clients} clients cannot be put into groups of {group}")
        pieces = np.array_split(rng.permutation(len(y)), n_clients // group)
        seeds = rng.integers(0, 2**63, len(pieces))
        return _join(
            [
                piece[client]
                for piece, s in zip(pieces, seeds, strict=True)
                for client in dirichlet(y[piece], group, alpha, int(s), min_size, cap, tries)
            ]
        )
    by_class = [rng.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]
    best = 0
    for _ in range(tries):
        counts = _dirichlet_counts(rng, [len(c) for c in by_class], n_clients, alpha, cap)
        smallest = int(counts.sum(0).min())
        if smallest >= min_size:
            return _deal(by_class, counts)
        best = max(best, smallest)
    raise PartitionError(
        f"min_size = {min_size} was not reached in {tries} draws for {n_clients} clients with alpha = {alpha}: the "
        f"smallest client never had more than {best} examples; lower min_size, raise alpha, or take fewer clients"
    )


def label_quantity(y: Any, n_clients: int, k: int, seed: int = 0) -> Partition:
    """Give every client exactly k classes, and share out each class evenly among those who have it.

    FedSSD's "#K = k". Classes are dealt like cards from shuffled decks, so each is held by about as many clients.
    """
    y = _labels(y, n_clients)
    classes = np.unique(y)
    _at_least_one("k", k)
    if k > len(classes):
        raise PartitionError(f"k = {k} classes a client, but the data has {len(classes)}")
    if n_clients * k < len(classes):
        raise PartitionError(
            f"{n_clients} clients with k = {k} hold at most {n_clients * k} of the {len(classes)} classes, and every "
            "example needs a client"
        )
    rng = split_rng(seed, "clients")
    holds = _deal_classes(rng, len(classes), n_clients, k)  # [classes, clients]
    by_class = [rng.permutation(np.flatnonzero(y == c)) for c in classes]
    counts = np.zeros((len(classes), n_clients), dtype=np.int64)
    for c, members in enumerate(by_class):
        holders = rng.permutation(np.flatnonzero(holds[c]))
        if len(holders) > len(members):
            raise PartitionError(
                f"class {classes[c]} has {len(members)} examples for the {len(holders)} clients that should hold it"
            )
        counts[c, holders] = np.diff(_even_offsets(len(members), len(holders)))
    return _deal(by_class, counts)


def by_id(ids: Any) -> Partition:
    """Make one client of each distinct id (a writer, a hospital), in sorted order of the ids."""
    ids = np.asarray(ids).reshape(-1)
    if not len(ids):
        raise PartitionError("there are no ids")
    _, owner = np.unique(ids, return_inverse=True)
    return Partition(np.argsort(owner, kind="stable"), np.concatenate([[0], np.cumsum(np.bincount(owner))]))


def _indices(client: int, given: Any) -> np.ndarray:
    """Check one client's indices. A single number is refused: a flat array is an owner per example, not a split."""
    indices: np.ndarray = np.asarray(given)
    if indices.ndim != 1:
        raise PartitionError(
            f"client {client} is given as {given!r}: give one flat index array per client; for an array that says "
            "whose each example is there is partition.by_id"
        )
    if len(indices) and not np.issubdtype(indices.dtype, np.integer):
        raise PartitionError(f"client {client}: indices must be whole numbers, not {indices.dtype}")
    return indices


def _labels(y: Any, n_clients: int) -> np.ndarray:
    labels: np.ndarray = np.asarray(y).reshape(-1)
    if not len(labels):
        raise PartitionError("there are no examples to divide")
    if _at_least_one("n_clients", n_clients) > len(labels):
        raise PartitionError(f"{n_clients} clients cannot share {len(labels)} examples: some would have none")
    return labels


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise PartitionError(f"{name} must be a whole number of at least 1, not {value!r}")
    return int(value)


def _even_offsets(n: int, parts: int) -> np.ndarray:
    """[parts + 1] bounds whose pieces differ by at most one."""
    return np.asarray(np.arange(parts + 1) * n // parts)


def _dirichlet_counts(
    rng: np.random.Generator, class_sizes: list[int], n_clients: int, alpha: float, cap: bool
) -> np.ndarray:
    """Draw how many examples of each class every client gets, [classes, clients]."""
    even = sum(class_sizes) / n_clients
    counts = np.zeros((len(class_sizes), n_clients), dtype=np.int64)
    held = np.zeros(n_clients, dtype=np.int64)
    for c, size in enumerate(class_sizes):
        share = rng.dirichlet(np.full(n_clients, alpha))
        if cap:
            share = share * (held < even)
            if not share.sum() > 0:  # all of the draw fell on clients that are full
                share = (held < even).astype(float)
        bounds = np.floor(np.cumsum(share / share.sum()) * size + 1e-9).astype(np.int64)
        bounds[-1] = size
        counts[c] = np.diff(bounds, prepend=0)
        held += counts[c]
    return counts


def _deal_classes(rng: np.random.Generator, n_classes: int, n_clients: int, k: int) -> np.ndarray:
    """Deal k different classes to every client from shuffled decks of all classes, [classes, clients]."""
    holds = np.zeros((n_classes, n_clients), dtype=bool)
    deck: list[int] = []
    for client in range(n_clients):
        hand: list[int] = []
        while len(hand) < k:
            fresh = [c for c in deck if c not in hand]
            if not fresh:
                deck += rng.permutation(n_classes).tolist()
                continue
            hand.append(fresh[0])
            deck.remove(fresh[0])
        holds[hand, client] = True
    return holds


def _deal(by_class: list[np.ndarray], counts: np.ndarray) -> Partition:
    """Hand out each class's examples, in order, by counts [classes, clients]."""
    owner = np.concatenate([np.repeat(np.arange(counts.shape[1]), row) for row in counts])
    indices = np.concatenate(by_class)
    return Partition(indices[np.argsort(owner, kind="stable")], np.concatenate([[0], np.cumsum(counts.sum(0))]))


def _evened(clients: Partition, y: np.ndarray[Any, Any]) -> Partition:
    """Lay the clients' examples end to end, each client's by class, and cut that into parts of the same size."""
    line = np.concatenate([own[np.argsort(y[own], kind="stable")] for own in clients])
    return _join(np.array_split(line, len(clients)))


def _join(parts: list[np.ndarray]) -> Partition:
    return Partition(np.concatenate(parts), np.concatenate([[0], np.cumsum([len(p) for p in parts])]))


def summarize_label_counts(counts: np.ndarray) -> str:
    """Say in words how different the clients are; counts are [clients, classes].

    >>> summarize_label_counts(np.array([[10, 0], [0, 10]])).partition(";")[0]
    '2 clients with 10 to 10 examples (median 10) of 1 to 1 classes (median 1)'
    """
    sizes = counts.sum(1)
    filled = counts[sizes > 0]
    classes = (filled > 0).sum(1)
    whole = counts.sum(0) / counts.sum()
    distance = np.abs(filled / filled.sum(1, keepdims=True) - whole).sum(1) / 2
    return (
        f"{len(counts)} clients with {sizes.min()} to {sizes.max()} examples (median {np.median(sizes):g}) of "
        f"{classes.min()} to {classes.max()} classes (median {np.median(classes):g}); on average {distance.mean():.0%} "
        "of a client's labels would have to change to match the whole"
    )
