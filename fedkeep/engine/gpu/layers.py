"""Layers and losses of our own kernels, in place of torch's, wherever a model or a method calls them.

Inside `use_kernels` a call of `conv2d`, `linear`, `max_pool2d`, `group_norm` or a loss of `fedkeep.losses` goes to the
functions of `fedkeep.engine.gpu.functions`, which compute all clients of a `vmap` at once, or the one model outside of
it. What serves is decided by the operation and its shapes; everything else is left to torch. Autocast has no effect on
convolutions and norms here: their factors are 16-bit numbers in any case, and their outputs keep the inputs' type.

A convolution or a norm is not computed when it is called (`deferred`): ReLU or pooling may follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedkeep import losses
from fedkeep._util import counter_random
from fedkeep._util.batch_norm import unmasked_batch_norm
from fedkeep._util.private_apis import active_transforms, is_batched
from fedkeep.engine.gpu import functions
from fedkeep.engine.gpu.deferred import Deferred, Pending, compute_outstanding, computed, may_change_in_place
from fedkeep.engine.gpu.kernels import has_triton

_MAX_CLASSES = 4096  # of a loss in one kernel


def vmap_with_kernels(fn: Callable[..., Any], *trees: Any) -> Any:
    """Map a function over the leading client axis of every tree, with the layers and losses of this module."""
    return torch.vmap(lambda *parts: use_kernels(lambda: fn(*parts)), randomness="error")(*trees)


def use_kernels(call: Callable[[], Any]) -> Any:
    """Call a function with the layers and losses of this module."""
    with _Replacing():
        return computed(call())


def available(device: torch.device, dtype: torch.dtype, autocast: torch.dtype | None, tf32: bool) -> bool:
    """Return whether the kernels can be used: on a GPU with Triton, in TF32 or half precision."""
    if not has_triton(device):
        return False
    return autocast is not None or (dtype == torch.float32 and tf32) or dtype in (torch.bfloat16, torch.float16)


class _Replacing(TorchFunctionMode):
    """Replaces some functions by ours. A replacement returns None for a call that it does not support."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACEMENTS.get(func)
        out = replacement(*args, **kwargs) if replacement else None
        if out is not None:
            return out
        if may_change_in_place(func, args, kwargs):
            compute_outstanding()
        return func(*args, **kwargs)


# Layers


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    x = computed(input)
    if x.ndim != 2 or not all(t is None or is_batched(t) for t in (x, weight, bias)) or not _stackable(x):
        return None
    dtype = x.dtype
    if torch.is_autocast_enabled("cuda") and x.shape[0] > functions.FEW:  # for few, a copy of the weights costs more
        dtype = torch.get_autocast_dtype("cuda")
    return _apply(functions.Linear, x, weight, bias, dtype)


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
    pad, window = _pair(padding), weight.shape[2:]
    if pad[0] >= window[0] or pad[1] >= window[1] or not _supported(x.dtype):
        return None
    x = computed(x)
    size = [(x.shape[2 + i] + 2 * pad[i] - window[i]) // strides[0] + 1 for i in range(2)]
    if min(size) < 1 or not _stackable(x, weight, bias):  # torch has an error message for the first
        return None

    def layer(relu: bool, pool: bool) -> Tensor:
        return _channels_first(_apply(functions.Conv2d, x, weight, bias, strides[0], pad, relu, pool))

    shape = (x.shape[0], weight.shape[0], *size)
    return Deferred.of(Pending(layer, can_pool=min(size) > 1), shape, x.dtype, x.device)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor | None:
    x = input
    if x.ndim < 3 or (weight is None) != (bias is None) or x.shape[1] % num_groups:
        return None
    x = computed(x)
    if not _supported(x.dtype) or not _stackable(x, weight, bias):
        return None

    def layer(relu: bool, pool: bool) -> Tensor:
        return _channels_first(_apply(functions.GroupNorm, x, weight, bias, num_groups, eps, relu))

    return Deferred.of(Pending(layer, can_pool=False), x.shape, x.dtype, x.device)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """By formula: under `vmap` torch's own refuses the memory layout of our convolutions' outputs on a GPU."""
    x = computed(input)
    if x.ndim != 4 or (training and running_mean is not None):
        return None
    return unmasked_batch_norm(x, running_mean, running_var, weight, bias, eps)


def _relu(input: Tensor, inplace: bool = False) -> Tensor | None:
    x = input
    if not isinstance(x, Deferred) or x.pending.value is not None:
        return None
    if inplace:
        x.pending.relu = True
        return x
    return x.followed_by(relu=True)


def _relu_in_place(input: Tensor) -> Tensor | None:
    return _relu(input, inplace=True)


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
    if min(x.shape[2:]) < size[0] or not _supported(x.dtype):
        return None
    if isinstance(x, Deferred) and size == (2, 2):
        pending = x.pending
        if pending.can_pool and not pending.pool and pending.value is None:
            return x.followed_by(pool=True)
    x = computed(x)
    return _channels_first(_apply(functions.MaxPool2d, x, size[0])) if _stackable(x) else None


def _view(input: Tensor, *shape: Any, **named: Any) -> Tensor | None:
    """Reshape instead: outputs of our layers are channels-last, and `x.view(len(x), -1)` would refuse them."""
    if named or (shape and isinstance(shape[0], torch.dtype)):
        return None
    out: Tensor = computed(input).reshape(*shape)
    return out


def drop(x: Tensor, key: Tensor, stream: int, p: float, batch: int | None) -> Tensor:
    """Return what `counter_random.drop` does, by one kernel where it supports the tensor. The draws are the same."""
    x = computed(x)
    small = 0 < x.ndim <= functions.DROPOUT_AXES and x.numel() < 2**31
    if not (small and _supported(x.dtype) and _stackable(x, key)):
        return counter_random.drop(x, key, stream, p, batch)
    return _apply(functions.Dropout, x, key, stream, p, batch)


# Losses: of a stack of clients only, where many small operations are worth one kernel


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor | None:
    if not _are_logits(logits) or y.ndim != 1 or y.is_floating_point():
        return None
    return _apply(functions.CrossEntropy, logits, y)


def _kl(student: Tensor, teacher: Tensor, tau: float = 1.0) -> Tensor | None:
    if not _are_logits(student, teacher) or not isinstance(tau, int | float):
        return None
    return _apply(functions.Kl, student, teacher, None, float(tau))


def _not_true_kl(student: Tensor, teacher: Tensor, y: Tensor, tau: float = 1.0) -> Tensor | None:
    if not _are_logits(student, teacher) or not isinstance(tau, int | float):
        return None
    return _apply(functions.Kl, student, teacher, y, float(tau))


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor | None:
    if values.ndim != 1 or mask.shape != values.shape or mask.dtype != torch.bool or not _is_stacked(values):
        return None
    return _apply(functions.MaskedMean, values, mask)


def _are_logits(z: Tensor, *others: Tensor) -> bool:
    """Return whether these are logits [B, C] of a stack of clients, of the same shape and type."""
    alike = all(t.shape == z.shape and t.dtype == z.dtype for t in others)
    return alike and z.ndim == 2 and 2 <= z.shape[1] <= _MAX_CLASSES and _is_stacked(z)


def _is_stacked(t: Tensor) -> bool:
    return is_batched(t) and t.dtype == torch.float32 and _stackable(t)


# Each returns None where the kernels do not support the call; the torch function is then called as usual.
_REPLACEMENTS: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    F.conv2d: _conv2d,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.relu: _relu,
    torch.relu: _relu,
    Tensor.relu: _relu,
    torch.relu_: _relu_in_place,
    Tensor.relu_: _relu_in_place,
    F.max_pool2d: _max_pool2d,
    torch.max_pool2d: _max_pool2d,
    Tensor.view: _view,
    losses.cross_entropy: _cross_entropy,
    losses.kl: _kl,
    losses.not_true_kl: _not_true_kl,
    losses.masked_mean: _masked_mean,
}


def _stackable(*tensors: Tensor | None) -> bool:
    """Return whether our functions can be called with these: outside of torch.func's transforms, or in one `vmap`."""
    active = active_transforms()
    return not active or (active == ("vmap",) and any(t is not None and is_batched(t) for t in tensors))


def _supported(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.bfloat16, torch.float16)


def _channels_first(x: Tensor) -> Tensor:
    """[B, ..., C] -> [B, C, ...], a view."""
    return x.movedim(-1, 1)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (tuple(value) * 2)[:2]


def _apply(function: Any, *args: Any) -> Tensor:
    """Call a function of a stack: with the client axis of `vmap`, or with one model as a stack of one."""
    with torch.autocast("cuda", enabled=False):
        if any(isinstance(a, Tensor) and is_batched(a) for a in args):
            return _OutOfVmap.apply(function, *args)  # type: ignore[no-any-return,no-untyped-call]
        one: Tensor = function.apply(*(a[None] if isinstance(a, Tensor) else a for a in args))
        return one[0]


def _client_first(t: Any, dim: int | None, clients: int) -> Any:
    """Move the client axis to the front; expand what all clients share. What has it there stays the same object."""
    if not isinstance(t, Tensor) or dim == 0:
        return t
    return t.expand(clients, *t.shape) if dim is None else t.movedim(dim, 0)


class _OutOfVmap(torch.autograd.Function):
    """Leaves `vmap`: passes the tensors, client axis first, to a function of the whole stack."""

    generate_vmap_rule = False

    @staticmethod
    def forward(function: Any, *args: Any) -> Any:
        raise AssertionError("can only be called under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: the function defines its own gradients."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Any, *args: Any) -> tuple[Any, int]:
        pairs = list(zip(args, in_dims[1:], strict=True))
        one_model = function.has_weights and all(dim is None for a, dim in pairs[1:] if isinstance(a, Tensor))
        if one_model:  # the clients' examples are one batch
            x = _client_first(args[0], in_dims[1], info.batch_size)
            others = [a[None] if isinstance(a, Tensor) else a for a in args[1:]]
            y = function.apply(x.flatten(0, 1)[None], *others)[0]
            return y.unflatten(0, x.shape[:2]), 0
        return function.apply(*(_client_first(a, dim, info.batch_size) for a, dim in pairs)), 0
