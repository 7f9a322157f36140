"""Partitions: every example is given once, only the seed decides, and impossible partitions raise."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy
from support.errors import ANY, raises

from fedkeep.data import Partition, dirichlet_draws, load, partition
from fedkeep.errors import FedkeepError, PartitionError

PROFILE = settings(derandomize=True, deadline=None, max_examples=50)

LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=80).map(np.array)
SEEDS = st.integers(0, 2**31)
EIGHTY = np.arange(80) % 4  # 80 examples of 4 classes
NAN = math.nan


def assert_each_once(clients: Partition, n: int) -> None:
    assert clients.offsets[0] == 0
    assert clients.offsets[-1] == n
    assert np.array_equal(np.bincount(clients.indices, minlength=n), np.ones(n))
    assert sum(len(own) for own in clients) == n


def equal(a: Partition, b: Partition) -> bool:
    return np.array_equal(a.indices, b.indices) and np.array_equal(a.offsets, b.offsets)


@PROFILE
@given(LABELS, st.data(), SEEDS)
def test_iid_gives_each_example_once_in_sizes_that_differ_by_at_most_one(y, data, seed) -> None:
    n_clients = data.draw(st.integers(1, len(y)))
    clients = partition.iid(y, n_clients, seed)
    assert_each_once(clients, len(y))
    assert len(clients) == n_clients
    assert np.ptp(clients.sizes) <= 1
    assert equal(clients, partition.iid(y, n_clients, seed))


@PROFILE
@given(LABELS, st.data(), SEEDS)
def test_shards_gives_each_example_once_in_s_shards_per_client(y, data, seed) -> None:
    n_clients = data.draw(st.integers(1, len(y)))
    s = data.draw(st.integers(1, len(y) // n_clients))
    clients = partition.shards(y, n_clients, s, seed)
    assert_each_once(clients, len(y))
    assert len(clients) == n_clients
    small = len(y) // (n_clients * s)  # a shard has this many examples, or one more
    assert clients.sizes.min() >= s * small
    assert clients.sizes.max() <= s * (small + 1)
    assert np.ptp(clients.sizes) <= s
    assert equal(clients, partition.shards(y, n_clients, s, seed))


@PROFILE
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.data(), SEEDS)
def test_shards_of_one_class_each_give_a_client_at_most_s_classes(n_classes, per_class, size, data, seed) -> None:
    total = n_classes * per_class
    s = data.draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(n_classes), per_class * size))
    clients = partition.shards(y, total // s, s, seed)
    counts = clients.label_counts(y, n_classes)
    assert (counts > 0).sum(1).max() <= s
    assert (counts % size == 0).all()  # whole shards, each of one class
    assert (clients.sizes == s * size).all()


def test_shards_are_assigned_at_random() -> None:
    """Eight shards of ten examples, two of each class, for four clients: which shards meet depends on the seed."""
    held = {partition.shards(EIGHTY, 4, 2, seed).label_counts(EIGHTY).tobytes() for seed in range(10)}
    assert len(held) > 5


@PROFILE
@given(LABELS, st.data(), SEEDS, st.floats(0.01, 100), st.integers(0, 5), st.booleans())
def test_dirichlet_gives_each_example_once_and_reaches_min_size_or_raises(y, data, seed, alpha, min_size, cap) -> None:
    n_clients = data.draw(st.integers(1, min(10, len(y))))
    try:
        clients = partition.dirichlet(y, n_clients, alpha, seed, min_size, cap, tries=20)
    except PartitionError as error:
        assert error.key == "min_size"  # noqa: PT017 (either outcome is right)
        return
    assert_each_once(clients, len(y))
    assert len(clients) == n_clients
    assert clients.sizes.min() >= min_size
    assert equal(clients, partition.dirichlet(y, n_clients, alpha, seed, min_size, cap, tries=20))


@PROFILE
@given(LABELS, st.data(), SEEDS, st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 10.0]))
def test_dirichlet_with_cap_gives_a_full_client_no_further_class(y, data, seed, alpha) -> None:
    n_clients = data.draw(st.integers(1, min(10, len(y))))
    counts = partition.dirichlet(y, n_clients, alpha, seed, min_size=0).label_counts(y)
    held_before = np.cumsum(counts, axis=1) - counts  # classes are divided in increasing order
    assert (held_before[counts > 0] < len(y) / n_clients).all()


def test_dirichlet_that_draws_only_full_clients_uses_the_others() -> None:
    """At alpha = 1e-300 a class goes to one client, which then has 20 examples, above the even share of 10. The next
    class is often drawn for the same client."""
    for seed in range(20):
        counts = partition.dirichlet(EIGHTY, 8, 1e-300, seed, min_size=0).label_counts(EIGHTY)
        held_before = np.cumsum(counts, axis=1) - counts
        assert (held_before[counts > 0] < 10).all()


def test_dirichlet_draws_at_most_tries_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """One class and five clients at alpha = 0.001: one client gets nearly all, so the others miss min_size = 16."""
    calls = []
    draw = dirichlet_draws.draw
    monkeypatch.setattr(dirichlet_draws, "draw", lambda *args: calls.append(args[-1]) or draw(*args))
    with raises(PartitionError, "min_size", 16, mentions=["7", "5", "0.001"]):
        partition.dirichlet(np.zeros(80, int), 5, 0.001, min_size=16, tries=7)
    assert sum(calls) == 7


def one_by_one(rng, class_sizes: list[int], n_clients: int, alpha: float, cap: bool) -> np.ndarray:
    """Draw one split in plain numpy, class by class: the released code's loop, with the fallback for full clients."""
    counts, held = [], np.zeros(n_clients, dtype=np.int64)
    for size in class_sizes:
        share = rng.dirichlet(np.full(n_clients, alpha))
        if cap:
            has_room = held < sum(class_sizes) / n_clients
            share = share * has_room
            share = share if share.sum() > 0 else has_room.astype(float)
        bounds = np.floor(np.cumsum(share / share.sum()) * size + 1e-9).astype(np.int64)
        bounds[-1] = size
        counts.append(np.diff(bounds, prepend=0))
        held += counts[-1]
    return np.stack(counts)


@PROFILE
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=6),
    st.integers(1, 40),
    st.sampled_from([1e-3, 0.05, 0.0999, 0.1, 0.5, 1.0, 30.0]),
    st.booleans(),
    SEEDS,
)
def test_draws_made_together_are_those_made_one_by_one(class_sizes, n_clients, alpha, cap, seed) -> None:
    """The same bits, so that a seed gives the split that it always gave."""
    alone, together = np.random.default_rng(seed), np.random.default_rng(seed)
    expected = np.stack([one_by_one(alone, class_sizes, n_clients, alpha, cap) for _ in range(7)])
    drawn = [dirichlet_draws.draw(together, class_sizes, n_clients, alpha, cap, number) for number in (1, 2, 4)]
    assert np.array_equal(np.concatenate(drawn), expected)


def test_fedntds_split_of_cifar10_among_100_clients_with_alpha_005_is_drawn_until_it_succeeds() -> None:
    """Seed 1 needs 3,074 draws, which took 9 seconds one by one."""
    y = np.repeat(np.arange(10), 5000)
    clients = partition.dirichlet(y, 100, 0.05, seed=1)
    assert_each_once(clients, len(y))
    assert clients.sizes.min() >= 10
    counts = clients.label_counts(y)
    held_before = np.cumsum(counts, axis=1) - counts
    assert (held_before[counts > 0] < 500).all()


@pytest.mark.parametrize(("alpha", "min_size"), [(0.005, 10), (1.0, 490), (0.05, 100)])
def test_a_dirichlet_split_that_cannot_succeed_is_refused_after_few_draws(monkeypatch, alpha, min_size) -> None:
    drawn = []
    draw = dirichlet_draws.draw
    monkeypatch.setattr(dirichlet_draws, "draw", lambda *args: drawn.append(args[-1]) or draw(*args))
    with raises(PartitionError, "min_size", min_size, mentions=["100", str(alpha)]):
        partition.dirichlet(np.repeat(np.arange(10), 5000), 100, alpha, min_size=min_size)
    assert 2000 <= sum(drawn) < 2300


def test_dirichlet_reaches_a_min_size_of_the_even_share() -> None:
    """Of two clients with 80 examples, each has 40, or one has fewer than 40."""
    assert partition.dirichlet(EIGHTY, 2, 100.0, min_size=40).sizes.tolist() == [40, 40]


def test_dirichlet_with_small_alpha_is_more_skewed() -> None:
    y = np.arange(4000) % 10

    def largest_share(alpha: float) -> float:
        counts = partition.dirichlet(y, 20, alpha, seed=3, min_size=0).label_counts(y)
        return float((counts.max(1) / np.maximum(1, counts.sum(1))).mean())

    shares = [largest_share(alpha) for alpha in (0.05, 0.5, 5.0, 1e5)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.5
    assert shares[-1] < 0.12  # nearly a tenth of each class


@PROFILE
@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 5), st.data(), SEEDS)
def test_label_quantity_gives_exactly_k_classes_and_divides_them_evenly(
    n_classes, n_clients, extra, data, seed
) -> None:
    """Every class has at least as many examples as there are clients."""
    k = data.draw(st.integers(-(-n_classes // n_clients), n_classes))  # enough for every class to have a client
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(n_classes), n_clients + extra))
    clients = partition.label_quantity(y, n_clients, k, seed)
    assert_each_once(clients, len(y))
    counts = clients.label_counts(y, n_classes)
    has_class = counts > 0
    assert (has_class.sum(1) == k).all()
    assert np.ptp(has_class.sum(0)) <= 1
    for c in range(n_classes):
        assert np.ptp(counts[has_class[:, c], c]) <= 1
    assert equal(clients, partition.label_quantity(y, n_clients, k, seed))


@PROFILE
@given(st.lists(st.sampled_from(["ann", "bob", "cy", "di"]), min_size=1, max_size=40))
def test_by_id_makes_one_client_for_each_id_in_sorted_order(ids) -> None:
    clients = partition.by_id(ids)
    assert_each_once(clients, len(ids))
    assert [{ids[i] for i in own} for own in clients] == [{name} for name in sorted(set(ids))]


@pytest.mark.parametrize(
    "divide",
    [
        lambda seed: partition.iid(EIGHTY, 8, seed),
        lambda seed: partition.shards(EIGHTY, 8, 2, seed),
        lambda seed: partition.dirichlet(EIGHTY, 8, 0.5, seed, min_size=1),
        lambda seed: partition.label_quantity(EIGHTY, 8, 2, seed),
    ],
    ids=["iid", "shards", "dirichlet", "label_quantity"],
)
def test_a_partition_depends_only_on_the_seed(divide) -> None:
    np.random.seed(0)  # noqa: NPY002 (the global state must not matter)
    first = divide(4)
    np.random.seed(1)  # noqa: NPY002
    assert equal(first, divide(4))
    assert len({divide(seed).indices.tobytes() for seed in range(6)}) == 6


def test_labels_may_be_tensors_lists_or_arrays() -> None:
    y = EIGHTY.tolist()
    assert equal(partition.shards(torch.tensor(y), 4, 2), partition.shards(y, 4, 2))
    assert equal(partition.shards(EIGHTY, np.int64(4), np.int64(2)), partition.shards(y, 4, 2))


@pytest.mark.parametrize(
    ("divide", "key", "value", "mentions"),
    [
        (lambda: partition.iid([], 1), "y", [], []),
        (lambda: partition.iid(EIGHTY, 81), "n_clients", 81, ["80"]),
        (lambda: partition.iid(EIGHTY, 0), "n_clients", 0, []),
        (lambda: partition.iid(EIGHTY, 2.0), "n_clients", 2.0, []),
        (lambda: partition.iid(EIGHTY, True), "n_clients", True, ["True"]),
        (lambda: partition.iid(EIGHTY, "2"), "n_clients", "2", []),
        (lambda: partition.shards(EIGHTY, 40, 3), "s", 3, ["40", "120", "80"]),
        (lambda: partition.shards(EIGHTY, 4, 0), "s", 0, []),
        (lambda: partition.shards(EIGHTY, 4, 1.5), "s", 1.5, []),
        (lambda: partition.shards(EIGHTY, 81, 1), "n_clients", 81, ["80"]),
        (lambda: partition.dirichlet(EIGHTY, 9, 1.0), "min_size", 10, ["9", "80"]),
        (lambda: partition.dirichlet(EIGHTY, 81, 1.0, min_size=0), "n_clients", 81, ["80"]),
        (lambda: partition.dirichlet(EIGHTY, 2, 1.0, min_size="9"), "min_size", "9", []),
        (lambda: partition.dirichlet(EIGHTY, 2, 1.0, tries=0), "tries", 0, []),
        (lambda: partition.dirichlet(EIGHTY, 8, 1.0, group=3), "group", 3, ["8"]),
        (lambda: partition.dirichlet(EIGHTY, 8, 1.0, group=0), "group", 0, []),
        (lambda: partition.dirichlet(EIGHTY, 2, 0), "alpha", 0, []),
        (lambda: partition.dirichlet(EIGHTY, 2, -1.0), "alpha", -1.0, []),
        (lambda: partition.dirichlet(EIGHTY, 2, NAN), "alpha", ANY, ["nan"]),
        (lambda: partition.dirichlet(EIGHTY, 2, float("inf")), "alpha", float("inf"), []),
        (lambda: partition.dirichlet(EIGHTY, 2, "0.1"), "alpha", "0.1", []),
        (lambda: partition.label_quantity(EIGHTY, 8, 5), "k", 5, ["4"]),
        (lambda: partition.label_quantity(EIGHTY, 3, 1), "k", 1, ["3", "4"]),
        (lambda: partition.label_quantity(EIGHTY, 8, 0), "k", 0, []),
        (lambda: partition.label_quantity(EIGHTY, 8, 2.0), "k", 2.0, []),
        (lambda: partition.label_quantity([0, 1, 1, 1], 3, 2), "k", 2, ["class 0", "3"]),
        (lambda: partition.by_id([]), "ids", [], []),
    ],
)
def test_impossible_partitions_raise(
    divide: Callable[[], Partition], key: str, value: Any, mentions: list[str]
) -> None:
    with raises(PartitionError, key, value, mentions=[key, *mentions]):
        divide()


def test_of_accepts_any_iterable_of_indices() -> None:
    clients = Partition.of((c for c in [[3, 1], np.array([0], dtype=np.uint8), torch.tensor([2]), []]), 4)
    assert [own.tolist() for own in clients] == [[3, 1], [0], [2], []]
    assert clients.sizes.tolist() == [2, 1, 1, 0]
    assert Partition.of(clients, 4) is clients


@pytest.mark.parametrize(
    ("clients", "value", "mentions"),
    [
        ([], [], []),
        (5, 5, []),
        ([[], []], [], []),
        ([[0], [1.0]], "float64", ["client 1"]),
        ([[True, False]], "bool", ["client 0"]),
        ([["a"]], "<U1", ["client 0"]),
        ([0, 1], 0, ["client 0", "by_id"]),
        ([[0], [[1, 2], [3, 4]]], [[1, 2], [3, 4]], ["client 1", "(2, 2)"]),
        ([[0, 5]], 5, ["0 to 4"]),
        ([[0], [-1]], -1, ["0 to 4"]),
        (Partition(np.array([0, 9]), np.array([0, 2])), 9, ["0 to 4"]),
    ],
)
def test_of_raises_for_invalid_clients(clients: Any, value: Any, mentions: list[str]) -> None:
    with raises(PartitionError, "clients", value, mentions=mentions):
        Partition.of(clients, 5)


def test_label_counts_are_per_client_and_class() -> None:
    clients = Partition.of([[0, 1, 2], [], [3, 4]], 5)
    y = [0, 2, 2, 1, 1]
    assert clients.label_counts(y).tolist() == [[1, 0, 2], [0, 0, 0], [0, 2, 0]]
    assert clients.label_counts(torch.tensor(y), n_classes=4).tolist() == [[1, 0, 2, 0], [0] * 4, [0, 2, 0, 0]]
    with raises(PartitionError, "n_classes", 2, mentions=["label 2"]):
        clients.label_counts(y, n_classes=2)


def test_a_client_that_does_not_exist_is_an_index_error() -> None:
    clients = partition.iid(EIGHTY, 8)
    for k in (8, -1):
        with pytest.raises(IndexError, match=f"client {k}"):
            clients[k]


@pytest.mark.parametrize(
    "divide",
    [lambda y: partition.iid(y, 200_000), lambda y: partition.shards(y, 200_000, 2)],
    ids=["iid", "shards"],
)
def test_a_partition_of_two_hundred_thousand_clients(divide) -> None:
    y = np.arange(400_000) % 10
    clients = divide(y)
    assert_each_once(clients, len(y))
    assert (clients.sizes == 2).all()


@pytest.mark.parametrize("seed", [-1, 1.5, None])
def test_an_invalid_seed_raises(seed: object) -> None:
    with raises(FedkeepError, "seed", seed):
        partition.iid([0, 1, 0, 1], n_clients=2, seed=seed)


@PROFILE
@given(st.integers(1, 4), st.sampled_from([0.1, 1.0, 10.0]), SEEDS)
def test_dirichlet_in_groups_gives_each_group_the_same_number_of_examples(groups, alpha, seed) -> None:
    y = np.arange(60 * groups) % 4
    clients = partition.dirichlet(y, 5 * groups, alpha, seed, min_size=2, group=5)
    assert_each_once(clients, len(y))
    assert len(clients) == 5 * groups
    assert clients.sizes.min() >= 2
    assert (clients.sizes.reshape(groups, 5).sum(1) == 60).all()
    assert equal(clients, partition.dirichlet(y, 5 * groups, alpha, seed, min_size=2, group=5))


@PROFILE
@given(st.integers(2, 9), st.sampled_from([0.1, 1.0]), SEEDS)
def test_even_dirichlet_moves_surplus_examples_to_the_next_client(n, alpha, seed) -> None:
    y = np.random.default_rng(seed).permutation(np.arange(200) % 5)
    drawn, even = (partition.dirichlet(y, n, alpha, seed, min_size=1, even=e) for e in (False, True))
    assert_each_once(even, len(y))
    assert np.ptp(even.sizes) <= 1
    starts = np.cumsum([0, *drawn.sizes])
    ends = np.cumsum([0, *even.sizes])
    for k, own in enumerate(even):  # only from clients whose range overlaps its own
        near = [j for j in range(n) if starts[j] < ends[k + 1] and ends[k] < starts[j + 1]]
        assert set(own) <= set(np.concatenate([drawn[j] for j in near]))


@PROFILE
@given(LABELS, st.data(), SEEDS, st.floats(0, 0.99))
def test_hold_out_removes_a_fraction_of_each_client_by_the_seed(y, data, seed, share) -> None:
    clients = partition.iid(y, data.draw(st.integers(1, len(y))), seed)
    left = clients.hold_out(share, seed)
    assert len(left) == len(clients)
    for before, after in zip(clients, left, strict=True):
        assert set(after) <= set(before)
        assert len(after) == max(1, len(before) - int(share * len(before) + 1e-9))
    assert equal(left, clients.hold_out(share, seed))
    assert equal(clients.hold_out(0.0), clients)


def test_hold_out_depends_on_the_seed_and_checks_its_share() -> None:
    clients = partition.iid(EIGHTY, 4)
    assert not equal(clients.hold_out(0.5, 0), clients.hold_out(0.5, 1))
    for share in (-0.1, 1.0, True):
        with raises(PartitionError, "share", share):
            clients.hold_out(share)


def test_the_summary_of_label_counts_gives_ranges_medians_and_the_distance() -> None:
    """Client 0 has 3/4 of class 0, overall it is 1/2: 25% of its labels differ; for client 1 too; client 2 is empty."""
    summary = partition.summarize_label_counts(np.array([[3, 1, 0], [1, 3, 0], [0, 0, 0]]))
    assert re.findall(r"\d+%?", summary) == ["3", "0", "4", "4", "2", "25%"]
    assert "2 classes each" in summary


def test_heterogeneity_is_that_of_its_formulas() -> None:
    """Scipy's Jensen-Shannon distance, and the formulas of docs/data.md, for each client with examples."""
    counts = np.array([[8, 2, 0], [0, 0, 5], [0, 0, 0], [4, 4, 4]])
    q = counts.sum(0) / counts.sum()
    p = [row / row.sum() for row in counts if row.sum()]
    expected = {
        "jensen_shannon": np.mean([jensenshannon(one, q, base=2) for one in p]),
        "hellinger": np.mean([np.linalg.norm(np.sqrt(one) - np.sqrt(q)) / np.sqrt(2) for one in p]),
        "earth_movers": np.mean([np.maximum(one - q, 0).sum() for one in p]),
        "effective_classes": np.mean([np.exp(entropy(one)) for one in p]),
    }
    assert partition.heterogeneity(counts) == pytest.approx(expected)


def test_heterogeneity_is_zero_for_equal_clients_and_one_for_many_clients_of_one_class_each() -> None:
    equal_clients = partition.heterogeneity(np.full((3, 4), 7))
    assert equal_clients == pytest.approx({**dict.fromkeys(equal_clients, 0), "effective_classes": 4}, abs=1e-7)
    one_class_each = partition.heterogeneity(np.eye(1000, dtype=int))
    distances = [value for name, value in one_class_each.items() if name != "effective_classes"]
    assert min(distances) > 0.95
    assert max(distances) < 1
    assert one_class_each["effective_classes"] == pytest.approx(1)


@pytest.mark.parametrize("counts", [[], [1], [[1], [1, 2]], [[0, 0]], [[1, -1]], [["a"]], [[np.inf, 1]], [[NAN, 1]]])
def test_heterogeneity_refuses_what_are_no_counts(counts: list) -> None:
    with raises(PartitionError, "counts"):
        partition.heterogeneity(counts)


def test_owners_that_are_not_known_are_refused() -> None:
    with raises(PartitionError, "ids", mentions=["pass ids="]):
        partition.by_id(load("digits").ids)
