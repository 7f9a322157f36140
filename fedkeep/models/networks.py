"""Small networks of the papers: an MLP and three CNNs, each with `forward(x) = head(features(x))`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor, nn

from fedkeep._util.text import format_value
from fedkeep._util.text_form import TextForm
from fedkeep._util.validate import require_choice, require_whole
from fedkeep.errors import ModelError
from fedkeep.models.etf import etf_classifier

MAX_WIDTH = 2**20  # of a layer
MAX_LAYERS = 256
LAST_OF_CNN = ("3", "4", "5")  # the second convolution with its ReLU and pool


class Network(nn.Module):
    """A body that computes features, an optional projection head, and a linear classifier.

    `projection=256` is the head of MOON and FedGKD+: two dense layers, the first as wide as the body's features. The
    classifier takes the output of the head, so features and logits both depend on it. `head="etf"` is a classifier that
    is never trained (fedkeep.models.etf). `last_stage` names the parts of the body that compute its last feature maps,
    in order.
    """

    text_form: TextForm | None = None  # of the longest texts that a text model takes
    pretrained: str | None = None  # a hash of the weights that were read from files

    def __init__(
        self,
        body: nn.Module,
        width: int,
        n_classes: int,
        projection: int | None = None,
        head: str = "linear",
        last_stage: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._last_stage = tuple(f"body.{name}" for name in last_stage)  # private: no part of what a run folder records
        require_choice("head", head, ("linear", "etf"), error=ModelError)
        self.body = body
        self.projection: nn.Module = nn.Identity()
        if projection is not None:
            require_whole("projection", projection, low=1, high=MAX_WIDTH, error=ModelError)
            self.projection = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, projection))
            width = projection
        self.classifier = etf_classifier(width, n_classes) if head == "etf" else nn.Linear(width, n_classes)

    @property
    def last_stage(self) -> tuple[str, ...]:
        """The names of the modules that compute the last feature maps (for FedAlign)."""
        return self._last_stage

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the classifier."""
        return self.projection(self.body(x))  # type: ignore[no-any-return]

    def head(self, h: Tensor) -> Tensor:
        """Return the logits."""
        return self.classifier(h)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.features(x))


def mlp(
    input_shape: Sequence[int],
    n_classes: int,
    hidden: Sequence[int] = (64,),
    projection: int | None = None,
    head: str = "linear",
) -> Network:
    """Return a dense network with ReLU; its layers are 64-64-10 for digits."""
    layers, width = _dense(math.prod(input_shape), hidden)
    last = [str(len(layers) - 1), str(len(layers))] if layers else []
    return Network(nn.Sequential(nn.Flatten(), *layers), width, n_classes, projection, head, last)


def cnn_fedntd(
    input_shape: Sequence[int],
    n_classes: int,
    hidden: Sequence[int] = (512,),
    projection: int | None = None,
    head: str = "linear",
) -> Network:
    """Return the network of FedNTD and Flashback: conv5x5(32)-pool-conv5x5(64)-pool-fc512-fc, padded by 2."""
    body, width = _cnn(input_shape, channels=(32, 64), hidden=hidden, padding=2)
    return Network(body, width, n_classes, projection, head, LAST_OF_CNN)


def cnn_fedssd(
    input_shape: Sequence[int],
    n_classes: int,
    hidden: Sequence[int] = (120, 84),
    projection: int | None = None,
    head: str = "linear",
) -> Network:
    """Return the network of FedSSD: conv5x5(6)-pool-conv5x5(16)-pool-fc120-fc84-fc, without padding."""
    body, width = _cnn(input_shape, channels=(6, 16), hidden=hidden, padding=0)
    return Network(body, width, n_classes, projection, head, LAST_OF_CNN)


def cnn_fedka(
    input_shape: Sequence[int],
    n_classes: int,
    hidden: Sequence[int] = (512,),
    projection: int | None = None,
    head: str = "linear",
) -> Network:
    """Return the t-CNN of FedKA: conv(32)-pool-conv(64)-pool-fc512-fc.

    The paper does not give the kernel size. Here it is 5x5 without padding, as in the code that usually defines this
    network.
    """
    body, width = _cnn(input_shape, channels=(32, 64), hidden=hidden, padding=0)
    return Network(body, width, n_classes, projection, head, LAST_OF_CNN)


def require_image(input_shape: Sequence[int]) -> None:
    """Raise unless the examples are images."""
    if len(input_shape) != 3:
        raise ModelError(
            f"this network needs images [channels, height, width], not examples of shape {tuple(input_shape)}",
            key="input_shape",
            value=tuple(input_shape),
        )


def _cnn(
    input_shape: Sequence[int], channels: tuple[int, ...], hidden: Sequence[int], padding: int
) -> tuple[nn.Module, int]:
    require_image(input_shape)
    layers: list[nn.Module] = []
    fan_in, size = input_shape[0], list(input_shape[1:])
    for fan_out in channels:
        layers += [nn.Conv2d(fan_in, fan_out, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
        fan_in, size = fan_out, [(side + 2 * padding - 4) // 2 for side in size]
    if min(size) < 1:
        raise ModelError(
            f"images of {input_shape[1]}x{input_shape[2]} are too small for this network; try mlp or cnn_fedntd",
            key="input_shape",
            value=tuple(input_shape),
        )
    dense, width = _dense(fan_in * size[0] * size[1], hidden)
    return nn.Sequential(*layers, nn.Flatten(), *dense), width


def _dense(fan_in: int, hidden: Sequence[int]) -> tuple[list[nn.Module], int]:
    """Return dense layers with ReLU, and the width of their output."""
    if not isinstance(hidden, Sequence) or len(hidden) > MAX_LAYERS:
        raise ModelError(
            f"hidden must be a list of at most {MAX_LAYERS} layer widths, such as [512], not {format_value(hidden)}",
            key="hidden",
            value=hidden,
        )
    for width in hidden:
        require_whole("hidden", width, low=1, high=MAX_WIDTH, error=ModelError)
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise([fan_in, *hidden]):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return layers, [fan_in, *hidden][-1]
