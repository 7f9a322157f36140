"""Random numbers as a function of a counter: the same ones on every device, for one client or a stack of them.

The generator is SplitMix64 (Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014): a hash of
the seed and the counter. Whole numbers have no rounding, so every runtime draws the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = 24  # of a random number: exact in float32 and above
_STEP, _EXAMPLE = 40, 20  # bits of the counter below the step's, and below the example's
_GOLDEN, _FIRST, _SECOND = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def uniform(seed: Tensor, step: int | Tensor, examples: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return uniform random numbers in [0, 1), `size` for each example of a step: seeds [...] -> [..., examples, size].

    The numbers of an example do not depend on how many others there are.

    >>> few, many = (uniform(torch.tensor(7), 0, examples, 3, torch.float32) for examples in (1, 5))
    >>> torch.equal(few, many[:1])
    True
    """
    example, number = (torch.arange(n, device=seed.device) for n in (examples, size))
    counter = (example[:, None] << _EXAMPLE) + number + 1 + (step << _STEP)
    bits = _shift(_hash(seed[..., None, None] + counter * _GOLDEN), 64 - _BITS)
    return torch.div(bits.to(dtype), 2**_BITS)


def _hash(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _FIRST
    z = (z ^ _shift(z, 27)) * _SECOND
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Return z shifted to the right; the sign is a bit like the others."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
