"""Trees: bytes and back without loss, sums that do not depend on the order of keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from fedkeep import tree

PROFILE = settings(derandomize=True, deadline=None, max_examples=50)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8)
KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), min_size=1, max_size=4)


def make_tensor(dtype: torch.dtype, shape: list[int], layout: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        # magnitudes from 1e-4 to 1e4, so that the order of a sum shows in its last bits
        values = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 5, shape, generator=generator)
    else:
        values = torch.randint(0, 2 if dtype == torch.bool else 200, shape, generator=generator)
    values = values.to(dtype)
    if layout == "transposed":
        return values.permute(tuple(reversed(range(values.ndim))))
    if layout == "strided":
        return values[::2] if values.ndim else values
    if layout == "expanded":
        return values.expand(3, *shape)
    return values


LAYOUTS = st.sampled_from(["plain", "transposed", "strided", "expanded"])
SHAPES = st.lists(st.integers(0, 3), max_size=3)
TENSORS = st.builds(make_tensor, st.sampled_from(DTYPES), SHAPES, LAYOUTS, st.integers(0, 1000))
FLOATS = st.builds(make_tensor, st.just(torch.float32), SHAPES, LAYOUTS, st.integers(0, 1000))


def trees(leaf: st.SearchStrategy) -> st.SearchStrategy:
    node = st.recursive(leaf | st.just({}), lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=8)
    return st.dictionaries(KEYS, node, max_size=4)


def assert_same(a, b) -> None:
    if isinstance(a, dict):
        assert isinstance(b, dict)
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a, b)


def backwards(node):
    """The same tree, its keys put in the other way round."""
    return {key: backwards(node[key]) for key in reversed(list(node))} if isinstance(node, dict) else node


@PROFILE
@given(trees(TENSORS))
def test_bytes_and_back_is_the_same_tree(t):
    assert_same(tree.from_bytes(tree.to_bytes(t)), t)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_every_dtype_survives_with_no_and_with_zero_dimensions(dtype, shape):
    t = {"a": {"b": torch.ones(shape, dtype=dtype)}, "e": {}}
    assert_same(tree.from_bytes(tree.to_bytes(t)), t)


def test_special_numbers_survive_bit_for_bit():
    t = torch.tensor([float("inf"), -float("inf"), -0.0, 5e-324], dtype=torch.float64)
    back = tree.from_bytes(tree.to_bytes({"t": t}))["t"]
    assert torch.equal(back.view(torch.int64), t.view(torch.int64))


def test_leaves_that_share_memory_come_back_apart():
    base = torch.arange(6.0)
    back = tree.from_bytes(tree.to_bytes({"a": base, "b": base, "c": base[2:4]}))
    back["a"].zero_()
    assert back["b"].tolist() == [0, 1, 2, 3, 4, 5]
    assert back["c"].tolist() == [2, 3]


def test_a_leaf_that_requires_a_gradient_is_sent_without_it():
    back = tree.from_bytes(tree.to_bytes({"w": torch.ones(2, requires_grad=True)}))
    assert not back["w"].requires_grad


@PROFILE
@given(trees(FLOATS))
def test_the_order_in_which_keys_were_put_in_changes_nothing(t):
    other = backwards(t)
    for a, b in zip(tree.items(t), tree.items(other), strict=True):
        assert a[0] == b[0]
        assert a[1] is b[1]
    assert torch.equal(tree.dot(t, t), tree.dot(other, other))
    assert torch.equal(tree.dot(t, other), tree.dot(t, t))
    assert list(tree.map(lambda x: x, t)) == sorted(t)


def test_items_join_the_keys_of_a_path():
    one, two = torch.tensor(1), torch.tensor(2)
    assert list(tree.items({"b": two, "a": {"y": one, "x": two}, "e": {}})) == [
        ("a/x", two),
        ("a/y", one),
        ("b", two),
    ]
    assert list(tree.items(one)) == [("", one)]


def test_dot_sums_products_over_all_leaves():
    """1*3 + 2*4 + 5*6 = 41; nothing at all is 0."""
    a = {"x": torch.tensor([1.0, 2.0]), "y": {"z": torch.tensor(5.0)}}
    b = {"y": {"z": torch.tensor(6.0)}, "x": torch.tensor([3.0, 4.0])}
    assert tree.dot(a, b).item() == 41
    assert tree.dot({}, {}).item() == 0
    with pytest.raises(KeyError):
        tree.dot(a, {"x": a["x"]})


def test_dot_keeps_double_precision():
    t = {"w": torch.tensor([1e-9, 1.0], dtype=torch.float64)}
    assert tree.dot(t, t).dtype == torch.float64
    assert tree.dot(t, t).item() == 1.0 + 1e-18


@PROFILE
@given(st.integers(1, 5), SHAPES, st.integers(0, 1000), st.sampled_from(["none", "float64", "float32", "int64"]))
def test_mean_is_the_weighted_sum_of_numpy(k, shape, seed, weigh):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(k, *shape))
    weights = rng.integers(1, 9, size=k)
    given_weights = None if weigh == "none" else torch.from_numpy(weights).to(getattr(torch, weigh))
    mean = tree.mean({"a": {"b": torch.from_numpy(values)}}, given_weights)["a"]["b"]
    share = np.full(k, 1 / k) if weigh == "none" else weights / weights.sum()
    expected = np.tensordot(share, values, axes=1)
    assert mean.shape == tuple(shape)
    assert mean.dtype == torch.float64
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_mean_keeps_the_dtype_of_half_precision_leaves():
    """(1*1 + 3*5) / 4 = 4."""
    stacked = {"w": torch.tensor([[1.0], [5.0]], dtype=torch.bfloat16)}
    for weights in (torch.tensor([1, 3]), torch.tensor([1.0, 3.0], dtype=torch.float64)):
        mean = tree.mean(stacked, weights)["w"]
        assert mean.dtype == torch.bfloat16
        assert mean.tolist() == [4.0]


def test_mean_refuses_whole_numbers_instead_of_rounding_the_weights_to_zero():
    for weights in (None, torch.tensor([1.0, 1.0])):
        with pytest.raises((TypeError, RuntimeError)):
            tree.mean({"n": torch.tensor([[2], [4]])}, weights)


@PROFILE
@given(trees(TENSORS), st.integers(1, 3))
def test_take_undoes_stack(t, copies):
    others = [tree.map(lambda x, k=k: torch.roll(x, k), t) for k in range(copies)]
    stacked = tree.stack(others)
    for k, one in enumerate(others):
        assert_same(tree.take(stacked, k), one)
    assert_same(tree.cat([tree.take(stacked, slice(0, 1)), tree.take(stacked, slice(1, None))]), stacked)
    assert_same(tree.take(stacked, torch.arange(copies)), stacked)


@PROFILE
@given(trees(TENSORS))
def test_like_undoes_leaves_and_unflatten_undoes_flatten(t):
    assert_same(tree.like(t, tree.leaves(t)), t)
    assert_same(tree.unflatten(tree.flatten(t)), t)


def test_arithmetic_acts_leaf_by_leaf():
    a = {"x": torch.tensor([1.0, 2.0]), "y": {"z": torch.tensor(3.0)}}
    b = {"x": torch.tensor([10.0, 20.0]), "y": {"z": torch.tensor(30.0)}}
    assert_same(tree.add(a, b), {"x": torch.tensor([11.0, 22.0]), "y": {"z": torch.tensor(33.0)}})
    assert_same(tree.sub(b, a), {"x": torch.tensor([9.0, 18.0]), "y": {"z": torch.tensor(27.0)}})
    assert_same(tree.scale(a, 2), {"x": torch.tensor([2.0, 4.0]), "y": {"z": torch.tensor(6.0)}})
    assert_same(tree.zeros_like(a), {"x": torch.zeros(2), "y": {"z": torch.tensor(0.0)}})
    assert_same(
        tree.to(a, torch.float64), {"x": torch.tensor([1, 2.0]).double(), "y": {"z": torch.tensor(3.0).double()}}
    )


def test_map_refuses_trees_of_different_keys_at_any_depth():
    one = torch.ones(1)
    with pytest.raises(KeyError):
        tree.map(torch.add, {"a": one}, {"b": one})
    with pytest.raises(KeyError):
        tree.add({"a": {"x": one}}, {"a": {"x": one, "y": one}})


@pytest.mark.parametrize("key", ["a/b", "/", "", 3])
def test_keys_that_would_not_come_back_are_refused(key):
    with pytest.raises(KeyError):
        tree.to_bytes({"fine": {key: torch.ones(1)}})


GOOD = tree.to_bytes({"a": {"b": torch.ones(4)}})


@pytest.mark.parametrize(
    "data", [b"", b"x", b"\x00" * 64, b"\xff" * 64, b"\x80\x04K\x01.", GOOD[:-1], GOOD[:20], GOOD + b"x"]
)
def test_garbage_is_refused_with_an_exception(data):
    with pytest.raises(SafetensorError):
        tree.from_bytes(data)


@PROFILE
@given(st.binary(max_size=80), st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_no_bytes_crash_the_reader(noise, place, change):
    """Random bytes are refused; one changed byte is refused, or gives a tree whose leaves are tensors."""
    with pytest.raises(SafetensorError):
        tree.from_bytes(noise)
    damaged = GOOD[:place] + bytes([GOOD[place] ^ change]) + GOOD[place + 1 :]
    try:
        back = tree.from_bytes(damaged)
    except Exception:
        return
    assert all(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(back))


@pytest.mark.parametrize("paths", [("a", "a/b"), ("a/b", "a"), ("a/b", "a/b/c")])
def test_a_path_that_is_leaf_and_branch_is_refused(paths):
    with pytest.raises(ValueError, match=paths[0].split("/")[0]):
        tree.unflatten({path: torch.ones(1) for path in paths})


def test_nbytes_counts_what_is_sent():
    """6 floats of 4 bytes, 1 double of 8, 3 bools, a brain float of 2; an expanded tensor counts in full: 5 * 8."""
    t = {
        "f": torch.zeros(2, 3),
        "n": {"d": torch.tensor(1.0, dtype=torch.float64), "b": torch.ones(3, dtype=torch.bool), "e": {}},
        "h": torch.zeros(1, dtype=torch.bfloat16),
        "x": torch.zeros(1, dtype=torch.int64).expand(5),
        "z": torch.zeros(0, 7),
    }
    assert tree.nbytes(t) == 24 + 8 + 3 + 2 + 40
    assert tree.nbytes({}) == 0
