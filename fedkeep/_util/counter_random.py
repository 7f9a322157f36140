"""Random numbers by counter: a hash of a key and a position, not a sequence with a state.

Whoever knows the key draws the same numbers, in any order: for one client or for a stack of clients under `vmap`, on a
CPU or on a GPU, in a CUDA graph or in a replay. Everything is computed in whole numbers of 64 bits, which wrap around,
so the numbers are the same everywhere, bit for bit.

The hash is that of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
Its counter is a sum over the axes of a tensor, each with its own stride. Therefore a tensor that is longer along some
axes, because of padding, begins with the numbers of the shorter one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedkeep._util.private_apis import active_transforms

# Of the position along each axis, the last axis first: the golden ratio, then the roots of 7, 11, 13, 17 and 3. These
# are the first 64 bits after the point; all of them are odd.
STRIDES = (
    0x9E3779B97F4A7C15,
    0xA54FF53A5F1D36F1,
    0x510E527FADE682D1,
    0x9B05688C2B3E6C1F,
    0x1F83D9ABFB41BD6B,
    0xBB67AE8584CAA73B,
)
SHIFTS = (30, 27, 31)
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
AFTER = 1 << 32  # the position along the first axis of what comes after the batch, however long the batch is
_BITS = 24  # of a uniform number: exact in float32 and above
_STEP, _EXAMPLE = 40, 20  # bits of its counter below the step's, and below the example's
_STREAM = 0xD1B54A32D192ED03
_SMALL = 1 << 16  # elements of a tensor whose counters are kept from call to call


def mix(z: Tensor) -> Tensor:
    """Return the hash of whole numbers, int64: distinct ones for distinct numbers.

    >>> mix(torch.tensor([0, 1, 2]))
    tensor([                   0,  6238072747940578789, -2606959012126976886])
    """
    first, second, last = SHIFTS
    z = (z ^ _shifted(z, first)) * signed(FACTORS[0])
    z = (z ^ _shifted(z, second)) * signed(FACTORS[1])
    return z ^ _shifted(z, last)


def uniform(seed: Tensor, step: int | Tensor, examples: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return uniform random numbers in [0, 1), `size` for each example of a step: seeds [...] -> [..., examples, size].

    The numbers of an example do not depend on how many others there are.

    >>> few, many = (uniform(torch.tensor(7), 0, examples, 3, torch.float32) for examples in (1, 5))
    >>> torch.equal(few, many[:1])
    True
    """
    example, number = (torch.arange(n, device=seed.device) for n in (examples, size))
    counter = (example[:, None] << _EXAMPLE) + number + 1 + (step << _STEP)
    bits = _shifted(mix(seed[..., None, None] + counter * signed(STRIDES[0])), 64 - _BITS)
    return torch.div(bits.to(dtype), 2**_BITS)


def step_key(seed: int, step: Tensor) -> Tensor:
    """Return the key of a step, counted by a tensor, in training with this seed."""
    return mix(step * signed(STRIDES[0]) + signed(seed * STRIDES[1] % 2**64))


def stream(number: int) -> int:
    """Return what distinguishes the draws of one call from those of other calls with the same key.

    It is odd and has 63 bits, so that a kernel gets the same kind of argument at every call.
    """
    return (number + 1) * _STREAM % 2**62 | 2**62 | 1


def threshold(p: float) -> int:
    """Return the smallest word of 32 bits, as an int32, that stands for "keep", with 0 < p < 1."""
    return min(max(round(p * 2**32), 1), 2**32 - 1) - 2**31


def kept(key: Tensor, stream: int, shape: Sequence[int], p: float, batch: int | None = None) -> Tensor:
    """Return which elements of a tensor of this shape are kept, each with probability 1 - p.

    `key` is a single int64. `batch` is the number of rows of the batch, if other rows follow it. Every hash gives two
    words of 32 bits, for two neighbours along the last axis.

    >>> key = torch.tensor(7)
    >>> short, long = kept(key, stream(0), (2, 3), 0.5), kept(key, stream(0), (3, 8), 0.5)
    >>> short
    tensor([[ True, False,  True],
            [ True,  True, False]])
    >>> torch.equal(long[:2, :3], short)
    True
    """
    if not 0 < len(shape) <= len(STRIDES):
        merged = (math.prod(shape[: 1 - len(STRIDES)]), *shape[1 - len(STRIDES) :])
        rows = None if batch is None else batch * (merged[0] // shape[0])
        return kept(key, stream, merged, p, rows).reshape(tuple(shape))
    if len(shape) == 1:
        return kept(key, stream, (*shape, 1), p, batch)[:, 0]
    counters = (_kept_counters if _may_keep(shape, key.device) else _counters)(tuple(shape), batch, key.device)
    words, smallest = mix((key ^ stream) + counters), threshold(p)
    pairs = torch.stack([words.to(torch.int32) >= smallest, words >> 32 >= smallest], -1).flatten(-2)
    return pairs if shape[-1] % 2 == 0 else pairs[..., :-1]


def _counters(shape: tuple[int, ...], batch: int | None, device: torch.device) -> Tensor:
    """Return the counter of every second element along the last axis."""
    *leading, last = shape
    counters = torch.arange((last + 1) // 2, device=device) * signed(STRIDES[0])
    for axis, size in enumerate(reversed(leading), start=1):
        position = torch.arange(size, device=device)
        if axis == len(leading) and batch is not None:
            position = position + (position >= batch) * (AFTER - batch)
        counters = counters + (position * signed(STRIDES[axis])).reshape(size, *[1] * axis)
    return counters


_kept_counters = functools.lru_cache(maxsize=64)(_counters)


def _may_keep(shape: Sequence[int], device: torch.device) -> bool:
    """Return whether counters may be kept for other calls: not what a CUDA graph or a gradient transform computes."""
    return device.type == "cpu" and math.prod(shape) <= _SMALL and active_transforms() in ((), ("vmap",))


def drop(x: Tensor, key: Tensor, stream: int, p: float, batch: int | None = None) -> Tensor:
    """Return x with each element set to 0 with probability p, and the others divided by 1 - p, for 0 < p < 1."""
    return (x * (1 / (1 - p))) * kept(key, stream, x.shape, p, batch)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch fills with the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def signed(number: int) -> int:
    """Return a number of 64 bits as torch's int64 holds it."""
    return number - 2**64 if number >= 2**63 else number
