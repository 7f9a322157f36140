"""Triton kernels for a stack of models: convolution as an implicit matrix product, its gradients, and max pooling.

Every client has its own weights. To cuDNN that is a grouped convolution, for which it is slow. Here the client is one
axis of the grid and images are channels-last. Each program gathers the image patches of its tile while it multiplies
them, so the patch matrix is never written to memory.

Symbols: K clients, B images per client, H x W the image, C input channels, R x S the window, O output channels,
OH x OW the output. Kernel arguments xk, xb, xh, xw, xc are the strides of x. BM, BK, BO are tile sizes: output pixels,
patch entries, output channels. `TRITON_INTERPRET=1` runs the kernels on the CPU, as `make test-kernels` does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _patches(k, m, B, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, S: tl.constexpr, RSC: tl.constexpr,
             OH: tl.constexpr, OW: tl.constexpr, stride: tl.constexpr, pad_h: tl.constexpr, pad_w: tl.constexpr,
             xb, xh, xw, xc):  # fmt: skip
    """Return the offsets of patch entries k [1, BK] of output pixels m [BM, 1], and whether they are inside x."""
    b, oh, ow = m // (OH * OW), m // OW % OH, m % OW
    r, s, c = k // (S * C), k // C % S, k % C
    ih, iw = oh * stride - pad_h + r, ow * stride - pad_w + s
    inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & (b < B) & (k < RSC)
    return b * xb + ih * xh + iw * xw + c * xc, inside


@triton.jit
def _forward(x, w, bias, y, B, xk, xb, xh, xw, xc,
             H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
             OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr, stride: tl.constexpr,
             pad_h: tl.constexpr, pad_w: tl.constexpr, HAS_BIAS: tl.constexpr,
             BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr):  # fmt: skip
    """y[client, m, o] = sum over the patch of pixel m of x times w, plus bias[client, o]."""
    RSC: tl.constexpr = R * S * C
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    x += client * xk
    w += client * RSC * O
    y += client * B * OH * OW * O
    total = tl.zeros((BM, BO), dtype=tl.float32)
    for start in range(0, RSC, BK):
        k = start + tl.arange(0, BK)
        offsets, inside = _patches(
            k[None, :], m[:, None], B, H, W, C, S, RSC, OH, OW, stride, pad_h, pad_w, xb, xh, xw, xc
        )  # fmt: skip
        patch = tl.load(x + offsets, mask=inside, other=0.0)
        weight = tl.load(w + k[:, None] * O + o[None, :], mask=(k[:, None] < RSC) & (o[None, :] < O), other=0.0)
        total = tl.dot(patch, weight, total, input_precision="tf32")
    if HAS_BIAS:
        total += tl.load(bias + client * O + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + m[:, None] * O + o[None, :],
        total.to(y.dtype.element_ty),
        mask=(m[:, None] < B * OH * OW) & (o[None, :] < O),
    )


@triton.jit
def _weight_gradient(x, dy, dw, B, clients, span, xk, xb, xh, xw, xc,
                     H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
                     OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr, stride: tl.constexpr,
                     pad_h: tl.constexpr, pad_w: tl.constexpr,
                     BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr):  # fmt: skip
    """dw[split, client, k, o] = sum over the pixels of this split of patch entry k times dy."""
    RSC: tl.constexpr = R * S * C
    BLOCKS_O: tl.constexpr = (O + BO - 1) // BO
    client = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1) // BLOCKS_O
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    o = tl.program_id(1) % BLOCKS_O * BO + tl.arange(0, BO)
    x += client * xk
    dy += client * B * OH * OW * O
    total = tl.zeros((BK, BO), dtype=tl.float32)
    for start in range(0, span, BM):
        m = split * span + start + tl.arange(0, BM)
        offsets, inside = _patches(
            k[None, :], m[:, None], B, H, W, C, S, RSC, OH, OW, stride, pad_h, pad_w, xb, xh, xw, xc
        )  # fmt: skip
        patch = tl.load(x + offsets, mask=inside, other=0.0)
        grad = tl.load(dy + m[:, None] * O + o[None, :], mask=(m[:, None] < B * OH * OW) & (o[None, :] < O), other=0.0)
        total = tl.dot(tl.trans(patch), grad, total, input_precision="tf32")
    dw += (split * clients + client) * RSC * O
    tl.store(dw + k[:, None] * O + o[None, :], total, mask=(k[:, None] < RSC) & (o[None, :] < O))


@triton.jit
def _round_to_tf32(t, out, n, BLOCK: tl.constexpr):
    """Round to the nearest TF32 number, whose mantissa has 13 bits fewer."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(t + i, mask=i < n, other=0.0).to(tl.int32, bitcast=True)
    tl.store(out + i, ((bits + 0x1000) & ~0x1FFF).to(tl.float32, bitcast=True), mask=i < n)


@triton.jit
def _bias_gradient(dy, db, pixels, clients, span, O: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr):
    """db[split, client, o] = sum over the pixels of this split of dy."""
    client, split = tl.program_id(2).to(tl.int64), tl.program_id(0)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    dy += client * pixels * O
    total = tl.zeros((BM, BO), dtype=tl.float32)
    for start in range(0, span, BM):
        m = split * span + start + tl.arange(0, BM)
        inside = (m[:, None] < pixels) & (o[None, :] < O)
        total += tl.load(dy + m[:, None] * O + o[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(db + (split * clients + client) * O + o, tl.sum(total, 0), mask=o < O)


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


def _tile_size(size: int, largest: int) -> int:
    """Return the power of two that covers `size`, between 16, the least that `tl.dot` accepts, and `largest`."""
    return max(16, min(largest, triton.next_power_of_2(size)))


def _output_size(size: int, window: int, stride: int, pad: int) -> int:
    return (size + 2 * pad - window) // stride + 1


def round_to_tf32(t: Tensor) -> Tensor:
    """Round float32 to the nearest TF32 number; return other types unchanged.

    Without this the matrix units would drop the last bits, which always rounds towards zero.
    """
    if t.dtype != torch.float32:
        return t
    out = torch.empty_like(t)
    if out.stride() != t.stride():  # t is not dense: it has gaps or overlaps itself
        t = torch.empty_like(out).copy_(t)
    _round_to_tf32[(triton.cdiv(t.numel(), _BLOCK),)](t, out, t.numel(), BLOCK=_BLOCK)
    return out


def convolve(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, pad: tuple[int, int]) -> Tensor:
    """Convolve x [K, B, H, W, C], of any strides, with contiguous w [K, R, S, C, O]; return [K, B, OH, OW, O]."""
    K, B, H, W, C = x.shape
    R, S, O = w.shape[1], w.shape[2], w.shape[4]
    OH, OW = _output_size(H, R, stride, pad[0]), _output_size(W, S, stride, pad[1])
    y = x.new_empty(K, B, OH, OW, O)
    BM, BO = 256, _tile_size(O, 64)
    grid = (triton.cdiv(B * OH * OW, BM), triton.cdiv(O, BO), K)
    _forward[grid](
        x, w, bias if bias is not None else w, y, B, *x.stride(),
        H, W, C, R, S, OH, OW, O, stride, *pad, bias is not None,
        BM=BM, BK=32 if C >= 16 else 16, BO=BO, num_warps=4, num_stages=3,
    )  # fmt: skip
    return y


def weight_gradient(x: Tensor, dy: Tensor, window: tuple[int, int], stride: int, pad: tuple[int, int]) -> Tensor:
    """Return the gradient of w [K, R, S, C, O] from x [K, B, H, W, C] and contiguous dy [K, B, OH, OW, O]."""
    K, B, H, W, C = x.shape
    OH, OW, O = dy.shape[2:]
    R, S = window
    BK, BO, BM = _tile_size(R * S * C, 32), _tile_size(O, 64), 32
    tiles = triton.cdiv(R * S * C, BK) * triton.cdiv(O, BO) * K
    pixels = B * OH * OW
    splits = max(1, min(pixels // (8 * BM), 1056 // tiles))  # enough programs to occupy a large GPU
    span = triton.cdiv(triton.cdiv(pixels, splits), BM) * BM
    splits = triton.cdiv(pixels, span)
    parts = torch.empty(splits, K, R, S, C, O, device=x.device)
    grid = (triton.cdiv(R * S * C, BK), triton.cdiv(O, BO) * splits, K)
    _weight_gradient[grid](
        x, dy, parts, B, K, span, *x.stride(),
        H, W, C, R, S, OH, OW, O, stride, *pad,
        BM=BM, BK=BK, BO=BO, num_warps=4, num_stages=3,
    )  # fmt: skip
    return parts.sum(0).to(x.dtype)


def bias_gradient(dy: Tensor) -> Tensor:
    """Return the sum of contiguous dy [K, B, OH, OW, O] over images and pixels: [K, O]."""
    K, B, OH, OW, O = dy.shape
    pixels, BM, BO = B * OH * OW, 64, _tile_size(O, 64)
    span = triton.cdiv(triton.cdiv(pixels, max(1, 1056 // K)), BM) * BM
    parts = torch.empty(triton.cdiv(pixels, span), K, O, device=dy.device)
    _bias_gradient[(len(parts), triton.cdiv(O, BO), K)](dy, parts, pixels, K, span, O, BM=BM, BO=BO)
    return parts.sum(0).to(dy.dtype)


def input_gradient(dy: Tensor, w: Tensor, size: tuple[int, int], stride: int, pad: tuple[int, int]) -> Tensor:
    """Return the gradient of x [K, B, H, W, C]: dy, dilated by the stride, convolved with the flipped w."""
    K, B, OH, OW, O = dy.shape
    R, S = w.shape[1:3]
    flipped = w.flip(1, 2).transpose(3, 4).contiguous()
    back_pad = (R - 1 - pad[0], S - 1 - pad[1])
    # the number of rows and columns that makes the output exactly `size`
    dilated_size = (size[0] + R - 1 - 2 * back_pad[0], size[1] + S - 1 - 2 * back_pad[1])
    if stride > 1 or dilated_size != (OH, OW):
        dilated = dy.new_zeros(K, B, *dilated_size, O)
        dilated[:, :, : (OH - 1) * stride + 1 : stride, : (OW - 1) * stride + 1 : stride] = dy
        dy = dilated
    return convolve(dy, flipped, None, 1, back_pad)


def pool(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Max-pool contiguous x [N, H, W, C] in windows that do not overlap; return values and indices in the window."""
    N, H, W, C = x.shape
    y = x.new_empty(N, H // size, W // size, C)
    argmax = torch.empty(y.shape, dtype=torch.uint8, device=x.device)
    grid = (triton.cdiv(y.numel(), _BLOCK),)
    _pool[grid](x, y, argmax, y.numel(), H, W, C, size, BLOCK=_BLOCK)
    return y, argmax


def pool_gradient(dy: Tensor, argmax: Tensor, shape: Any, size: int) -> Tensor:
    """Return the gradient of the input of `pool`, of the given shape, from contiguous dy [N, OH, OW, C]."""
    _, H, W, C = shape
    exact = H % size == 0 and W % size == 0
    dx = dy.new_empty(shape) if exact else dy.new_zeros(shape)
    _pool_gradient[(triton.cdiv(dy.numel(), _BLOCK),)](
        dy, argmax, dx, dy.numel(), H, W, C, size, BLOCK=_BLOCK
    )  # fmt: skip
    return dx
