"""BatchNorm by the statistics of the batch, in which padded examples do not count.

A stacked engine pads the batches of its clients to the same size. `real_examples` says, around the code that calls a
model on a batch, which of its examples are real; `batch_statistics`, around the model itself, lets every BatchNorm
without running averages compute mean and variance from these alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from fedkeep._util.text import format_layer
from fedkeep.errors import MethodError, ModelError


class _Real(NamedTuple):
    mask: Tensor  # [B], False is padding
    padded: bool  # whether there can be padding at all


_real: ContextVar[_Real | None] = ContextVar("real", default=None)


@contextmanager
def real_examples(mask: Tensor, padded: bool) -> Iterator[None]:
    """Say which examples of the batch that a model is called with are real; without padding, torch computes."""
    token = _real.set(_Real(mask, padded))
    try:
        yield
    finally:
        _real.reset(token)


class batch_statistics(TorchFunctionMode):  # noqa: N801 (used as a function)
    """Computes BatchNorm from the real examples of a batch, wherever a module calls it.

    `n_examples` is the number of examples that the module is called with.
    """

    def __init__(self, n_examples: int) -> None:
        super().__init__()
        self.n_examples = n_examples

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return _batch_norm(self.n_examples, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _batch_norm(
    n_examples: int,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    real = _real.get()
    if real is not None and training:
        _require_batch(real.mask.shape[0], n_examples, input)
    is_single = input.shape[0] * math.prod(input.shape[2:]) == 1  # torch refuses it
    if not training or not ((real is not None and real.padded) or is_single):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    mask = real.mask if real is not None else torch.ones(input.shape[0], dtype=torch.bool, device=input.device)
    return masked_batch_norm(input, mask, weight, bias, eps)


def _require_batch(batch: int, n_examples: int, input: Tensor) -> None:
    """Raise unless the method calls the model with its batch, and the model its BatchNorm with one row per example."""
    if n_examples != batch:
        raise MethodError(
            f"BatchNorm gets {n_examples} examples in a local step with a batch of {batch}: the method calls the model "
            "with other examples than its batch, and their statistics would mix; use nn.GroupNorm with this method",
            key="model",
            value=n_examples,
        )
    if input.shape[0] != batch:
        raise ModelError(
            f"a BatchNorm of the model gets {tuple(input.shape)} where the model gets {batch} examples: the model "
            "reshapes or repeats the batch, so that padded examples cannot be left out; keep the examples in the "
            "first axis, or use nn.GroupNorm",
            key="model",
            value=tuple(input.shape),
        )


def masked_batch_norm(x: Tensor, mask: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise [B, C, ...] by mean and variance of every channel over the examples where the mask is True.

    >>> x = torch.tensor([[1.0], [3.0], [99.0]])
    >>> masked_batch_norm(x, torch.tensor([True, True, False]), None, None, 0.0)[:2].flatten()
    tensor([-1.,  1.])
    """
    wide = _wide(x)
    axes, ones = (0, *range(2, x.ndim)), [1] * (x.ndim - 2)
    real = mask.to(wide.dtype).reshape(-1, 1, *ones)
    count = (real.sum() * math.prod(x.shape[2:])).clamp(min=1)  # 0 for a client that has no more steps
    centred = wide - (wide * real).sum(axes, keepdim=True) / count
    out = centred * torch.rsqrt((centred.square() * real).sum(axes, keepdim=True) / count + eps)
    if weight is not None:
        out = out * weight.reshape(-1, *ones)
    if bias is not None:
        out = out + bias.reshape(-1, *ones)
    return out.to(x.dtype)


def unmasked_batch_norm(
    x: Tensor, mean: Tensor | None, variance: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise [B, C, ...] by a given mean and variance of every channel, or by those of the batch for None.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> unmasked_batch_norm(x, None, None, None, None, 0.0).flatten()
    tensor([-1.,  1.])
    """
    wide, ones = _wide(x), [1] * (x.ndim - 2)
    if mean is None or variance is None:
        variance, mean = torch.var_mean(wide, (0, *range(2, x.ndim)), correction=0)
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    centred = wide - mean.reshape(-1, *ones)
    if bias is None:
        return (centred * scale.reshape(-1, *ones)).to(x.dtype)
    return torch.addcmul(bias.reshape(-1, *ones), centred, scale.reshape(-1, *ones)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def has_batch_statistics(model: nn.Module) -> bool:
    """Return whether an example's logits depend on the other examples of its batch: BatchNorm without averages."""
    return any(isinstance(layer, _BatchNorm) and layer.running_mean is None for layer in model.modules())


def frozen_layers(model: nn.Module) -> list[str]:
    """Return the names of the BatchNorm layers that are in evaluation mode and keep their running averages."""
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None and not layer.training
    ]


def check_batch_norm(name: str, layer: _BatchNorm) -> None:
    """Raise unless a BatchNorm layer is frozen, or computes the statistics of the batch."""
    kind, where = type(layer).__name__, format_layer(name)
    if layer.running_mean is not None:
        if layer.training:
            raise ModelError(
                f"{where} is a {kind} with running averages, which are not weights, so averaging clients gives a "
                "model that nobody trained: set track_running_stats=False to use the statistics of the batch, call "
                ".eval() on the layer to keep its averages as they are, or use nn.GroupNorm, with which "
                "fedkeep.models.to_group_norm(model) replaces every BatchNorm",
                key=name or "model",
                value=kind,
            )
    elif type(layer).forward is not _BatchNorm.forward:
        raise ModelError(
            f"{where} is a {kind}, a BatchNorm with its own forward, in which padded examples cannot be left out: use "
            "torch's BatchNorm, or nn.GroupNorm",
            key=name or "model",
            value=kind,
        )
