"""Random numbers by counter: what they are, that they do not depend on padding, and that they look random."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeep._util.counter_random import AFTER, FACTORS, STRIDES, drop, kept, mix, step_key, stream
from fedkeep.data.plan import make_plan

WRAP = 2**64


def word(key: int, number: int, place: tuple[int, ...]) -> int:
    """Return the word of 32 bits at one place, in Python's own numbers."""
    *leading, last = place
    z = (key % WRAP) ^ stream(number)
    z += sum(at * stride for at, stride in zip((last // 2, *reversed(leading)), STRIDES, strict=False))
    z %= WRAP
    z = (z ^ z >> 30) * FACTORS[0] % WRAP
    z = (z ^ z >> 27) * FACTORS[1] % WRAP
    z ^= z >> 31
    return z >> 32 if last % 2 else z % 2**32


@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 4), (5, 7), (2, 3, 5), (2, 3, 2, 3), (2, 1, 2, 1, 3), (2, 2, 1, 2, 2, 3)]
)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_draws_are_those_of_the_definition(shape: tuple[int, ...], p: float) -> None:
    """A word stands for "keep" if, with its highest bit flipped, it is at least p 2^32."""
    for key, number in ((5, 0), (-(2**63), 3), (2**63 - 1, 70)):
        flat = [
            (word(key, number, place) ^ 2**31) >= round(p * 2**32) for place in itertools.product(*map(range, shape))
        ]
        expected = torch.tensor(flat).reshape(shape)
        assert torch.equal(kept(torch.tensor(key), stream(number), shape, p), expected)


def test_the_draws_never_change() -> None:
    """Otherwise a resumed run would not continue the run that it resumes."""
    plan = make_plan(seed=3, round=2, client=5, n=8, epochs=2, batch_size=4)
    assert plan.dropout_keys.tolist() == [
        1714998833666302671,
        6916084491250367629,
        -7901740128948287358,
        -5128953148292652463,
    ]
    rows = kept(torch.tensor(plan.dropout_keys[1]), stream(1), (2, 16), 0.5).int()
    assert ["".join(map(str, row)) for row in rows.tolist()] == ["0000111111001000", "0001111011111100"]
    assert step_key(7, torch.tensor([0, 1])).tolist() == [8822960447821200054, 4141486537652137654]


@pytest.mark.parametrize("shape", [(4, 6), (3, 5, 7), (2, 3, 4, 5)])
def test_padding_at_the_end_of_any_axis_changes_no_draw(shape: tuple[int, ...]) -> None:
    key, inside = torch.tensor(11), tuple(slice(size) for size in shape)
    expected = kept(key, stream(0), shape, 0.5)
    for axis in range(len(shape)):
        longer = [size + 3 * (at == axis) for at, size in enumerate(shape)]
        assert torch.equal(kept(key, stream(0), longer, 0.5)[inside], expected)


@pytest.mark.parametrize("trailing", [(), (5,), (3, 4), (2, 1, 1, 2, 2, 3)])
def test_rows_after_the_batch_do_not_depend_on_its_length(trailing: tuple[int, ...]) -> None:
    key = torch.tensor(11)
    short, long = (kept(key, stream(0), (batch + 3, *trailing), 0.5, batch) for batch in (4, 9))
    assert torch.equal(short[:4], long[:4])
    assert torch.equal(short[4:], long[9:])
    if trailing:
        assert torch.equal(short[:4], kept(key, stream(0), (4, *trailing), 0.5))
        assert not torch.equal(short[4:], long[4:7]), "their positions are others than those of the batch"


def test_a_stack_draws_what_its_clients_draw() -> None:
    keys, x = torch.arange(3) * 10**17, torch.randn(3, 4, 5, dtype=torch.float64)
    stacked = torch.vmap(lambda x, key: drop(x, key, stream(2), 0.3))(x, keys)
    for k in range(3):
        assert torch.equal(stacked[k], drop(x[k], keys[k], stream(2), 0.3))
        on = kept(keys[k], stream(2), (4, 5), 0.3)
        assert torch.equal(stacked[k], torch.where(on, x[k] * (1 / 0.7), 0 * x[k]))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (5,), (2,) * 8])
def test_unusual_shapes(shape: tuple[int, ...]) -> None:
    assert kept(torch.tensor(1), stream(0), shape, 0.5).shape == shape


# Statistics: deviations in units of their standard deviation under independence. The keys are fixed, so a test that
# passes always passes.


def deviation(a: Tensor, b: Tensor, p: float) -> float:
    """Return the correlation of two sets of draws, times the root of their number."""
    a, b = (t.double().flatten() - (1 - p) for t in (a, b))
    return float((a * b).sum() / (len(a) ** 0.5 * p * (1 - p)))


def keys_of(*, seed: int = 0, round: int = 1, client: int = 0, steps: int = 16) -> Tensor:
    """Return the keys of a client's first steps."""
    return torch.from_numpy(make_plan(seed, round, client, n=steps, epochs=1, batch_size=1).dropout_keys)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_share_of_what_is_dropped(p: float) -> None:
    for key in keys_of(steps=4):
        off = ~kept(key, stream(0), (32, 64, 64), p)
        assert abs(float(off.sum()) - off.numel() * p) < 4 * (off.numel() * p * (1 - p)) ** 0.5
        for axis in range(3):  # and in every row along every axis
            others = [a for a in range(3) if a != axis]
            n = off.numel() // off.shape[axis]
            z = (off.sum(others).double() - n * p) / (n * p * (1 - p)) ** 0.5
            assert float(z.abs().max()) < 4.5
            assert abs(float((z**2).sum()) - len(z)) < 4 * (2 * len(z)) ** 0.5, "chi-square"


def test_every_byte_of_a_word_is_uniform() -> None:
    counter = torch.arange(1 << 18) * (STRIDES[0] - WRAP)
    for start in keys_of(steps=4):
        words = mix(start + counter).numpy()
        for byte in words.view(np.uint8).reshape(-1, 8).T:
            counts = np.bincount(byte, minlength=256)
            chi_square = ((counts - len(byte) / 256) ** 2).sum() / (len(byte) / 256)
            assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_along_every_axis_are_independent(p: float) -> None:
    for key in keys_of(steps=4):
        on = kept(key, stream(0), (48, 48, 48), p)
        for axis, lag in itertools.product(range(3), (1, 2, 3, 7, 16)):
            length = on.shape[axis] - lag
            assert abs(deviation(on.narrow(axis, 0, length), on.narrow(axis, lag, length), p)) < 4.5
        i, j = torch.triu_indices(48, 48, 1)
        assert abs(deviation(on[i, j], on[j, i], p)) < 4.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_clients_steps_rounds_seeds_and_layers_are_independent(p: float) -> None:
    """Masks of 4096 elements, all pairs: 32 x 31 / 2 correlations, whose squares sum to about their number."""

    def mask(key: Tensor, number: int = 0) -> Tensor:
        return kept(key, stream(number), (64, 64), p)

    families = {
        "steps": [mask(key) for key in keys_of(steps=32)],
        "clients": [mask(keys_of(client=k)[0]) for k in range(32)],
        "rounds": [mask(keys_of(round=r)[0]) for r in range(1, 33)],
        "seeds": [mask(keys_of(seed=s)[0]) for s in range(32)],
        "layers": [mask(keys_of()[0], number) for number in range(32)],
        "steps on a server": [mask(key) for key in step_key(7, torch.arange(32))],
        "seeds on a server": [mask(step_key(seed, torch.tensor(0))) for seed in range(32)],
    }
    for what, masks in families.items():
        z = torch.tensor([deviation(a, b, p) for a, b in itertools.combinations(masks, 2)])
        assert float(z.abs().max()) < 4.5, what
        assert abs(float((z**2).sum()) - len(z)) < 5 * (2 * len(z)) ** 0.5, what


def test_positions_do_not_meet() -> None:
    """No two places of a large tensor have the same counter, nor have the batch and what follows it."""
    sizes = (32, 8, 64, 16)
    places = [np.arange(size, dtype=np.uint64) * np.uint64(s) for size, s in zip(sizes, STRIDES, strict=False)]
    rows = np.concatenate([places[3], (np.arange(8, dtype=np.uint64) + np.uint64(AFTER)) * np.uint64(STRIDES[3])])
    counters = (rows[:, None, None, None] + places[2][:, None, None] + places[1][:, None] + places[0]).ravel()
    assert len(np.unique(counters)) == len(counters)


def test_it_works_inside_and_outside_of_transforms() -> None:
    """What a transform computes must not be kept for calls outside of it."""
    key, x = torch.tensor(1), torch.randn(7, 31)
    inside = torch.func.grad(lambda x: drop(x, key, stream(0), 0.5).sum())(x)
    assert torch.equal(drop(torch.ones_like(x), key, stream(0), 0.5), inside)
    stacked = torch.vmap(torch.func.grad(lambda x: drop(x, key, stream(0), 0.5).sum()))(x[None])
    assert torch.equal(stacked[0], inside)
