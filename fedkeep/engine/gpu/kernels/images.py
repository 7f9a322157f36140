"""Gathering a step's images: taken by index, augmented and normalised in one kernel.

It computes what `fedkeep.data.augment.InputPipeline` computes, in the same order of operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedkeep.data.augment import InputPipeline
from fedkeep.tree import Tree

_BLOCK = 1024


@triton.jit
def _gather(x, at, y, top, left, flip, row, column, mean, std, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
            CROP: tl.constexpr, REFLECT: tl.constexpr, FLIP: tl.constexpr, CUTOUT: tl.constexpr,
            NORMALISE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """y[n] = image at[n] of x, cropped, flipped, scaled to [0, 1], normalised, with a square set to 0."""
    n = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c, i, j = place // (H * W), place // W % H, place % W
    source_i, source_j = i, j
    if FLIP:
        source_j = tl.where(tl.load(flip + n) != 0, W - 1 - j, j)
    if CROP:
        source_i += tl.load(top + n).to(tl.int32) - CROP
        source_j += tl.load(left + n).to(tl.int32) - CROP
    if REFLECT:
        source_i = H - 1 - tl.abs(H - 1 - tl.abs(source_i))
        source_j = W - 1 - tl.abs(W - 1 - tl.abs(source_j))
    inside = (source_i >= 0) & (source_i < H) & (source_j >= 0) & (source_j < W) & (c < C)
    image = x + tl.load(at + n).to(tl.int64) * (C * H * W)
    value = tl.load(image + c * (H * W) + source_i * W + source_j, mask=inside, other=0)
    dtype: tl.constexpr = y.dtype.element_ty
    if dtype == tl.float64:
        value = value.to(tl.float64) / 255
    else:
        value = tl.div_rn(value.to(tl.float32), 255.0)
    if NORMALISE:
        value -= tl.load(mean + c, mask=c < C, other=0.0)
        deviation = tl.load(std + c, mask=c < C, other=1.0)
        if dtype == tl.float64:
            value = value / deviation
        else:
            value = tl.div_rn(value, deviation)
    if CUTOUT:
        low_i, low_j = tl.load(row + n).to(tl.int32) - CUTOUT // 2, tl.load(column + n).to(tl.int32) - CUTOUT // 2
        cut = (i >= low_i) & (i < low_i + CUTOUT) & (j >= low_j) & (j < low_j + CUTOUT)
        value = tl.where(cut, 0.0, value)
    tl.store(y + n * (C * H * W) + place, value.to(dtype), mask=c < C)


def supported(x: Tensor | Tree, inputs: InputPipeline) -> bool:
    """Return whether `gather` can replace the pipeline: bytes of images, float32 or float64 inputs."""
    return (
        isinstance(x, Tensor)
        and x.dtype == torch.uint8
        and x.ndim == 4
        and x.is_contiguous()
        and inputs.dtype in (torch.float32, torch.float64)
    )


def gather(x: Tensor, at: Tensor, inputs: InputPipeline, drawn: Tree | None) -> Tensor:
    """Return the images x[at] as model inputs, [n, C, H, W]; each random parameter in `drawn` is [n]."""
    _, C, H, W = x.shape
    n, augment = len(at), inputs.augment if drawn else None
    crop, flip, cutout = (augment.crop, augment.flip, augment.cutout) if augment else (0, False, 0)
    reflect = augment is not None and crop > 0 and augment.padding == "reflect"
    y = torch.empty(n, C, H, W, dtype=inputs.dtype, device=x.device)
    normalise = inputs.mean is not None and inputs.std is not None
    mean, std = (t.to(y).reshape(-1).expand(C).contiguous() if normalise else y for t in (inputs.mean, inputs.std))
    parameters = [(drawn or {}).get(key, at) for key in ("top", "left", "flip", "row", "column")]
    _gather[(n, triton.cdiv(C * H * W, _BLOCK))](
        x, at, y, *parameters, mean, std, C, H, W, crop, reflect, flip, cutout, normalise, BLOCK=_BLOCK
    )
    return y
