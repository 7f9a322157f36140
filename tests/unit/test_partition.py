"""Partitions: every example once, nothing but the seed decides, and what cannot be is refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.data import Partition, partition
from fedkeep.errors import FedkeepError, PartitionError

PROFILE = settings(derandomize=True, deadline=None, max_examples=50)

LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=80).map(np.array)
SEEDS = st.integers(0, 2**31)
EIGHTY = np.arange(80) % 4  # 80 examples of 4 classes


def assert_each_once(clients: Partition, n: int) -> None:
    assert clients.offsets[0] == 0
    assert clients.offsets[-1] == n
    assert np.array_equal(np.bincount(clients.indices, minlength=n), np.ones(n))
    assert sum(len(own) for own in clients) == n


def equal(a: Partition, b: Partition) -> bool:
    return np.array_equal(a.indices, b.indices) and np.array_equal(a.offsets, b.offsets)


@PROFILE
@given(LABELS, st.data(), SEEDS)
def test_iid_gives_each_example_once_in_sizes_that_differ_by_at_most_one(y, data, seed):
    n_clients = data.draw(st.integers(1, len(y)))
    clients = partition.iid(y, n_clients, seed)
    assert_each_once(clients, len(y))
    assert len(clients) == n_clients
    assert np.ptp(clients.sizes) <= 1
    assert equal(clients, partition.iid(y, n_clients, seed))


@PROFILE
@given(LABELS, st.data(), SEEDS)
def test_shards_gives_each_example_once_in_s_shards_a_client(y, data, seed):
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
def test_shards_that_fit_the_classes_give_a_client_at_most_s_classes(n_classes, per_class, size, data, seed):
    total = n_classes * per_class
    s = data.draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(n_classes), per_class * size))
    clients = partition.shards(y, total // s, s, seed)
    counts = clients.label_counts(y, n_classes)
    assert (counts > 0).sum(1).max() <= s
    assert (counts % size == 0).all()  # whole shards, each of one class
    assert (clients.sizes == s * size).all()


def test_shards_are_dealt_at_random():
    """Eight shards of ten examples, two of each class, to four clients: who meets whom depends on the seed."""
    held = {partition.shards(EIGHTY, 4, 2, seed).label_counts(EIGHTY).tobytes() for seed in range(10)}
    assert len(held) > 5


@PROFILE
@given(LABELS, st.data(), SEEDS, st.floats(0.01, 100), st.integers(0, 5), st.booleans())
def test_dirichlet_gives_each_example_once_and_every_client_min_size_or_says_why_not(
    y, data, seed, alpha, min_size, cap
):
    n_clients = data.draw(st.integers(1, min(10, len(y))))
    try:
        clients = partition.dirichlet(y, n_clients, alpha, seed, min_size, cap, tries=20)
    except PartitionError as error:
        assert "min_size" in str(error)  # noqa: PT017 (either outcome is right)
        return
    assert_each_once(clients, len(y))
    assert len(clients) == n_clients
    assert clients.sizes.min() >= min_size
    assert equal(clients, partition.dirichlet(y, n_clients, alpha, seed, min_size, cap, tries=20))


@PROFILE
@given(LABELS, st.data(), SEEDS, st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 10.0]))
def test_dirichlet_capped_gives_a_client_that_has_its_even_share_no_further_class(y, data, seed, alpha):
    n_clients = data.draw(st.integers(1, min(10, len(y))))
    counts = partition.dirichlet(y, n_clients, alpha, seed, min_size=0).label_counts(y)
    held_before = np.cumsum(counts, axis=1) - counts  # classes are shared out in increasing order
    assert (held_before[counts > 0] < len(y) / n_clients).all()


def test_dirichlet_whose_draw_falls_on_full_clients_alone_goes_to_the_others():
    """At alpha = 1e-300 a class goes to one client, who then has 20 of an even share of 10; the next class often
    falls on the same one."""
    for seed in range(20):
        counts = partition.dirichlet(EIGHTY, 8, 1e-300, seed, min_size=0).label_counts(EIGHTY)
        held_before = np.cumsum(counts, axis=1) - counts
        assert (held_before[counts > 0] < 10).all()


def test_dirichlet_gives_up_after_as_many_draws_as_allowed(monkeypatch):
    """One class and five clients at alpha = 0.001: one client takes nearly all, so none has 16 = the even share."""
    calls = []
    draw = partition._dirichlet_counts
    monkeypatch.setattr(partition, "_dirichlet_counts", lambda *args: calls.append(1) or draw(*args))
    with pytest.raises(PartitionError, match=r"min_size = 16 was not reached in 7 draws for 5 clients"):
        partition.dirichlet(np.zeros(80, int), 5, 0.001, min_size=16, tries=7)
    assert len(calls) == 7


def test_dirichlet_meets_a_min_size_of_the_even_share():
    """Two clients of 80 examples have 40 each or one of them has fewer than 40."""
    assert partition.dirichlet(EIGHTY, 2, 100.0, min_size=40).sizes.tolist() == [40, 40]


def test_dirichlet_of_small_alpha_is_more_skewed_than_of_large():
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
def test_label_quantity_gives_exactly_k_classes_and_shares_classes_evenly(n_classes, n_clients, extra, data, seed):
    """Every class has at least as many examples as there are clients, so that it can go round."""
    k = data.draw(st.integers(-(-n_classes // n_clients), n_classes))  # enough for every class to have a holder
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(n_classes), n_clients + extra))
    clients = partition.label_quantity(y, n_clients, k, seed)
    assert_each_once(clients, len(y))
    counts = clients.label_counts(y, n_classes)
    holds = counts > 0
    assert (holds.sum(1) == k).all()
    assert np.ptp(holds.sum(0)) <= 1
    for c in range(n_classes):
        assert np.ptp(counts[holds[:, c], c]) <= 1
    assert equal(clients, partition.label_quantity(y, n_clients, k, seed))


@PROFILE
@given(st.lists(st.sampled_from(["ann", "bob", "cy", "di"]), min_size=1, max_size=40))
def test_by_id_makes_one_client_of_each_id_in_sorted_order(ids):
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
def test_the_seed_alone_decides(divide):
    np.random.seed(0)  # noqa: NPY002 (the global state must not matter)
    first = divide(4)
    np.random.seed(1)  # noqa: NPY002
    assert equal(first, divide(4))
    assert len({divide(seed).indices.tobytes() for seed in range(6)}) == 6


def test_tensors_lists_and_arrays_are_labels_alike():
    y = EIGHTY.tolist()
    assert equal(partition.shards(torch.tensor(y), 4, 2), partition.shards(y, 4, 2))
    assert equal(partition.shards(EIGHTY, np.int64(4), np.int64(2)), partition.shards(y, 4, 2))


@pytest.mark.parametrize(
    ("divide", "reason"),
    [
        (lambda: partition.iid([], 1), "no examples"),
        (lambda: partition.iid(EIGHTY, 81), "81 clients cannot share 80 examples"),
        (lambda: partition.iid(EIGHTY, 0), "n_clients must be a whole number of at least 1, not 0"),
        (lambda: partition.iid(EIGHTY, 2.0), "n_clients must be a whole number of at least 1, not 2.0"),
        (lambda: partition.iid(EIGHTY, True), "n_clients must be a whole number of at least 1, not True"),
        (lambda: partition.iid(EIGHTY, "2"), "n_clients must be a whole number of at least 1, not '2'"),
        (lambda: partition.shards(EIGHTY, 40, 3), "40 clients with s = 3 need 120 shards.* only 80 examples"),
        (lambda: partition.shards(EIGHTY, 4, 0), "s must be a whole number of at least 1, not 0"),
        (lambda: partition.shards(EIGHTY, 4, 1.5), "s must be a whole number of at least 1, not 1.5"),
        (lambda: partition.shards(EIGHTY, 81, 1), "81 clients cannot share 80 examples"),
        (lambda: partition.dirichlet(EIGHTY, 9, 1.0), "9 clients cannot have 10 examples each: there are 80"),
        (lambda: partition.dirichlet(EIGHTY, 81, 1.0, min_size=0), "81 clients cannot share 80"),
        (lambda: partition.dirichlet(EIGHTY, 2, 1.0, min_size="9"), "min_size must be a whole number, not '9'"),
        (lambda: partition.dirichlet(EIGHTY, 2, 0), "alpha must be a number above 0, not 0"),
        (lambda: partition.dirichlet(EIGHTY, 2, -1.0), "alpha must be a number above 0, not -1.0"),
        (lambda: partition.dirichlet(EIGHTY, 2, float("nan")), "alpha must be a number above 0, not nan"),
        (lambda: partition.dirichlet(EIGHTY, 2, float("inf")), "alpha must be a number above 0, not inf"),
        (lambda: partition.dirichlet(EIGHTY, 2, "0.1"), "alpha must be a number above 0, not '0.1'"),
        (lambda: partition.label_quantity(EIGHTY, 8, 5), "k = 5 classes a client, but the data has 4"),
        (lambda: partition.label_quantity(EIGHTY, 3, 1), "3 clients with k = 1 hold at most 3 of the 4 classes"),
        (lambda: partition.label_quantity(EIGHTY, 8, 0), "k must be a whole number of at least 1, not 0"),
        (lambda: partition.label_quantity(EIGHTY, 8, 2.0), "k must be a whole number of at least 1, not 2.0"),
        (lambda: partition.label_quantity([0, 1, 1, 1], 3, 2), "class 0 has 1 examples for the 3 clients"),
        (lambda: partition.by_id([]), "there are no ids"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(divide, reason):
    with pytest.raises(PartitionError, match=reason) as caught:
        divide()
    assert "\n" not in str(caught.value)


def test_of_takes_any_iterable_of_indices():
    clients = Partition.of((c for c in [[3, 1], np.array([0], dtype=np.uint8), torch.tensor([2]), []]), 4)
    assert [own.tolist() for own in clients] == [[3, 1], [0], [2], []]
    assert clients.sizes.tolist() == [2, 1, 1, 0]
    assert Partition.of(clients, 4) is clients


@pytest.mark.parametrize(
    ("clients", "reason"),
    [
        ([], "there are no clients"),
        ([[], []], "no client holds any example"),
        ([[0], [1.0]], "client 1: indices must be whole numbers, not float64"),
        ([[True, False]], "client 0: indices must be whole numbers, not bool"),
        ([["a"]], "client 0: indices must be whole numbers"),
        ([[0, 5]], "a client holds example 5, but the training data has examples 0 to 4"),
        ([[0], [-1]], "a client holds example -1"),
        (Partition(np.array([0, 9]), np.array([0, 2])), "a client holds example 9"),
    ],
)
def test_of_refuses_what_is_no_partition_of_the_data(clients, reason):
    with pytest.raises(PartitionError, match=reason):
        Partition.of(clients, 5)


def test_label_counts_count_examples_of_each_client_and_class():
    clients = Partition.of([[0, 1, 2], [], [3, 4]], 5)
    y = [0, 2, 2, 1, 1]
    assert clients.label_counts(y).tolist() == [[1, 0, 2], [0, 0, 0], [0, 2, 0]]
    assert clients.label_counts(torch.tensor(y), n_classes=4).tolist() == [[1, 0, 2, 0], [0] * 4, [0, 2, 0, 0]]
    with pytest.raises(PartitionError, match="there is a label 2, but n_classes = 2"):
        clients.label_counts(y, n_classes=2)


def test_a_client_outside_the_partition_is_an_index_error():
    clients = partition.iid(EIGHTY, 8)
    for k in (8, -1):
        with pytest.raises(IndexError, match="of 8"):
            clients[k]


@pytest.mark.parametrize(
    "divide",
    [lambda y: partition.iid(y, 200_000), lambda y: partition.shards(y, 200_000, 2)],
    ids=["iid", "shards"],
)
def test_two_hundred_thousand_clients_are_two_arrays(divide):
    y = np.arange(400_000) % 10
    clients = divide(y)
    assert_each_once(clients, len(y))
    assert (clients.sizes == 2).all()


@pytest.mark.parametrize("seed", [-1, 1.5, None])
def test_a_bad_seed_is_refused_by_name(seed: object) -> None:
    with pytest.raises(FedkeepError, match="seed must be"):
        partition.iid([0, 1, 0, 1], n_clients=2, seed=seed)


@PROFILE
@given(st.integers(1, 4), st.sampled_from([0.1, 1.0, 10.0]), SEEDS)
def test_dirichlet_in_groups_gives_each_group_its_even_part_of_the_examples(groups, alpha, seed):
    y = np.arange(60 * groups) % 4
    clients = partition.dirichlet(y, 5 * groups, alpha, seed, min_size=2, group=5)
    assert_each_once(clients, len(y))
    assert len(clients) == 5 * groups
    assert clients.sizes.min() >= 2
    assert (clients.sizes.reshape(groups, 5).sum(1) == 60).all()
    assert equal(clients, partition.dirichlet(y, 5 * groups, alpha, seed, min_size=2, group=5))


@PROFILE
@given(st.integers(2, 9), st.sampled_from([0.1, 1.0]), SEEDS)
def test_dirichlet_made_even_gives_what_is_over_to_the_neighbour(n, alpha, seed):
    y = np.random.default_rng(seed).permutation(np.arange(200) % 5)
    drawn, even = (partition.dirichlet(y, n, alpha, seed, min_size=1, even=e) for e in (False, True))
    assert_each_once(even, len(y))
    assert np.ptp(even.sizes) <= 1
    starts = np.cumsum([0, *drawn.sizes])
    ends = np.cumsum([0, *even.sizes])
    for k, own in enumerate(even):  # only from those whose stretch of the line its own overlaps
        near = [j for j in range(n) if starts[j] < ends[k + 1] and ends[k] < starts[j + 1]]
        assert set(own) <= set(np.concatenate([drawn[j] for j in near]))


def test_dirichlet_in_groups_refuses_groups_that_do_not_come_out_even():
    with pytest.raises(PartitionError, match="groups of 3"):
        partition.dirichlet(EIGHTY, 8, 1.0, group=3)


@PROFILE
@given(LABELS, st.data(), SEEDS, st.floats(0, 0.99))
def test_what_clients_hold_back_is_a_share_of_each_drawn_by_the_seed(y, data, seed, share):
    clients = partition.iid(y, data.draw(st.integers(1, len(y))), seed)
    left = clients.hold_out(share, seed)
    assert len(left) == len(clients)
    for before, after in zip(clients, left, strict=True):
        assert set(after) <= set(before)
        assert len(after) == max(1, len(before) - int(share * len(before) + 1e-9))
    assert equal(left, clients.hold_out(share, seed))
    assert equal(clients.hold_out(0.0), clients)


def test_what_clients_hold_back_is_drawn_anew_with_another_seed_and_never_negative():
    clients = partition.iid(EIGHTY, 4)
    assert not equal(clients.hold_out(0.5, 0), clients.hold_out(0.5, 1))
    for share in (-0.1, 1.0, True):
        with pytest.raises(PartitionError, match="holds back"):
            clients.hold_out(share)
