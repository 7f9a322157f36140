"""Group normalisation of a stack of models, channels last, with ReLU, and its gradients.

One program has one group of channels of one image. Symbols as in `convolution`; G groups of D channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedkeep.engine.gpu.kernels.dense import sum_rows

_TILE = 4096  # numbers of a group that a program has at a time


@triton.jit
def _places(start, d, P: tl.constexpr, D: tl.constexpr, BP: tl.constexpr):
    """Return the pixels of a tile, and which places of the tile are real."""
    p = start + tl.arange(0, BP)
    return p, (p[:, None] < P) & (d[None, :] < D)


@triton.jit
def _values(x, p, c, xp, xc, real):
    """Load a tile; 0 at places that are not real."""
    return tl.load(x + p[:, None] * xp + c[None, :] * xc, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _cut_gradient(dy, y, p, c, dp, dc, real, C: tl.constexpr, RELU: tl.constexpr):
    """Load a tile of the output's gradient, 0 where ReLU cut the output."""
    g = _values(dy, p, c, dp, dc, real)
    if RELU:
        g = tl.where(tl.load(y + p[:, None] * C + c[None, :], mask=real, other=0.0) <= 0, 0.0, g)
    return g


@triton.jit
def _normalise(x, weight, bias, y, mean, rstd, B, eps, xk, xb, xc, xp, P: tl.constexpr, C: tl.constexpr,
               D: tl.constexpr, AFFINE: tl.constexpr, RELU: tl.constexpr, BP: tl.constexpr,
               BD: tl.constexpr):  # fmt: skip
    """y[image, p, c] = weight[c] * (x - mean) * rstd + bias[c], mean and rstd of the image's group."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    client = image // B
    d = tl.arange(0, BD)
    c = group * D + d
    x += client * xk + image % B * xb
    total = tl.zeros((BP, BD), dtype=tl.float32)
    for start in range(0, P, BP):
        p, real = _places(start, d, P, D, BP)
        total += _values(x, p, c, xp, xc, real)
    centre = tl.sum(total) / (P * D)
    total = tl.zeros((BP, BD), dtype=tl.float32)
    for start in range(0, P, BP):
        p, real = _places(start, d, P, D, BP)
        value = _values(x, p, c, xp, xc, real) - centre
        total += tl.where(real, value * value, 0.0)
    scale = 1 / tl.sqrt(tl.sum(total) / (P * D) + eps)
    tl.store(mean + image * (C // D) + group, centre)
    tl.store(rstd + image * (C // D) + group, scale)
    w = tl.full((BD,), 1.0, dtype=tl.float32)
    b = tl.zeros((BD,), dtype=tl.float32)
    if AFFINE:
        w = tl.load(weight + client * C + c, mask=d < D, other=0.0).to(tl.float32)
        b = tl.load(bias + client * C + c, mask=d < D, other=0.0).to(tl.float32)
    for start in range(0, P, BP):
        p, real = _places(start, d, P, D, BP)
        value = _values(x, p, c, xp, xc, real)
        value = (value - centre) * scale * w[None, :] + b[None, :]
        if RELU:
            value = tl.where(value <= 0, 0.0, value)
        tl.store(y + (image * P + p[:, None]) * C + c[None, :], value.to(y.dtype.element_ty), mask=real)


@triton.jit
def _gradient(dy, y, x, weight, mean, rstd, dx, parts, B, dk, db, dc, dp, xk, xb, xc, xp, P: tl.constexpr,
              C: tl.constexpr, D: tl.constexpr, AFFINE: tl.constexpr, RELU: tl.constexpr, BP: tl.constexpr,
              BD: tl.constexpr):  # fmt: skip
    """Write dx, and each image's part of the gradients of weight and bias: parts[0 or 1, image, c]."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    client = image // B
    d = tl.arange(0, BD)
    c = group * D + d
    x += client * xk + image % B * xb
    dy += client * dk + image % B * db
    y += image * (P * C)
    centre = tl.load(mean + image * (C // D) + group)
    scale = tl.load(rstd + image * (C // D) + group)
    w = tl.full((BD,), 1.0, dtype=tl.float32)
    if AFFINE:
        w = tl.load(weight + client * C + c, mask=d < D, other=0.0).to(tl.float32)
    sum_g = tl.zeros((BP, BD), dtype=tl.float32)
    sum_gx = tl.zeros((BP, BD), dtype=tl.float32)
    for start in range(0, P, BP):
        p, real = _places(start, d, P, D, BP)
        g = _cut_gradient(dy, y, p, c, dp, dc, real, C, RELU)
        value = _values(x, p, c, xp, xc, real)
        sum_g += g
        sum_gx += g * (value - centre) * scale
    by_channel, by_channel_x = tl.sum(sum_g, 0), tl.sum(sum_gx, 0)
    images = tl.num_programs(0).to(tl.int64)
    tl.store(parts + image * C + c, by_channel_x, mask=d < D)
    tl.store(parts + (images + image) * C + c, by_channel, mask=d < D)
    first = tl.sum(by_channel * w) / (P * D)
    second = tl.sum(by_channel_x * w) / (P * D)
    for start in range(0, P, BP):
        p, real = _places(start, d, P, D, BP)
        g = _cut_gradient(dy, y, p, c, dp, dc, real, C, RELU)
        value = _values(x, p, c, xp, xc, real)
        out = scale * (g * w[None, :] - first - (value - centre) * scale * second)
        tl.store(dx + (image * P + p[:, None]) * C + c[None, :], out.to(dx.dtype.element_ty), mask=real)


def normalise(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [K, B, C, ...] normalised, [K, B, ..., C], after ReLU if `relu`; mean and 1 / deviation, [K, B, G]."""
    K, B, C = x.shape[:3]
    y = torch.empty(K, B, *x.shape[3:], C, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(K, B, groups, device=x.device) for _ in range(2))
    pixels, affine = x.flatten(3), weight is not None
    BP, BD, warps = _tile(pixels.shape[3], C // groups)
    _normalise[(K * B, groups)](
        pixels, weight if affine else x, bias if affine else x, y, mean, rstd, B, eps, *pixels.stride(),
        pixels.shape[3], C, C // groups, affine, relu, BP=BP, BD=BD, num_warps=warps,
    )  # fmt: skip
    return y, mean, rstd


def gradients(
    dy: Tensor, y: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and of weight and bias, [K, C], from dy [K, B, C, ...] of any strides.

    The gradient of x is [K, B, ..., C].
    """
    K, B, C = x.shape[:3]
    groups, pixels, dy = mean.shape[-1], x.flatten(3), dy.flatten(3)
    dx = torch.empty(K, B, *x.shape[3:], C, dtype=x.dtype, device=x.device)
    parts = torch.empty(2, K, B, C, device=x.device)
    BP, BD, warps = _tile(pixels.shape[3], C // groups)
    _gradient[(K * B, groups)](
        dy, y, pixels, x if weight is None else weight, mean, rstd, dx, parts, B, *dy.stride(), *pixels.stride(),
        pixels.shape[3], C, C // groups, weight is not None, relu, BP=BP, BD=BD, num_warps=warps,
    )  # fmt: skip
    dw, db = sum_rows(parts.flatten(0, 1)).view(2, K, C)
    return dx, dw, db


def _tile(pixels: int, channels: int) -> tuple[int, int, int]:
    """Return the tile's pixels and channels, and the number of warps."""
    BD = triton.next_power_of_2(channels)
    BP = max(1, min(triton.next_power_of_2(pixels), _TILE // BD))
    return BP, BD, 8 if BP * BD >= _TILE else 4
