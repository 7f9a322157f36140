"""Factors of convolutions: images, weights and gradients in the form that the kernels multiply.

They are channels last and padded, so that a patch is never outside of its image, and 16-bit numbers with a scale.
TF32, the usual type of a float32 product on a GPU, has 10 bits of mantissa, and so has float16, which is twice as fast
and half as large. What float16 lacks is range. So every image (every output channel of the weights) is multiplied by
the power of two that brings its largest number to between 2^14 and 2^15, and the result is divided by it: 10 bits for
all numbers down to 2^-28 of the largest. Sums are float32.

Symbols as in `convolution`; C' and O' are numbers of channels, rounded up to a multiple of 4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


class Geometry(NamedTuple):
    """A convolution's sizes."""

    size: tuple[int, int]  # H, W
    window: tuple[int, int]  # R, S
    stride: int
    pad: tuple[int, int]

    @property
    def output(self) -> tuple[int, int]:
        """OH, OW."""
        (H, W), (R, S), (p, q) = self.size, self.window, self.pad
        return (H + 2 * p - R) // self.stride + 1, (W + 2 * q - S) // self.stride + 1


class Factors(NamedTuple):
    """Factors of products, as float16, and what the result is to be multiplied by."""

    values: Tensor
    inverse: Tensor  # of the scales: [K, B], or [K, O] of weights


@triton.jit
def _scale(largest):
    """Return the power of two that brings a number to between 2^14 and 2^15, and its inverse."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 20), 250)
    scale = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _copy_images(x, y, inverse, B, xk, xb, xc, xh, xw, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
                 HP: tl.constexpr, WP: tl.constexpr, CP: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """y[image, i, j, c] = scale * x[image, c, i - TOP, j - LEFT], 0 outside of x."""
    image = tl.program_id(0).to(tl.int64)
    x += image // B * xk + image % B * xb
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, H * W * CP, BLOCK):
        at = start + tl.arange(0, BLOCK)
        c, j, i = at % CP, at // CP % W, at // (CP * W)
        value = tl.load(x + c * xc + i * xh + j * xw, mask=(i < H) & (c < C), other=0.0)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
    scale, back = _scale(tl.max(largest))
    tl.store(inverse + image, back)
    y += image * (HP * WP * CP)
    for start in range(0, HP * WP * CP, BLOCK):
        at = start + tl.arange(0, BLOCK)
        c, j, i = at % CP, at // CP % WP - LEFT, at // (CP * WP) - TOP
        inside = (i >= 0) & (i < H) & (j >= 0) & (j < W) & (c < C)
        value = tl.load(x + c * xc + i * xh + j * xw, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + at, (value * scale).to(tl.float16), mask=at < HP * WP * CP)


@triton.jit
def _copy_weights(w, y, inverse, wk, wo, wc, wr, ws, O: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
                  R: tl.constexpr, S: tl.constexpr, TURN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """y[client, o, r, s, c] = scale[client, o] * w[client, o, c, r, s], rotated by 180 degrees if TURN."""
    client, o = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w += client * wk + o * wo
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, R * S * CP, BLOCK):
        at = start + tl.arange(0, BLOCK)
        c, s, r = at % CP, at // CP % S, at // (CP * S)
        value = tl.load(w + c * wc + r * wr + s * ws, mask=(r < R) & (c < C), other=0.0)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
    scale, back = _scale(tl.max(largest))
    tl.store(inverse + client * O + o, back)
    y += (client * O + o) * (R * S * CP)
    for start in range(0, R * S * CP, BLOCK):
        at = start + tl.arange(0, BLOCK)
        c, s, r = at % CP, at // CP % S, at // (CP * S)
        if TURN:
            s, r = S - 1 - s, R - 1 - r
        value = tl.load(w + c * wc + r * wr + s * ws, mask=(at < R * S * CP) & (c < C), other=0.0).to(tl.float32)
        tl.store(y + at, (value * scale).to(tl.float16), mask=at < R * S * CP)


@triton.jit
def _cut_gradient(dy, kept, m, o, to, dh, dw, do, PH: tl.constexpr, PW: tl.constexpr, O: tl.constexpr,
                  POOL: tl.constexpr, RELU: tl.constexpr):  # fmt: skip
    """Return the gradient of pixels m and channels o of an image, 0 where ReLU cut its output."""
    real = (m[:, None] < PH * PW) & (o[None, :] < O)
    value = tl.load(dy + (m // PW * dh + m % PW * dw)[:, None] + o[None, :] * do, mask=real, other=0.0).to(tl.float32)
    if POOL:  # kept is the place of the maximum
        value = tl.where(tl.load(kept + to, mask=real, other=4).to(tl.int32) == 4, 0.0, value)
    elif RELU:  # kept is the output
        value = tl.where(tl.load(kept + to, mask=real, other=0.0) <= 0, 0.0, value)
    return value


@triton.jit
def _gather_gradient(dy, kept, g, inverse, parts, B, dk, db, dh, dw, do, PH: tl.constexpr, PW: tl.constexpr,
                     O: tl.constexpr, POOL: tl.constexpr, RELU: tl.constexpr, BM: tl.constexpr,
                     BO: tl.constexpr):  # fmt: skip
    """g[image, m, o] = scale * dy, channels last, 0 where ReLU cut; parts[image, o] = the sum of dy over the pixels."""
    image = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BO)
    dy += image // B * dk + image % B * db
    kept += image * (PH * PW * O)
    g += image * (PH * PW * O)
    total = tl.zeros((BM, BO), dtype=tl.float32)
    largest = tl.zeros((BM, BO), dtype=tl.float32)
    for start in range(0, PH * PW, BM):
        m = start + tl.arange(0, BM)
        to = m[:, None] * O + o[None, :]
        value = _cut_gradient(dy, kept, m, o, to, dh, dw, do, PH, PW, O, POOL, RELU)
        total += value
        largest = tl.maximum(largest, tl.abs(value))
    scale, back = _scale(tl.max(largest))
    tl.store(inverse + image, back)
    tl.store(parts + image * O + o, tl.sum(total, 0), mask=o < O)
    for start in range(0, PH * PW, BM):
        m = start + tl.arange(0, BM)
        to = m[:, None] * O + o[None, :]
        value = _cut_gradient(dy, kept, m, o, to, dh, dw, do, PH, PW, O, POOL, RELU)
        tl.store(g + to, (value * scale).to(tl.float16), mask=(m[:, None] < PH * PW) & (o[None, :] < O))


@triton.jit
def _spread_gradient(g, place, y, OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr, OP: tl.constexpr,
                     HP: tl.constexpr, WP: tl.constexpr, STRIDE: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
                     POOL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """y[image, i, j, o] = gradient of output pixel ((i - TOP) / STRIDE, (j - LEFT) / STRIDE), 0 where there is none."""
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o, j, i = at % OP, at // OP % WP - LEFT, at // (OP * WP) - TOP
    row, column = i // STRIDE, j // STRIDE
    if POOL:
        EH: tl.constexpr = OH // 2 * 2  # what is beyond the last window has no gradient
        EW: tl.constexpr = OW // 2 * 2
        real = (i >= 0) & (row < EH) & (j >= 0) & (column < EW)
    else:
        real = (i >= 0) & (row < OH) & (j >= 0) & (column < OW)
    real = real & (o < O)
    if STRIDE > 1:
        real = real & (i % STRIDE == 0) & (j % STRIDE == 0)
    if POOL:
        to = image * (OH // 2 * (OW // 2) * O) + (row // 2 * (OW // 2) + column // 2) * O + o
        value = tl.load(g + to, mask=real, other=0.0)
        index = tl.load(place + to, mask=real, other=4).to(tl.int32)
        value = tl.where(index == row % 2 * 2 + column % 2, value, 0.0).to(tl.float16)
    else:
        value = tl.load(g + image * (OH * OW * O) + (row * OW + column) * O + o, mask=real, other=0.0)
    tl.store(y + image * (HP * WP * OP) + at, value, mask=at < HP * WP * OP)


def prepare_images(x: Tensor, pad: tuple[int, int]) -> Factors:
    """Copy x [K, B, C, H, W], of any strides, to factors [K, B, H + 2 pad, W + 2 pad, C'], C' a multiple of 4.

    Where all clients have the same images (stride 0), they are copied once.
    """
    K, B, C, H, W = x.shape
    k = 1 if K > 1 and x.stride(0) == 0 else K
    HP, WP, CP = H + 2 * pad[0], W + 2 * pad[1], -(-C // 4) * 4
    y = torch.empty(k, B, HP, WP, CP, dtype=torch.float16, device=x.device)
    inverse = torch.empty(k, B, device=x.device)
    block = min(4096, triton.next_power_of_2(HP * WP * CP))
    _copy_images[(k * B,)](
        x, y, inverse, B, *x.stride(), H, W, C, HP, WP, CP, *pad, BLOCK=block, num_warps=8 if block > 1024 else 4
    )
    return Factors(y.expand(K, B, HP, WP, CP), inverse.expand(K, B))


def prepare_weights(w: Tensor) -> Factors:
    """Copy w [K, O, C, R, S] to factors [K, O, R, S, C']."""
    return _prepare_weights(w, turn=False)


def prepare_rotated_weights(w: Tensor) -> Factors:
    """Copy w [K, O, C, R, S] to factors [K, C, R, S, O'], rotated by 180 degrees.

    They convolve the output's gradient into the input's.
    """
    return _prepare_weights(w.transpose(1, 2), turn=True)


def _prepare_weights(w: Tensor, turn: bool) -> Factors:
    K, O, C, R, S = w.shape
    CP = -(-C // 4) * 4
    y = torch.empty(K, O, R, S, CP, dtype=torch.float16, device=w.device)
    inverse = torch.empty(K, O, device=w.device)
    block = min(2048, triton.next_power_of_2(R * S * CP))
    _copy_weights[(K, O)](w, y, inverse, *w.stride(), O, C, CP, R, S, turn, BLOCK=block)
    return Factors(y, inverse)


def gather_gradient(dy: Tensor, kept: Tensor | None) -> tuple[Factors, Tensor]:
    """Copy the output's gradient dy [K, B, O, OH, OW], of any strides, to factors [K, B, OH, OW, O].

    Also return its sum over the pixels of each image, [K, B, O].

    `kept` is the output after ReLU, or the places of the maxima of a pooled output, or None: where ReLU cut off a
    value, its gradient is 0.
    """
    K, B, O, PH, PW = dy.shape
    pooled = kept is not None and kept.dtype == torch.uint8
    BO = triton.next_power_of_2(O)
    BM = max(1, min(4096 // BO, triton.next_power_of_2(PH * PW)))
    g = torch.empty(K, B, PH, PW, O, dtype=torch.float16, device=dy.device)
    inverse, parts = torch.empty(K, B, device=dy.device), torch.empty(K, B, O, device=dy.device)
    dk, db, do, dh, dw = dy.stride()
    _gather_gradient[(K * B,)](
        dy, g if kept is None else kept, g, inverse, parts, B, dk, db, dh, dw, do,
        PH, PW, O, pooled, kept is not None, BM=BM, BO=BO, num_warps=8 if BM * BO > 1024 else 4,
    )  # fmt: skip
    return Factors(g, inverse), parts


def spread_gradient(g: Factors, place: Tensor | None, geometry: Geometry, channels: int) -> Factors:
    """Spread the gradient of the outputs over their places in the image, with zeros in between and around.

    From [K, B, OH, OW, O], or that of pooled outputs, to [K, B, H + R - 1, W + S - 1, channels].
    """
    K, B, O = g.values.shape[0], g.values.shape[1], g.values.shape[-1]
    (H, W), (R, S), (OH, OW) = geometry.size, geometry.window, geometry.output
    HP, WP, top, left = H + R - 1, W + S - 1, R - 1 - geometry.pad[0], S - 1 - geometry.pad[1]
    wide = torch.empty(K, B, HP, WP, channels, dtype=torch.float16, device=g.values.device)
    _spread_gradient[(K * B, triton.cdiv(HP * WP * channels, _BLOCK))](
        g.values, g.values if place is None else place, wide, OH, OW, O, channels, HP, WP, geometry.stride, top, left,
        place is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    return Factors(wide, g.inverse)
