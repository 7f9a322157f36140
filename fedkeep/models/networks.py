"""The papers' small networks, plain modules: `forward(x) = head(features(x))`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from numbers import Integral

from torch import Tensor, nn

from fedkeep.errors import ModelError


class Network(nn.Module):
    """A body that makes features, where asked for a projection of them, and a linear classifier on top.

    `projection=256` is the head of MOON and FedGKD+: two dense layers, the first as wide as the body's features. The
    classifier sits on the projection, so features and logits both go through it.
    """

    def __init__(self, body: nn.Module, width: int, n_classes: int, projection: int | None = None) -> None:
        super().__init__()
        self.body = body
        self.projection: nn.Module = nn.Identity()
        if projection is not None:
            at_least_one("projection", projection)
            self.projection = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, projection))
            width = projection
        self.classifier = nn.Linear(width, n_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return what the classifier sees."""
        return self.projection(self.body(x))  # type: ignore[no-any-return]

    def head(self, h: Tensor) -> Tensor:
        """Return the logits."""
        return self.classifier(h)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.features(x))


def mlp(
    input_shape: Sequence[int], n_classes: int, hidden: Sequence[int] = (64,), projection: int | None = None
) -> Network:
    """A dense network with ReLU; 64-64-10 for digits."""
    layers, width = _dense(math.prod(input_shape), hidden)
    return Network(nn.Sequential(nn.Flatten(), *layers), width, n_classes, projection)


def cnn_fedntd(
    input_shape: Sequence[int], n_classes: int, hidden: Sequence[int] = (512,), projection: int | None = None
) -> Network:
    """FedNTD's and Flashback's network: conv5x5(32)-pool-conv5x5(64)-pool-fc512-fc, convolutions padded by 2."""
    body, width = _cnn(input_shape, channels=(32, 64), hidden=hidden, padding=2)
    return Network(body, width, n_classes, projection)


def cnn_fedssd(
    input_shape: Sequence[int], n_classes: int, hidden: Sequence[int] = (120, 84), projection: int | None = None
) -> Network:
    """FedSSD's network: conv5x5(6)-pool-conv5x5(16)-pool-fc120-fc84-fc, unpadded."""
    body, width = _cnn(input_shape, channels=(6, 16), hidden=hidden, padding=0)
    return Network(body, width, n_classes, projection)


def cnn_fedka(
    input_shape: Sequence[int], n_classes: int, hidden: Sequence[int] = (512,), projection: int | None = None
) -> Network:
    """FedKA's t-CNN: conv(32)-pool-conv(64)-pool-fc512-fc.

    The paper gives no kernel size; 5x5, unpadded, as in the code this network usually comes from.
    """
    body, width = _cnn(input_shape, channels=(32, 64), hidden=hidden, padding=0)
    return Network(body, width, n_classes, projection)


def at_least_one(name: str, value: object) -> None:
    """Refuse what is not a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ModelError(f"{name} must be a whole number of at least 1, not {value!r}")


def check_image(input_shape: Sequence[int]) -> None:
    """Refuse examples that are not images."""
    if len(input_shape) != 3:
        raise ModelError(f"this network takes images [channels, height, width], not examples of {tuple(input_shape)}")


def _cnn(
    input_shape: Sequence[int], channels: tuple[int, ...], hidden: Sequence[int], padding: int
) -> tuple[nn.Module, int]:
    check_image(input_shape)
    layers: list[nn.Module] = []
    fan_in, size = input_shape[0], list(input_shape[1:])
    for fan_out in channels:
        layers += [nn.Conv2d(fan_in, fan_out, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
        fan_in, size = fan_out, [(side + 2 * padding - 4) // 2 for side in size]
    if min(size) < 1:
        raise ModelError(
            f"images of {input_shape[1]}x{input_shape[2]} are too small for this network; try mlp or cnn_fedntd"
        )
    dense, width = _dense(fan_in * size[0] * size[1], hidden)
    return nn.Sequential(*layers, nn.Flatten(), *dense), width


def _dense(fan_in: int, hidden: Sequence[int]) -> tuple[list[nn.Module], int]:
    """Dense layers with ReLU, and the width of what comes out."""
    if not isinstance(hidden, Sequence):
        raise ModelError(f"hidden must list the widths of the hidden layers, as in [512], not {hidden!r}")
    for width in hidden:
        at_least_one("a width in hidden", width)
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise([fan_in, *hidden]):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return layers, [fan_in, *hidden][-1]
