"""Residual networks with GroupNorm or BatchNorm (He et al. 2016; FedGKD section 5.1, FedNTD G.3, FedSSD, FedKA).

GroupNorm with 16 channels per group replaces BatchNorm, as in FedGKD. With `norm="batch"` it is BatchNorm by the
statistics of the batch, without running averages, as in FedNTD's code. The first layer for images of up to 64 pixels is
a 3x3 convolution that keeps their size; for larger images it is ImageNet's 7x7 convolution with stride 2 and a pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fedkeep._util.validate import require_choice, require_whole
from fedkeep.errors import ModelError
from fedkeep.models.networks import MAX_WIDTH, Network, require_image
from fedkeep.models.norm import groups

LARGEST_SMALL_IMAGE = 64  # the side of Tiny-ImageNet's images, for which FedGKD's code uses the 3x3 stem too

Norm = Callable[[int], nn.Module]


class Residual(nn.Module):
    """ReLU of a branch plus a shortcut. Where the shape changes, the shortcut is a 1x1 convolution."""

    expansion = 1  # output channels, as a multiple of the width

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
    """A block of two 3x3 convolutions."""

    def __init__(self, fan_in: int, width: int, stride: int, norm: Norm) -> None:
        branch = nn.Sequential(
            *(_conv(fan_in, width, 3, stride), norm(width), nn.ReLU()),
            *(_conv(width, width, 3), norm(width)),
        )
        super().__init__(branch, fan_in, width, stride, norm)


class Bottleneck(Residual):
    """A block of 1x1, 3x3 and 1x1 convolutions; the last has four times the width, the 3x3 has the stride."""

    expansion = 4

    def __init__(self, fan_in: int, width: int, stride: int, norm: Norm) -> None:
        branch = nn.Sequential(
            *(_conv(fan_in, width, 1), norm(width), nn.ReLU()),
            *(_conv(width, width, 3, stride), norm(width), nn.ReLU()),
            *(_conv(width, 4 * width, 1), norm(4 * width)),
        )
        super().__init__(branch, fan_in, 4 * width, stride, norm)


class GlobalMean(nn.Module):
    """The mean over all pixels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, channels]."""
        return x.mean((-2, -1))


@dataclass(frozen=True)
class Depth:
    """What distinguishes one residual network from another."""

    about: str
    block: type[Basic] | type[Bottleneck]
    blocks: tuple[int, ...]  # blocks in each stage
    width: int = 64  # default number of channels in the first stage; each further stage doubles them
    small_stem: bool = False  # use the 3x3 stem for images of any size


DEPTHS = {
    "resnet8": Depth("FedGKD's network for CIFAR: 3 stages of one block.", Basic, (1, 1, 1), 16, small_stem=True),
    "resnet10": Depth("FedNTD's network of section G.3: 4 stages of one block.", Basic, (1, 1, 1, 1)),
    "resnet18": Depth("4 stages of two blocks.", Basic, (2, 2, 2, 2)),
    "resnet50": Depth("FedGKD's, FedSSD's and FedKA's for Tiny-ImageNet: 4 stages.", Bottleneck, (3, 4, 6, 3)),
    "resnet56": Depth("FedNTD's network of table 13: 3 stages.", Bottleneck, (6, 6, 6), 16, small_stem=True),
}


def _constructor(name: str) -> Callable[..., Network]:
    """Return the function that builds a network of this depth."""
    depth = DEPTHS[name]

    def resnet(
        input_shape: Sequence[int],
        n_classes: int,
        width: int = depth.width,
        channels_per_group: int = 16,
        norm: str = "group",
        projection: int | None = None,
        head: str = "linear",
    ) -> Network:
        body, features = _resnet(depth, input_shape, width, channels_per_group, norm)
        return Network(body, features, n_classes, projection, head, [f"stage{len(depth.blocks)}"])

    resnet.__name__ = resnet.__qualname__ = name
    resnet.__doc__ = depth.about
    return resnet


resnet8, resnet10, resnet18, resnet50, resnet56 = (_constructor(name) for name in DEPTHS)


def _resnet(
    depth: Depth,
    input_shape: Sequence[int],
    width: int,
    channels_per_group: int,
    norm: str,
) -> tuple[nn.Module, int]:
    """Return the body, and the width of its features."""
    require_image(input_shape)
    require_whole("width", width, low=1, high=MAX_WIDTH, error=ModelError)
    require_whole("channels_per_group", channels_per_group, low=1, high=MAX_WIDTH, error=ModelError)

    require_choice("norm", norm, ("group", "batch"), error=ModelError)

    def layer(channels: int) -> nn.Module:
        if norm == "batch":
            return nn.BatchNorm2d(channels, track_running_stats=False)
        return nn.GroupNorm(groups(channels, channels_per_group), channels)

    channels, height, breadth = input_shape
    small = depth.small_stem or max(height, breadth) <= LARGEST_SMALL_IMAGE
    parts: list[tuple[str, nn.Module]] = [("stem", _stem(channels, width, layer, small))]
    fan_in = width
    for i, n in enumerate(depth.blocks):
        wide = width * 2**i
        stage = [depth.block(fan_in, wide, stride=1 if i == 0 else 2, norm=layer)]
        fan_in = wide * depth.block.expansion
        stage += [depth.block(fan_in, wide, stride=1, norm=layer) for _ in range(n - 1)]
        parts.append((f"stage{i + 1}", nn.Sequential(*stage)))
    return nn.Sequential(OrderedDict([*parts, ("pool", GlobalMean())])), fan_in


def _stem(channels: int, width: int, norm: Norm, small: bool) -> nn.Module:
    if small:
        return nn.Sequential(_conv(channels, width, 3), norm(width), nn.ReLU())
    return nn.Sequential(_conv(channels, width, 7, stride=2), norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))


def _conv(fan_in: int, fan_out: int, size: int, stride: int = 1) -> nn.Module:
    """Return a convolution with He's initialisation and without bias, because a norm follows it."""
    conv = nn.Conv2d(fan_in, fan_out, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
