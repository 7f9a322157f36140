"""Dense, convolution and pooling layers of a stack of models, as one kernel for all clients.

`vmap_with_kernels` maps a function over the client axis as `torch.vmap` does. Where the function calls one of these
layers with weights that differ between clients, it uses the kernels of `fedkeep.engine.gpu.kernels` instead of vmap's
rule (a grouped convolution). The operation and its shapes decide; everything else is left to vmap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedkeep._util.private_apis import is_batched

_Ctx = Any


def vmap_with_kernels(fn: Callable[..., Any], *trees: Any) -> Any:
    """Map a function over the leading client axis of every tree, with the layers below."""
    with _Layers():
        return torch.vmap(fn, randomness="error")(*trees)


def available(device: torch.device, dtype: torch.dtype, autocast: torch.dtype | None, tf32: bool) -> bool:
    """Say whether the kernels serve this computation: on a GPU with Triton, in TF32 or half precision."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0) or find_spec("triton") is None:
        return False  # Triton comes with torch's CUDA builds
    return autocast is not None or (dtype == torch.float32 and tf32) or dtype in (torch.bfloat16, torch.float16)


class _Layers(TorchFunctionMode):
    """Sends a few functions to the layers below, where their weights carry the client axis."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _OWN.get(func)
        out = own(*args, **(kwargs or {})) if own else None
        return func(*args, **(kwargs or {})) if out is None else out


@functools.cache
def _kernels() -> Any:
    """Import the kernels, and Triton with them, when they are needed."""
    from fedkeep.engine.gpu import kernels

    return kernels


def _batched(*tensors: Tensor | None) -> bool:
    return all(t is None or is_batched(t) for t in tensors)


def _cast(*tensors: Tensor | None) -> list[Any]:
    """Follow autocast, which acts below the level at which these functions are met."""
    if not torch.is_autocast_enabled("cuda"):
        return list(tensors)
    to = torch.get_autocast_dtype("cuda")
    return [None if t is None else t.to(to) for t in tensors]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    x = input
    if x.ndim != 2 or not _batched(x, weight, bias):
        return None
    return _Mapped.apply(_Linear, *_cast(x, weight, bias))  # type: ignore[no-any-return,no-untyped-call]


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    x, strides, dilations = input, _pair(stride), _pair(dilation)
    if isinstance(padding, str) or groups != 1 or dilations != (1, 1) or strides[0] != strides[1] or x.ndim != 4:
        return None
    pad = _pair(padding)
    if pad[0] >= weight.shape[2] or pad[1] >= weight.shape[3] or not _batched(x, weight, bias):
        return None
    return _Mapped.apply(_Conv2d, *_cast(x, weight, bias), strides[0], pad)  # type: ignore[no-any-return,no-untyped-call]


def _max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    x, size = input, _pair(kernel_size)
    plain = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1) and not ceil_mode and not return_indices
    if not plain or size[0] != size[1] or size[0] > 15 or (stride and _pair(stride) != size) or x.ndim != 4:
        return None
    if not _batched(x):
        return None
    return _Mapped.apply(_MaxPool2d, x, size[0])  # type: ignore[no-any-return,no-untyped-call]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (tuple(value) * 2)[:2]


_OWN: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    F.conv2d: _conv2d,
    F.max_pool2d: _max_pool2d,
    torch.max_pool2d: _max_pool2d,
}


class _Mapped(torch.autograd.Function):
    """Steps out of `vmap`: hands the tensors, client axis first, to a layer that works on the whole stack."""

    generate_vmap_rule = False

    @staticmethod
    def forward(layer: Any, *args: Any) -> Any:
        raise AssertionError("only called under vmap")

    @staticmethod
    def setup_context(ctx: _Ctx, inputs: Any, output: Any) -> None:
        """Nothing is kept: gradients flow through the layer itself."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, layer: Any, *args: Any) -> tuple[Any, int]:
        moved = [a.movedim(dim, 0) if isinstance(a, Tensor) else a for a, dim in zip(args, in_dims[1:], strict=True)]
        return layer.apply(*moved), 0


class _Linear(torch.autograd.Function):
    """x [K, B, I] times w [K, O, I] transposed, plus b [K, O]."""

    @staticmethod
    def forward(ctx: _Ctx, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.bmm(x, w.mT) if b is None else torch.baddbmm(b[:, None], x, w.mT)

    @staticmethod
    def backward(ctx: _Ctx, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        needed = ctx.needs_input_grad
        return (
            torch.bmm(dy, w) if needed[0] else None,
            torch.bmm(dy.mT, x) if needed[1] else None,
            dy.sum(1) if needed[2] else None,
        )


class _Conv2d(torch.autograd.Function):
    """x [K, B, C, H, W] convolved with w [K, O, C, R, S], plus b [K, O]; channels lie last in what comes out."""

    @staticmethod
    def forward(ctx: _Ctx, x: Tensor, w: Tensor, b: Tensor | None, stride: int, pad: tuple[int, int]) -> Tensor:
        x, w = _kernels().nearest(x), _kernels().nearest(w)
        ctx.save_for_backward(x, w)
        ctx.stride, ctx.pad = stride, pad
        y = _kernels().convolve(_last(x), _window_first(w), None if b is None else b.contiguous(), stride, pad)
        return _first(y)

    @staticmethod
    def backward(ctx: _Ctx, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        needed, stride, pad = ctx.needs_input_grad, ctx.stride, ctx.pad
        plain = _last(dy).contiguous()
        above = _kernels().nearest(plain)
        dx = dw = db = None
        if needed[0]:
            dx = _first(_kernels().input_gradient(above, _window_first(w), tuple(x.shape[3:]), stride, pad))
        if needed[1]:
            dw = _kernels().weight_gradient(_last(x), above, tuple(w.shape[3:]), stride, pad).permute(0, 4, 3, 1, 2)
        if needed[2]:
            db = _kernels().bias_gradient(plain)
        return dx, dw, db, None, None


class _MaxPool2d(torch.autograd.Function):
    """The largest of every window of x [K, B, C, H, W]; windows do not overlap."""

    @staticmethod
    def forward(ctx: _Ctx, x: Tensor, size: int) -> Tensor:
        last = _last(x).contiguous()
        ctx.size, ctx.shape = size, last.shape
        y, where = _kernels().pool(last.flatten(0, 1), size)
        ctx.save_for_backward(where)
        return _first(y.view(*last.shape[:2], *y.shape[1:]))

    @staticmethod
    def backward(ctx: _Ctx, dy: Tensor) -> Any:
        (where,) = ctx.saved_tensors
        K, B, H, W, C = ctx.shape
        dx = _kernels().pool_gradient(_last(dy).contiguous().flatten(0, 1), where, (K * B, H, W, C), ctx.size)
        return _first(dx.view(ctx.shape)), None


def _last(x: Tensor) -> Tensor:
    """[K, B, C, H, W] -> [K, B, H, W, C]: another view of the same memory."""
    return x.permute(0, 1, 3, 4, 2)


def _first(x: Tensor) -> Tensor:
    """[K, B, H, W, C] -> [K, B, C, H, W]."""
    return x.permute(0, 1, 4, 2, 3)


def _window_first(w: Tensor) -> Tensor:
    """[K, O, C, R, S] -> [K, R, S, C, O], contiguous."""
    return w.permute(0, 3, 4, 2, 1).contiguous()
