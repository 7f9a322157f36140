"""GroupNorm in the place of BatchNorm."""

from __future__ import annotations

import copy
import logging

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from fedkeep.errors import ModelError
from fedkeep.models.networks import at_least_one

log = logging.getLogger(__name__)


def groups(channels: int, channels_per_group: int = 16) -> int:
    """Return the number of groups: the largest divisor of the channels not above channels / channels_per_group.

    >>> groups(64), groups(24), groups(8), groups(36, channels_per_group=8)
    (4, 1, 1, 4)
    """
    limit = max(channels // channels_per_group, 1)
    return max(n for n in range(1, limit + 1) if channels % n == 0)


def to_group_norm(module: nn.Module, channels_per_group: int = 16) -> nn.Module:
    """Return a copy of a module in which every BatchNorm is a GroupNorm; the original is left as it was.

    Kept: the affine parameters (where there are any), what is frozen or shared, eps, device, dtype and mode. Dropped:
    the running averages, and hooks on the layers replaced. GroupNorm normalises every example by itself and has no
    averages to take over, so a network that was trained with BatchNorm computes something else afterwards: train it
    again, or at least further.

    >>> norm = to_group_norm(nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32)))[1]
    >>> type(norm).__name__, norm.num_groups, norm.num_channels
    ('GroupNorm', 2, 32)
    """
    at_least_one("channels_per_group", channels_per_group)
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            _check_replaceable(layer, name or "the module")
    result = copy.deepcopy(module)
    # by object, so that a layer used in two places is replaced by one layer in both
    replaced = {
        layer: _group_norm(layer, name, channels_per_group)
        for name, layer in result.named_modules()
        if isinstance(layer, _BatchNorm)
    }
    for parent in list(result.modules()):
        for name, child in parent._modules.items():  # named_children() hides the second name of a shared layer
            if isinstance(child, _BatchNorm):
                parent._modules[name] = replaced[child]
    return replaced[result] if isinstance(result, _BatchNorm) else result


def _group_norm(layer: _BatchNorm, name: str, channels_per_group: int) -> nn.GroupNorm:
    channels = layer.num_features
    n_groups = groups(channels, channels_per_group)
    if isinstance(layer, nn.BatchNorm1d) and n_groups == channels:
        log.warning(
            "%s becomes a GroupNorm of one channel a group: on inputs [batch, channels] it gives nothing but its bias",
            name or "the module",
        )
    norm = nn.GroupNorm(n_groups, channels, eps=layer.eps, affine=False).train(layer.training)
    # the parameters themselves, not their values: tied ones stay tied, frozen ones frozen
    norm.affine, norm.weight, norm.bias = layer.affine, layer.weight, layer.bias
    return norm


def _check_replaceable(layer: _BatchNorm, name: str) -> None:
    if isinstance(layer, _LazyNormBase):
        raise ModelError(
            f"{name} is {type(layer).__name__}, not initialised yet: run one batch through the model first"
        )
    if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise ModelError(
            f"{name} is {type(layer).__name__}, a BatchNorm with a forward of its own, and what that adds would be "
            "lost; replace it by hand"
        )
