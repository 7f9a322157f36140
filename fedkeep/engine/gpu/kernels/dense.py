"""Sums and weight updates of dense layers, for a stack of models."""

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


@triton.jit
def _to_tf32(t):
    """Round to the nearest TF32 number: the matrix units would drop the last 13 bits, always towards zero."""
    bits = t.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & ~0x1FFF).to(tl.float32, bitcast=True)
    return tl.where(t == t, rounded, t)  # the bits of NaN could overflow


@triton.jit
def _sgd(w, v, dy, x, lr, momentum, decay, B, O: tl.constexpr, I: tl.constexpr, MOMENTUM: tl.constexpr,
         BB: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr):  # fmt: skip
    """w -= lr * v with v = momentum * v + dy^T x + decay * w, for a tile of one client's weights."""
    client = tl.program_id(2).to(tl.int64)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    WHOLE: tl.constexpr = O % BO == 0 and I % BI == 0  # no tile is cut off: fewer registers
    at = client * O * I + o[:, None] * I + i[None, :]
    dy += client * B * O
    x += client * B * I
    step = tl.zeros((BO, BI), dtype=tl.float32)
    for start in range(0, B, BB):
        b = start + tl.arange(0, BB)
        left = _load(dy + b[:, None] * O + o[None, :], b[:, None] < B, o[None, :] < O, WHOLE)
        right = _load(x + b[:, None] * I + i[None, :], b[:, None] < B, i[None, :] < I, WHOLE)
        step = tl.dot(tl.trans(_to_tf32(left)), _to_tf32(right), step, input_precision="tf32")
    if WHOLE:
        _apply_step(w + at, v + at, step, tl.load(lr), momentum, decay, None, MOMENTUM)
    else:
        _apply_step(w + at, v + at, step, tl.load(lr), momentum, decay, (o[:, None] < O) & (i[None, :] < I), MOMENTUM)


@triton.jit
def _load(at, row_real, column_real, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at, mask=row_real, other=0.0)
    else:
        return tl.load(at, mask=row_real & column_real, other=0.0)


@triton.jit
def _apply_step(w, v, step, lr, momentum, decay, real, MOMENTUM: tl.constexpr):
    weight = tl.load(w, mask=real)
    if MOMENTUM:
        velocity = tl.load(v, mask=real)
        step += decay * weight + momentum * velocity
        tl.store(v, step, mask=real)
    else:
        step += decay * weight
    tl.store(w, weight - lr * step, mask=real)


def sum_rows(x: Tensor) -> Tensor:
    """Return the sum of x [K, B, O], of any strides, over its middle axis: [K, O]."""
    K, B, O = x.shape
    y = torch.empty(K, O, dtype=x.dtype, device=x.device)
    BO = min(128, triton.next_power_of_2(O))
    BB = max(1, min(triton.next_power_of_2(B), 4096 // BO))
    _sum_rows[(K, triton.cdiv(O, BO))](x, y, B, *x.stride(), O, BB=BB, BO=BO)
    return y


def sgd_(w: Tensor, v: Tensor | None, dy: Tensor, x: Tensor, lr: Tensor, momentum: float, decay: float) -> None:
    """Take a step of SGD along dy^T x, in place: w, v [K, O, I], dy [K, B, O] and x [K, B, I], all contiguous."""
    K, O, I = w.shape
    BO, BI = (max(16, min(64, triton.next_power_of_2(size))) for size in (O, I))
    grid = (triton.cdiv(I, BI), triton.cdiv(O, BO), K)
    _sgd[grid](
        w, w if v is None else v, dy, x, lr, momentum, decay, dy.shape[1], O, I, v is not None,
        BB=64, BO=BO, BI=BI, num_warps=4, num_stages=1,
    )  # fmt: skip
