"""Sums over the examples of a dense layer, for a stack of models."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_rows(x, y, B, xk, xb, xo, O: tl.constexpr, BB: tl.constexpr, BO: tl.constexpr):
    """y[client, o] = sum of x[client, b, o] over b."""
    client = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    total = tl.zeros((BB, BO), dtype=tl.float32)
    for start in range(0, B, BB):
        b = start + tl.arange(0, BB)
        real = (b[:, None] < B) & (o[None, :] < O)
        total += tl.load(x + client * xk + b[:, None] * xb + o[None, :] * xo, mask=real, other=0.0).to(tl.float32)
    tl.store(y + client * O + o, tl.sum(total, 0).to(y.dtype.element_ty), mask=o < O)


def sum_rows(x: Tensor) -> Tensor:
    """Return the sum of x [K, B, O], of any strides, over its middle axis: [K, O]."""
    K, B, O = x.shape
    y = torch.empty(K, O, dtype=x.dtype, device=x.device)
    BO = min(128, triton.next_power_of_2(O))
    BB = max(1, min(triton.next_power_of_2(B), 4096 // BO))
    _sum_rows[(K, triton.cdiv(O, BO))](x, y, B, *x.stride(), O, BB=BB, BO=BO)
    return y
