"""The papers' small networks, plain modules: `forward(x) = head(features(x))`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor, nn

from fedkeep.errors import ModelError


class Network(nn.Module):
    """A body that makes features and a linear classifier on top."""

    def __init__(self, body: nn.Module, width: int, n_classes: int) -> None:
        super().__init__()
        self.body = body
        self.classifier = nn.Linear(width, n_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return what the classifier sees."""
        return self.body(x)  # type: ignore[no-any-return]

    def head(self, h: Tensor) -> Tensor:
        """Return the logits."""
        return self.classifier(h)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.features(x))


def mlp(input_shape: Sequence[int], n_classes: int, hidden: Sequence[int] = (64,)) -> Network:
    """A dense network with ReLU; 64-64-10 for digits."""
    widths = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return Network(nn.Sequential(*layers), widths[-1], n_classes)


def cnn_fedntd(input_shape: Sequence[int], n_classes: int) -> Network:
    """FedNTD's and Flashback's network: conv5x5(32)-pool-conv5x5(64)-pool-fc512-fc, convolutions padded by 2."""
    return _cnn(input_shape, n_classes, channels=(32, 64), dense=(512,), padding=2)


def cnn_fedssd(input_shape: Sequence[int], n_classes: int) -> Network:
    """FedSSD's network: conv5x5(6)-pool-conv5x5(16)-pool-fc120-fc84-fc, unpadded."""
    return _cnn(input_shape, n_classes, channels=(6, 16), dense=(120, 84), padding=0)


def cnn_fedka(input_shape: Sequence[int], n_classes: int) -> Network:
    """FedKA's t-CNN: conv(32)-pool-conv(64)-pool-fc512-fc.

    The paper gives no kernel size; 5x5, unpadded, as in the code this network usually comes from.
    """
    return _cnn(input_shape, n_classes, channels=(32, 64), dense=(512,), padding=0)


def _cnn(
    input_shape: Sequence[int],
    n_classes: int,
    channels: tuple[int, ...],
    dense: tuple[int, ...],
    padding: int,
) -> Network:
    if len(input_shape) != 3:
        raise ModelError(f"this network takes images [channels, height, width], not examples of {tuple(input_shape)}")
    layers: list[nn.Module] = []
    fan_in, size = input_shape[0], list(input_shape[1:])
    for fan_out in channels:
        layers += [nn.Conv2d(fan_in, fan_out, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
        fan_in, size = fan_out, [(side + 2 * padding - 4) // 2 for side in size]
    if min(size) < 1:
        raise ModelError(
            f"images of {input_shape[1]}x{input_shape[2]} are too small for this network; try mlp or cnn_fedntd"
        )
    layers.append(nn.Flatten())
    widths = [fan_in * size[0] * size[1], *dense]
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return Network(nn.Sequential(*layers), widths[-1], n_classes)
