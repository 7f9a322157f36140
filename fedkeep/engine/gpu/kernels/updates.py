"""Steps of optimisers in place. Torch's fused kernels give a block 65,536 entries, which leaves most of a GPU idle."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _apply_sgd(w, v, step, lr, momentum, decay, real, MOMENTUM: tl.constexpr):
    """Take a step along a gradient: w -= lr * v with v = momentum * v + gradient + decay * w."""
    weight = tl.load(w, mask=real)
    if MOMENTUM:
        velocity = tl.load(v, mask=real)
        step += decay * weight + momentum * velocity
        tl.store(v, step, mask=real)
    else:
        step += decay * weight
    tl.store(w, weight - lr * step, mask=real)


@triton.jit
def _sgd(w, v, g, lr, momentum, decay, n, MOMENTUM: tl.constexpr, BLOCK: tl.constexpr):
    """Take a step of SGD along g."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _apply_sgd(w + at, v + at, tl.load(g + at, mask=at < n), tl.load(lr), momentum, decay, at < n, MOMENTUM)


@triton.jit
def _product_sgd(w, v, dy, x, lr, momentum, decay, B, O: tl.constexpr, I: tl.constexpr, MOMENTUM: tl.constexpr,
                 BB: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr):  # fmt: skip
    """Take a step of SGD along dy^T x, for a tile of one client's weights."""
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
        _apply_sgd(w + at, v + at, step, tl.load(lr), momentum, decay, None, MOMENTUM)
    else:
        _apply_sgd(w + at, v + at, step, tl.load(lr), momentum, decay, (o[:, None] < O) & (i[None, :] < I), MOMENTUM)


@triton.jit
def _load(at, row_real, column_real, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at, mask=row_real, other=0.0)
    else:
        return tl.load(at, mask=row_real & column_real, other=0.0)


@triton.jit
def _to_tf32(t):
    """Round to the nearest TF32 number: the matrix units would drop the last 13 bits, always towards zero."""
    bits = t.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & ~0x1FFF).to(tl.float32, bitcast=True)
    return tl.where(t == t, rounded, t)  # the bits of NaN could overflow


@triton.jit
def _adam(w, m, v, g, t, lr, log_beta1, log_beta2, share1, share2, eps, decay, n, BLOCK: tl.constexpr):
    """Take step t of Adam along g; share = 1 - beta."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    step = tl.load(t).to(tl.float32)
    weight = tl.load(w + at, mask=at < n)
    gradient = tl.load(g + at, mask=at < n) + decay * weight
    first, second = tl.load(m + at, mask=at < n), tl.load(v + at, mask=at < n)
    first += share1 * (gradient - first)
    second += share2 * (gradient * gradient - second)
    size = tl.sqrt_rn(second / _one_minus_exp(step * log_beta2)) + eps
    tl.store(m + at, first, mask=at < n)
    tl.store(v + at, second, mask=at < n)
    tl.store(w + at, weight - tl.load(lr) * (first / _one_minus_exp(step * log_beta1)) / size, mask=at < n)


@triton.jit
def _one_minus_exp(x):
    """Return 1 - e^x; by a series near 0, where the difference would lose its digits."""
    series = -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5))))
    return tl.where(x > -0.1, series, 1 - tl.exp(x))


def sgd_(w: Tensor, v: Tensor | None, g: Tensor, lr: Tensor, momentum: float, decay: float) -> None:
    """Take a step of SGD along g, in place; all contiguous."""
    n = w.numel()
    _sgd[(triton.cdiv(n, _BLOCK),)](
        w, w if v is None else v, g, lr, momentum, decay, n, v is not None, BLOCK=_BLOCK
    )  # fmt: skip


def product_sgd_(w: Tensor, v: Tensor | None, dy: Tensor, x: Tensor, lr: Tensor, momentum: float, decay: float) -> None:
    """Take a step of SGD along dy^T x, in place: w, v [K, O, I], dy [K, B, O] and x [K, B, I], all contiguous."""
    K, O, I = w.shape
    BO, BI = (max(16, min(64, triton.next_power_of_2(size))) for size in (O, I))
    grid = (triton.cdiv(I, BI), triton.cdiv(O, BO), K)
    _product_sgd[grid](
        w, w if v is None else v, dy, x, lr, momentum, decay, dy.shape[1], O, I, v is not None,
        BB=64, BO=BO, BI=BI, num_warps=4, num_stages=1,
    )  # fmt: skip


def adam_(
    w: Tensor, m: Tensor, v: Tensor, g: Tensor, t: Tensor, lr: Tensor, betas: tuple[float, float], eps: float,
    decay: float,
) -> None:  # fmt: skip
    """Take a step of Adam along g, in place; all contiguous. `t` counts the steps, this one included."""
    n, logs = w.numel(), [math.log(beta) if beta else -math.inf for beta in betas]
    _adam[(triton.cdiv(n, _BLOCK),)](w, m, v, g, t, lr, *logs, 1 - betas[0], 1 - betas[1], eps, decay, n, BLOCK=_BLOCK)
