"""Dense, convolution and max-pooling layers for a stack of models: one kernel launch for all clients.

`vmap_with_kernels` maps a function over the client axis as `torch.vmap` does. Where the function calls one of these
layers with weights that differ between clients, it uses the kernels of `fedkeep.engine.gpu.kernels` instead of vmap's
own rule (a grouped convolution). Operations and shapes that the kernels do not support are left to vmap.
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
    """Map a function over the leading client axis of every tree, using the layers of this module."""
    with _UseKernels():
        return torch.vmap(fn, randomness="error")(*trees)


def available(device: torch.device, dtype: torch.dtype, autocast: torch.dtype | None, tf32: bool) -> bool:
    """Return whether the kernels can be used: on a GPU with Triton, in TF32 or half precision."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0) or find_spec("triton") is None:
        return False  # torch's CUDA builds depend on Triton
    return autocast is not None or (dtype == torch.float32 and tf32) or dtype in (torch.bfloat16, torch.float16)


class _UseKernels(TorchFunctionMode):
    """Replaces a few torch functions by the layers of this module, where all their tensors have the client axis."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _REPLACEMENTS.get(func)
        out = replacement(*args, **(kwargs or {})) if replacement else None
        return func(*args, **(kwargs or {})) if out is None else out


@functools.cache
def _kernels() -> Any:
    """Import the kernels, and with them Triton, on first use."""
    from fedkeep.engine.gpu import kernels

    return kernels


def _all_batched(*tensors: Tensor | None) -> bool:
    return all(t is None or is_batched(t) for t in tensors)


def _cast(*tensors: Tensor | None) -> list[Any]:
    """Cast to the autocast type; autocast itself acts at a lower level and does not reach these functions."""
    if not torch.is_autocast_enabled("cuda"):
        return list(tensors)
    dtype = torch.get_autocast_dtype("cuda")
    return [None if t is None else t.to(dtype) for t in tensors]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    x = input
    if x.ndim != 2 or not _all_batched(x, weight, bias):
        return None
    return _OutOfVmap.apply(_Linear, *_cast(x, weight, bias))  # type: ignore[no-any-return,no-untyped-call]


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
    if pad[0] >= weight.shape[2] or pad[1] >= weight.shape[3] or not _all_batched(x, weight, bias):
        return None
    return _OutOfVmap.apply(_Conv2d, *_cast(x, weight, bias), strides[0], pad)  # type: ignore[no-any-return,no-untyped-call]


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
    default = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1) and not ceil_mode and not return_indices
    if not default or size[0] != size[1] or size[0] > 15 or (stride and _pair(stride) != size) or x.ndim != 4:
        return None
    if not _all_batched(x):
        return None
    return _OutOfVmap.apply(_MaxPool2d, x, size[0])  # type: ignore[no-any-return,no-untyped-call]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (tuple(value) * 2)[:2]


# Each returns None where the kernels do not support the call; the torch function is then called as usual.
_REPLACEMENTS: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    F.conv2d: _conv2d,
    F.max_pool2d: _max_pool2d,
    torch.max_pool2d: _max_pool2d,
}


class _OutOfVmap(torch.autograd.Function):
    """Leaves `vmap`: passes the tensors, client axis first, to a layer that computes the whole stack."""

    generate_vmap_rule = False

    @staticmethod
    def forward(layer: Any, *args: Any) -> Any:
        raise AssertionError("can only be called under vmap")

    @staticmethod
    def setup_context(ctx: _Ctx, inputs: Any, output: Any) -> None:
        """Save nothing: the layer defines its own gradients."""

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
    """x [K, B, C, H, W] convolved with w [K, O, C, R, S], plus b [K, O]; the output is channels-last in memory."""

    @staticmethod
    def forward(ctx: _Ctx, x: Tensor, w: Tensor, b: Tensor | None, stride: int, pad: tuple[int, int]) -> Tensor:
        x, w = _kernels().round_to_tf32(x), _kernels().round_to_tf32(w)
        ctx.save_for_backward(x, w)
        ctx.stride, ctx.pad = stride, pad
        y = _kernels().convolve(_channels_last(x), _window_first(w), None if b is None else b.contiguous(), stride, pad)
        return _channels_first(y)

    @staticmethod
    def backward(ctx: _Ctx, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        needed, stride, pad = ctx.needs_input_grad, ctx.stride, ctx.pad
        dy = _channels_last(dy).contiguous()
        rounded = _kernels().round_to_tf32(dy)
        dx = dw = db = None
        if needed[0]:
            dx = _channels_first(_kernels().input_gradient(rounded, _window_first(w), tuple(x.shape[3:]), stride, pad))
        if needed[1]:
            dw = _kernels().weight_gradient(_channels_last(x), rounded, tuple(w.shape[3:]), stride, pad)
            dw = dw.permute(0, 4, 3, 1, 2)
        if needed[2]:
            db = _kernels().bias_gradient(dy)
        return dx, dw, db, None, None


class _MaxPool2d(torch.autograd.Function):
    """Maximum of every window of x [K, B, C, H, W]; windows do not overlap."""

    @staticmethod
    def forward(ctx: _Ctx, x: Tensor, size: int) -> Tensor:
        x = _channels_last(x).contiguous()
        ctx.size, ctx.shape = size, x.shape
        y, argmax = _kernels().pool(x.flatten(0, 1), size)
        ctx.save_for_backward(argmax)
        return _channels_first(y.view(*x.shape[:2], *y.shape[1:]))

    @staticmethod
    def backward(ctx: _Ctx, dy: Tensor) -> Any:
        (argmax,) = ctx.saved_tensors
        K, B, H, W, C = ctx.shape
        dx = _kernels().pool_gradient(_channels_last(dy).contiguous().flatten(0, 1), argmax, (K * B, H, W, C), ctx.size)
        return _channels_first(dx.view(ctx.shape)), None


def _channels_last(x: Tensor) -> Tensor:
    """[K, B, C, H, W] -> [K, B, H, W, C], a view."""
    return x.permute(0, 1, 3, 4, 2)


def _channels_first(x: Tensor) -> Tensor:
    """[K, B, H, W, C] -> [K, B, C, H, W], a view."""
    return x.permute(0, 1, 4, 2, 3)


def _window_first(w: Tensor) -> Tensor:
    """[K, O, C, R, S] -> [K, R, S, C, O], contiguous."""
    return w.permute(0, 3, 4, 2, 1).contiguous()
