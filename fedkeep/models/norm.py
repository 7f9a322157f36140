"""Replacement of BatchNorm by GroupNorm."""

from __future__ import annotations

import copy
import logging

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from fedkeep._util.text import format_layer
from fedkeep._util.validate import require_whole
from fedkeep.errors import ModelError

log = logging.getLogger(__name__)


def groups(channels: int, channels_per_group: int = 16) -> int:
    """Return the number of groups: the largest divisor of the channels of at most channels / channels_per_group.

    >>> groups(64), groups(24), groups(8), groups(36, channels_per_group=8)
    (4, 1, 1, 4)
    """
    limit = max(channels // channels_per_group, 1)
    return max(n for n in range(1, limit + 1) if channels % n == 0)


def to_group_norm(module: nn.Module, channels_per_group: int = 16) -> nn.Module:
    """Return a copy of a module with every BatchNorm replaced by GroupNorm; the original is not changed.

    The copy keeps the affine parameters (if any), frozen and shared parameters, eps, device, dtype and training mode.
    It drops running averages, and hooks on the replaced layers. GroupNorm normalises each example separately and has no
    running averages, so a network trained with BatchNorm computes different outputs afterwards: train it again, or
    fine-tune it.

    >>> norm = to_group_norm(nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32)))[1]
    >>> type(norm).__name__, norm.num_groups, norm.num_channels
    ('GroupNorm', 2, 32)
    """
    require_whole("channels_per_group", channels_per_group, low=1, error=ModelError)
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            _require_replaceable(layer, name)
    result = copy.deepcopy(module)
    # keyed by object, so that a layer used in two places is replaced by the same layer in both
    replaced = {
        layer: _group_norm(layer, name, channels_per_group)
        for name, layer in result.named_modules()
        if isinstance(layer, _BatchNorm)
    }
    for parent in list(result.modules()):
        for name, child in parent._modules.items():  # named_children() skips the second name of a shared layer
            if isinstance(child, _BatchNorm):
                parent._modules[name] = replaced[child]
    return replaced[result] if isinstance(result, _BatchNorm) else result


def _group_norm(layer: _BatchNorm, name: str, channels_per_group: int) -> nn.GroupNorm:
    channels = layer.num_features
    n_groups = groups(channels, channels_per_group)
    if isinstance(layer, nn.BatchNorm1d) and n_groups == channels:
        log.warning(
            "%s becomes a GroupNorm with one channel per group: on inputs [batch, channels] it returns only its bias",
            format_layer(name),
        )
    norm = nn.GroupNorm(n_groups, channels, eps=layer.eps, affine=False).train(layer.training)
    # the parameters themselves, not copies: tied parameters stay tied, frozen ones stay frozen
    norm.affine, norm.weight, norm.bias = layer.affine, layer.weight, layer.bias
    return norm


def _require_replaceable(layer: _BatchNorm, name: str) -> None:
    kind = type(layer).__name__
    if isinstance(layer, _LazyNormBase):
        raise ModelError(
            f"{format_layer(name)} is a {kind} that is not initialised: run one batch through the model first",
            key=name or "model",
            value=kind,
        )
    if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise ModelError(
            f"{format_layer(name)} is a {kind}, a BatchNorm with its own forward, which GroupNorm would not compute; "
            "replace it yourself",
            key=name or "model",
            value=kind,
        )
