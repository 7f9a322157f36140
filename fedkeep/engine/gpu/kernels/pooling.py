"""Max pooling in windows that do not overlap, channels last, where no convolution comes before it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _pool(x, y, argmax, n, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr):
    """Write the maximum of every P x P window of x [N, H, W, C], and its index in the window."""
    OH: tl.constexpr = H // P
    OW: tl.constexpr = W // P
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, ow, oh, image = i % C, i // C % OW, i // (C * OW) % OH, i // (C * OW * OH)
    corner = x + ((image * H + oh * P) * W + ow * P) * C + c
    best = tl.load(corner, mask=i < n, other=0.0)
    index = tl.zeros((BLOCK,), dtype=tl.int32)
    for j in tl.static_range(1, P * P):
        value = tl.load(corner + (j // P * W + j % P) * C, mask=i < n, other=0.0)
        larger = (value > best) | (value != value)  # as in torch, NaN is larger than every number
        best, index = tl.where(larger, value, best), tl.where(larger, j, index)
    tl.store(y + i, best, mask=i < n)
    tl.store(argmax + i, index.to(tl.uint8), mask=i < n)


@triton.jit
def _pool_gradient(dy, argmax, dx, n, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """Write the gradient of each output to the position of its maximum, and 0 to the rest of its window."""
    OH: tl.constexpr = H // P
    OW: tl.constexpr = W // P
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, ow, oh, image = i % C, i // C % OW, i // (C * OW) % OH, i // (C * OW * OH)
    corner = dx + ((image * H + oh * P) * W + ow * P) * C + c
    grad = tl.load(dy + i, mask=i < n, other=0.0)
    index = tl.load(argmax + i, mask=i < n, other=0).to(tl.int32)
    for j in tl.static_range(P * P):
        tl.store(corner + (j // P * W + j % P) * C, tl.where(index == j, grad, 0.0), mask=i < n)


def pool(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Max-pool contiguous x [..., H, W, C]; return values and indices in the window."""
    H, W, C = x.shape[-3:]
    y = x.new_empty(*x.shape[:-3], H // size, W // size, C)
    argmax = torch.empty(y.shape, dtype=torch.uint8, device=x.device)
    grid = (triton.cdiv(y.numel(), _BLOCK),)
    _pool[grid](x, y, argmax, y.numel(), H, W, C, size, BLOCK=_BLOCK)
    return y, argmax


def pool_gradient(dy: Tensor, argmax: Tensor, shape: Any, size: int) -> Tensor:
    """Return the gradient of the input of `pool`, of the given shape, from contiguous dy [..., OH, OW, C]."""
    H, W, C = shape[-3:]
    exact = H % size == 0 and W % size == 0
    dx = dy.new_empty(shape) if exact else dy.new_zeros(shape)
    _pool_gradient[(triton.cdiv(dy.numel(), _BLOCK),)](
        dy, argmax, dx, dy.numel(), H, W, C, size, BLOCK=_BLOCK
    )  # fmt: skip
    return dx
