"""Residual networks with GroupNorm (He et al. 2016; FedGKD section 5.1, FedNTD G.3, FedSSD, FedKA).

BatchNorm becomes GroupNorm with 16 channels a group, as in FedGKD. Images up to 64 pixels enter through a 3x3
convolution that keeps their size, larger ones through ImageNet's 7x7 with stride 2 and a pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedkeep.models.networks import Network, at_least_one, check_image
from fedkeep.models.norm import groups

LARGEST_SMALL_IMAGE = 64  # Tiny-ImageNet's: FedGKD's code gives it the 3x3 stem too

Norm = Callable[[int], nn.Module]


def resnet8(
    input_shape: Sequence[int],
    n_classes: int,
    width: int = 16,
    channels_per_group: int = 16,
    projection: int | None = None,
) -> Network:
    """FedGKD's network for CIFAR: a 3x3 stem for images of any size, three stages of one block, 16/32/64 channels."""
    return _resnet(input_shape, n_classes, Basic, (1, 1, 1), width, channels_per_group, projection, small=True)


def resnet10(
    input_shape: Sequence[int],
    n_classes: int,
    width: int = 64,
    channels_per_group: int = 16,
    projection: int | None = None,
) -> Network:
    """FedNTD's network of section G.3: four stages of one block, 64/128/256/512 channels."""
    return _resnet(input_shape, n_classes, Basic, (1, 1, 1, 1), width, channels_per_group, projection)


def resnet18(
    input_shape: Sequence[int],
    n_classes: int,
    width: int = 64,
    channels_per_group: int = 16,
    projection: int | None = None,
) -> Network:
    """Four stages of two blocks, 64/128/256/512 channels."""
    return _resnet(input_shape, n_classes, Basic, (2, 2, 2, 2), width, channels_per_group, projection)


def resnet50(
    input_shape: Sequence[int],
    n_classes: int,
    width: int = 64,
    channels_per_group: int = 16,
    projection: int | None = None,
) -> Network:
    """The network of FedGKD, FedSSD and FedKA for Tiny-ImageNet: 3, 4, 6 and 3 bottlenecks, 256 to 2048 channels."""
    return _resnet(input_shape, n_classes, Bottleneck, (3, 4, 6, 3), width, channels_per_group, projection)


class Residual(nn.Module):
    """ReLU of a branch plus a shortcut; a 1x1 convolution makes the shortcut fit where the shape changes."""

    expansion = 1  # channels that come out, in units of the width

    def __init__(self, branch: nn.Module, fan_in: int, fan_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or fan_in != fan_out:
            self.shortcut = nn.Sequential(_conv(fan_in, fan_out, 1, stride), norm(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return nn.functional.relu(self.branch(x) + self.shortcut(x))


class Basic(Residual):
    """Two 3x3 convolutions."""

    def __init__(self, fan_in: int, width: int, stride: int, norm: Norm) -> None:
        branch = nn.Sequential(
            *(_conv(fan_in, width, 3, stride), norm(width), nn.ReLU()),
            *(_conv(width, width, 3), norm(width)),
        )
        super().__init__(branch, fan_in, width, stride, norm)


class Bottleneck(Residual):
    """1x1 down to the width, 3x3, 1x1 up to four times the width; the 3x3 takes the stride."""

    expansion = 4

    def __init__(self, fan_in: int, width: int, stride: int, norm: Norm) -> None:
        branch = nn.Sequential(
            *(_conv(fan_in, width, 1), norm(width), nn.ReLU()),
            *(_conv(width, width, 3, stride), norm(width), nn.ReLU()),
            *(_conv(width, 4 * width, 1), norm(4 * width)),
        )
        super().__init__(branch, fan_in, 4 * width, stride, norm)


class GlobalMean(nn.Module):
    """The mean over the pixels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, channels]."""
        return x.mean((-2, -1))


def _resnet(
    input_shape: Sequence[int],
    n_classes: int,
    block: type[Basic] | type[Bottleneck],
    blocks: tuple[int, ...],
    width: int,
    channels_per_group: int,
    projection: int | None,
    small: bool | None = None,
) -> Network:
    check_image(input_shape)
    at_least_one("width", width)
    at_least_one("channels_per_group", channels_per_group)

    def norm(channels: int) -> nn.Module:
        return nn.GroupNorm(groups(channels, channels_per_group), channels)

    channels, height, breadth = input_shape
    small = max(height, breadth) <= LARGEST_SMALL_IMAGE if small is None else small
    parts: list[tuple[str, nn.Module]] = [("stem", _stem(channels, width, norm, small))]
    fan_in = width
    for i, n in enumerate(blocks):
        wide = width * 2**i
        stage = [block(fan_in, wide, stride=1 if i == 0 else 2, norm=norm)]
        fan_in = wide * block.expansion
        stage += [block(fan_in, wide, stride=1, norm=norm) for _ in range(n - 1)]
        parts.append((f"stage{i + 1}", nn.Sequential(*stage)))
    return Network(nn.Sequential(OrderedDict([*parts, ("pool", GlobalMean())])), fan_in, n_classes, projection)


def _stem(channels: int, width: int, norm: Norm, small: bool) -> nn.Module:
    if small:
        return nn.Sequential(_conv(channels, width, 3), norm(width), nn.ReLU())
    return nn.Sequential(_conv(channels, width, 7, stride=2), norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))


def _conv(fan_in: int, fan_out: int, size: int, stride: int = 1) -> nn.Module:
    """A convolution without bias (a norm follows), with He's initialisation."""
    conv = nn.Conv2d(fan_in, fan_out, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
