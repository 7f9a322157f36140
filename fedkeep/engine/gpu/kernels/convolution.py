"""Convolution of a stack of models as an implicit matrix product, with ReLU and max pooling, and its gradients.

Every client has its own weights. To cuDNN that is a grouped convolution, for which it is slow. Here the client is one
axis of the grid. Each program gathers the image patches of its tile while it multiplies them, so the patch matrix is
never written to memory. `factors` makes what the kernels read of images, weights and gradients.

Symbols: K clients, B images per client, H x W the image, C input channels, R x S the window, O output channels,
OH x OW the output. BM, BK, BO are tile sizes: output pixels, patch entries, output channels.

With pooling, M and BM count 2 x 2 windows, and a program computes the four pixels of its windows as four tiles.
`place` holds which pixel of its window was the maximum, or 4 where ReLU cut it off: 4 passes no gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedkeep.engine.gpu.kernels.factors import Factors, Geometry, spread_gradient
from fedkeep.engine.gpu.kernels.tiles import Tile, forward_tile, gradient_tile


@triton.jit
def _patch(m, M, x, xb, WP: tl.constexpr, CP: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, STRIDE: tl.constexpr,
           POOL: tl.constexpr):  # fmt: skip
    """Return the image of output pixel m, or of the first pixel of window m, and where its patch begins."""
    m = tl.minimum(m, M - 1)
    if POOL:
        PH: tl.constexpr = OH // 2
        PW: tl.constexpr = OW // 2
        image, row, column = m // (PH * PW), m // PW % PH * 2, m % PW * 2
    else:
        image, row, column = m // (OH * OW), m // OW % OH, m % OW
    return image, x + image.to(tl.int64) * xb + (row * WP + column) * (STRIDE * CP)


@triton.jit
def _patch_entry(k, WP: tl.constexpr, CP: tl.constexpr, S: tl.constexpr):
    """Return the offset of entry k of a patch from the patch's first pixel."""
    return (k // (S * CP) * WP + k // CP % S) * CP + k % CP


@triton.jit
def _patch_entries(step, WP: tl.constexpr, CP: tl.constexpr, S: tl.constexpr, BK: tl.constexpr):
    """Return the offsets of the BK entries of a patch that a step multiplies."""
    if CP % BK == 0:  # all of them are of the same pixel of the window
        pixel = step // (CP // BK)
        return (pixel // S * WP + pixel % S) * CP + step % (CP // BK) * BK + tl.arange(0, BK)
    else:
        return _patch_entry(step * BK + tl.arange(0, BK), WP, CP, S)


@triton.jit
def _patches(rows, offsets, step, RSC: tl.constexpr, BK: tl.constexpr):
    """Load a tile of patches; 0 beyond the last entry."""
    if RSC % BK == 0:
        return tl.load(rows[:, None] + offsets[None, :])
    else:
        k = step * BK + tl.arange(0, BK)
        return tl.load(rows[:, None] + offsets[None, :], mask=k[None, :] < RSC, other=0.0)


@triton.jit
def _weights(w, o, step, RSC: tl.constexpr, O: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr):
    """Load the weights that a step multiplies, [BK, BO]; 0 beyond the last entry and the last output."""
    k = step * BK + tl.arange(0, BK)
    at = w + o[:, None] * RSC + k[None, :]
    if RSC % BK == 0 and O % BO == 0:
        return tl.trans(tl.load(at))
    else:
        return tl.trans(tl.load(at, mask=(o[:, None] < O) & (k[None, :] < RSC), other=0.0))


@triton.jit
def _convolve(x, x_inverse, w, w_inverse, bias, y, M, xk, xb, ik,
              WP: tl.constexpr, CP: tl.constexpr, S: tl.constexpr, RSC: tl.constexpr, OH: tl.constexpr,
              OW: tl.constexpr, O: tl.constexpr, STRIDE: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
              BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr):  # fmt: skip
    """y[client, m, o] = sum over the patch of pixel m of x times w, plus bias; then ReLU."""
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    image, patches = _patch(m, M, x + client * xk, xb, WP, CP, OH, OW, STRIDE, False)
    total = tl.zeros((BM, BO), dtype=tl.float32)
    for step in range(0, (RSC + BK - 1) // BK):
        offsets = _patch_entries(step, WP, CP, S, BK)
        weight = _weights(w + client * (O * RSC), o, step, RSC, O, BK, BO)
        total = tl.dot(_patches(patches, offsets, step, RSC, BK), weight, total)
    total *= tl.load(x_inverse + client * ik + image)[:, None]
    total *= tl.load(w_inverse + client * O + o, mask=o < O, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + client * O + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    if RELU:
        total = tl.where(total <= 0, 0.0, total)
    to = (client * M + m[:, None]) * O + o[None, :]
    tl.store(y + to, total.to(y.dtype.element_ty), mask=(m[:, None] < M) & (o[None, :] < O))


@triton.jit
def _convolve_and_pool(x, x_inverse, w, w_inverse, bias, y, place, M, xk, xb, ik,
                       WP: tl.constexpr, CP: tl.constexpr, S: tl.constexpr, RSC: tl.constexpr, OH: tl.constexpr,
                       OW: tl.constexpr, O: tl.constexpr, STRIDE: tl.constexpr, BIAS: tl.constexpr,
                       RELU: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr):  # fmt: skip
    """Write the maxima of 2 x 2 windows of what `_convolve` computes, and their places."""
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    image, patches = _patch(m, M, x + client * xk, xb, WP, CP, OH, OW, STRIDE, True)
    right: tl.constexpr = STRIDE * CP  # from a pixel of the output to its neighbour, in the image
    below: tl.constexpr = STRIDE * WP * CP
    total_0 = tl.zeros((BM, BO), dtype=tl.float32)
    total_1 = tl.zeros((BM, BO), dtype=tl.float32)
    total_2 = tl.zeros((BM, BO), dtype=tl.float32)
    total_3 = tl.zeros((BM, BO), dtype=tl.float32)
    for step in range(0, (RSC + BK - 1) // BK):
        offsets = _patch_entries(step, WP, CP, S, BK)
        weight = _weights(w + client * (O * RSC), o, step, RSC, O, BK, BO)
        total_0 = tl.dot(_patches(patches, offsets, step, RSC, BK), weight, total_0)
        total_1 = tl.dot(_patches(patches, offsets + right, step, RSC, BK), weight, total_1)
        total_2 = tl.dot(_patches(patches, offsets + below, step, RSC, BK), weight, total_2)
        total_3 = tl.dot(_patches(patches, offsets + below + right, step, RSC, BK), weight, total_3)
    best, index = _larger(total_0, 0, total_1, 1)
    best, index = _larger(best, index, total_2, 2)
    best, index = _larger(best, index, total_3, 3)
    best *= tl.load(x_inverse + client * ik + image)[:, None]
    best *= tl.load(w_inverse + client * O + o, mask=o < O, other=0.0)[None, :]
    if BIAS:
        best += tl.load(bias + client * O + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    if RELU:
        index = tl.where(best <= 0, 4, index)
        best = tl.where(best <= 0, 0.0, best)
    to = (client * M + m[:, None]) * O + o[None, :]
    stored = (m[:, None] < M) & (o[None, :] < O)
    tl.store(place + to, index.to(tl.uint8), mask=stored)
    tl.store(y + to, best.to(y.dtype.element_ty), mask=stored)


@triton.jit
def _larger(best, index, value, place: tl.constexpr):
    """Return the larger of two tiles and its place; of equal ones the first. NaN is larger than every number."""
    larger = (value > best) | (value != value)
    return tl.where(larger, value, best), tl.where(larger, place, index)


@triton.jit
def _weight_gradient(x, x_inverse, dy, dy_inverse, place, parts, B, M, clients, span, xk, xb, ik,
                     WP: tl.constexpr, CP: tl.constexpr, S: tl.constexpr, RSC: tl.constexpr, OH: tl.constexpr,
                     OW: tl.constexpr, O: tl.constexpr, STRIDE: tl.constexpr, POOL: tl.constexpr,
                     BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr, BB: tl.constexpr):  # fmt: skip
    """parts[split, client, k, o] = sum over the pixels or windows of this split of patch entry k times dy."""
    BLOCKS_O: tl.constexpr = (O + BO - 1) // BO
    client = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1) // BLOCKS_O
    entries = tl.program_id(0)
    k = entries * BK + tl.arange(0, BK)
    o = tl.program_id(1) % BLOCKS_O * BO + tl.arange(0, BO)
    offsets = _patch_entry(k, WP, CP, S)
    right: tl.constexpr = STRIDE * CP
    below: tl.constexpr = STRIDE * WP * CP
    x += client * xk
    x_inverse += client * ik
    dy_inverse += client * B
    b = tl.arange(0, BB)
    unit = tl.max(tl.load(x_inverse + b, mask=b < B, other=0.0) * tl.load(dy_inverse + b, mask=b < B, other=0.0))
    unit = tl.maximum(unit, 1e-37)  # where all images or all gradients are 0
    total = tl.zeros((BK, BO), dtype=tl.float32)
    for start in range(split * span, (split + 1) * span, BM):
        m = start + tl.arange(0, BM)
        image, patches = _patch(m, M, x, xb, WP, CP, OH, OW, STRIDE, POOL)
        to = (client * M + m[:, None]) * O + o[None, :]
        real = (m[:, None] < M) & (o[None, :] < O)
        grad = tl.load(dy + to, mask=real, other=0.0)
        grad *= (tl.load(x_inverse + image) * tl.load(dy_inverse + image) / unit).to(tl.float16)[:, None]
        if POOL:
            index = tl.load(place + to, mask=real, other=4)
            total = _add_product(_patches(patches, offsets, entries, RSC, BK), grad, index, 0, total)
            total = _add_product(_patches(patches, offsets + right, entries, RSC, BK), grad, index, 1, total)
            total = _add_product(_patches(patches, offsets + below, entries, RSC, BK), grad, index, 2, total)
            total = _add_product(_patches(patches, offsets + below + right, entries, RSC, BK), grad, index, 3, total)
        else:
            total = tl.dot(tl.trans(_patches(patches, offsets, entries, RSC, BK)), grad, total)
    total *= unit
    parts += (split * clients + client) * (RSC * O)
    tl.store(parts + k[:, None] * O + o[None, :], total, mask=(k[:, None] < RSC) & (o[None, :] < O))


@triton.jit
def _add_product(patch, grad, index, place: tl.constexpr, total):
    """Add the product of the patches of one pixel of each window and the gradients that belong to it."""
    return tl.dot(tl.trans(patch), tl.where(index == place, grad, 0.0).to(tl.float16), total)


@triton.jit
def _sum_weight_parts(parts, dw, splits, stride, C: tl.constexpr, CP: tl.constexpr, RS: tl.constexpr, O: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    """dw[client, o, c, rs] = sum of parts[split, client, rs, c, o] over the splits."""
    client = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o, c, rs = at % O, at // O % C, at // (O * C)
    parts += client * (RS * CP * O) + (rs * CP + c) * O + o
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * stride, mask=rs < RS, other=0.0)
    tl.store(dw + client * (O * C * RS) + (o * C + c) * RS + rs, total.to(dw.dtype.element_ty), mask=rs < RS)


def convolve(
    x: Factors,
    w: Factors,
    bias: Tensor | None,
    output: tuple[int, int],
    dtype: torch.dtype,
    stride: int = 1,
    relu: bool = False,
    pool: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Convolve images [K, B, H', W', C'] with weights [K, O, R, S, C'].

    Return y [K, B, OH, OW, O], after ReLU if `relu`, and None; with `pool`, the maxima of 2 x 2 windows and their
    places.
    """
    K, B, _, WP, CP = x.values.shape
    O, R, S = w.values.shape[1:4]
    OH, OW = output
    shape = (K, B, OH // 2, OW // 2, O) if pool else (K, B, OH, OW, O)
    y = torch.empty(shape, dtype=dtype, device=w.values.device)
    place = torch.empty(shape, dtype=torch.uint8, device=y.device) if pool else None
    M = y.numel() // (K * O)  # pixels or windows
    tile = tile or forward_tile(CP, O, pool)
    grid = (triton.cdiv(M, tile.BM), triton.cdiv(O, tile.BO), K)
    given = (x.values, x.inverse, w.values, w.inverse, y if bias is None else bias, y)
    sizes = (M, x.values.stride(0), x.values.stride(1), x.inverse.stride(0), WP, CP, S, R * S * CP, OH, OW, O, stride)
    options = {"BM": tile.BM, "BK": tile.BK, "BO": tile.BO, "num_warps": tile.warps, "num_stages": tile.stages}
    if place is not None:
        _convolve_and_pool[grid](*given, place, *sizes, bias is not None, relu, **options)
    else:
        _convolve[grid](*given, *sizes, bias is not None, relu, **options)
    return y, place


def weight_gradient(
    x: Factors, g: Factors, place: Tensor | None, geometry: Geometry, channels: int, dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of w [K, O, C, R, S] from the images and `gather_gradient`'s gradient of the output."""
    K, B, _, WP, CP = x.values.shape
    O, (OH, OW), (R, S) = g.values.shape[-1], geometry.output, geometry.window
    RSC, M = R * S * CP, g.values.numel() // (K * O)
    tile = tile or gradient_tile(O, RSC, pool=place is not None)
    tiles = triton.cdiv(RSC, tile.BK) * triton.cdiv(O, tile.BO) * K
    splits = max(1, min(M // (8 * tile.BM), tile.programs // tiles))
    span = triton.cdiv(triton.cdiv(M, splits), tile.BM) * tile.BM
    splits = triton.cdiv(M, span)
    parts = torch.empty(splits, K, RSC, O, device=g.values.device)
    grid = (triton.cdiv(RSC, tile.BK), triton.cdiv(O, tile.BO) * splits, K)
    _weight_gradient[grid](
        x.values, x.inverse, g.values, g.inverse, g.values if place is None else place, parts, B, M, K, span,
        x.values.stride(0), x.values.stride(1), x.inverse.stride(0),
        WP, CP, S, RSC, OH, OW, O, geometry.stride, place is not None,
        BM=tile.BM, BK=tile.BK, BO=tile.BO, BB=triton.next_power_of_2(B), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    dw = torch.empty(K, O, channels, R, S, dtype=dtype, device=parts.device)
    _sum_weight_parts[(K, triton.cdiv(O * channels * R * S, 256))](
        parts, dw, splits, parts.stride(0), channels, CP, R * S, O, BLOCK=256
    )
    return dw


def input_gradient(
    g: Factors, place: Tensor | None, rotated: Factors, geometry: Geometry, dtype: torch.dtype, tile: Tile | None = None
) -> Tensor:
    """Return the gradient of the images, [K, B, H, W, C]: g, spread over the outputs, times rotated weights."""
    wide = spread_gradient(g, place, geometry, channels=rotated.values.shape[-1])
    return convolve(wide, rotated, None, geometry.size, dtype, tile=tile)[0]
