"""Dropout by counter for a stack of clients, as `fedkeep._util.counter_random` defines it. No mask is stored."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedkeep._util.counter_random import AFTER, FACTORS, SHIFTS, STRIDES, signed, threshold

_BLOCK = 1024
_S0, _S1, _S2, _S3 = (tl.constexpr(stride) for stride in STRIDES[:4])
_SHIFT0, _SHIFT1, _SHIFT2 = (tl.constexpr(bits) for bits in SHIFTS)
_FACTOR0, _FACTOR1 = (tl.constexpr(factor) for factor in FACTORS)


@triton.jit
def _drop(x, y, keys, n, stream, limit, scale, batch, jump, D1, D2, D3, BLOCK: tl.constexpr):
    """y = x * scale where the draw is at least `limit`, else 0, for x [K, n] and n elements [_, D1, D2, D3].

    From the element `batch` on, the counter has jumped ahead.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    client = tl.program_id(1)
    last, rows = i % D3, i // D3
    counter = (last // 2).to(tl.uint64) * _S0 + (rows % D2).to(tl.uint64) * _S1
    rows = rows // D2
    counter += (rows % D1).to(tl.uint64) * _S2 + (rows // D1).to(tl.uint64) * _S3
    counter += tl.where(i >= batch, jump, 0).to(tl.uint64)
    z = (tl.load(keys + client) ^ stream).to(tl.uint64) + counter
    z = (z ^ (z >> _SHIFT0)) * _FACTOR0
    z = (z ^ (z >> _SHIFT1)) * _FACTOR1
    z = z ^ (z >> _SHIFT2)
    word = tl.where(last % 2 == 1, z >> 32, z).to(tl.int32)
    place = client.to(tl.int64) * n + i
    value = tl.load(x + place, mask=i < n, other=0.0).to(tl.float32) * scale
    kept = tl.where(word >= limit, 1.0, 0.0)  # a factor, as in torch: NaN stays NaN
    tl.store(y + place, (value.to(y.dtype.element_ty) * kept).to(y.dtype.element_ty), mask=i < n)


def drop(x: Tensor, keys: Tensor, stream: int, p: float, batch: int | None) -> Tensor:
    """Return x [K, ...], contiguous, after dropout with the draws of the clients' keys [K]."""
    shape = x.shape[1:] if x.ndim > 2 else (*x.shape[1:], *[1] * (3 - x.ndim))
    n, y = math.prod(shape), torch.empty_like(x)
    sizes = (*[1] * (4 - len(shape)), *shape)
    jump = 0 if batch is None else signed((AFTER - batch) * STRIDES[len(shape) - 1] % 2**64)
    first = n if batch is None else batch * (n // shape[0])
    if y.numel():
        grid = (triton.cdiv(n, _BLOCK), len(x))
        _drop[grid](x, y, keys, n, stream, threshold(p), 1 / (1 - p), first, jump, *sizes[1:], BLOCK=_BLOCK)
    return y
