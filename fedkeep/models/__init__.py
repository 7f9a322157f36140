"""Models of the papers, by name. Any `nn.Module` that maps inputs to logits can be used instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fedkeep._util.rng import seeded
from fedkeep._util.text import did_you_mean, format_value, one_line
from fedkeep._util.text_form import TextForm
from fedkeep._util.validate import require_choice
from fedkeep.errors import ModelError
from fedkeep.models.lora import add_lora, merge_lora
from fedkeep.models.networks import Network, cnn_fedka, cnn_fedntd, cnn_fedssd, mlp
from fedkeep.models.norm import to_group_norm
from fedkeep.models.pretrained import transformer
from fedkeep.models.resnet import resnet8, resnet10, resnet18, resnet50, resnet56
from fedkeep.models.text import bag, small_transformer
from fedkeep.models.two_logits import two_logits

__all__ = [
    "REGISTRY",
    "Network",
    "add_lora",
    "bag",
    "build",
    "cnn_fedka",
    "cnn_fedntd",
    "cnn_fedssd",
    "merge_lora",
    "mlp",
    "options",
    "resnet8",
    "resnet10",
    "resnet18",
    "resnet50",
    "resnet56",
    "small_transformer",
    "to_group_norm",
    "transformer",
    "two_logits",
]

REGISTRY: dict[str, Callable[..., Network]] = {
    "mlp": mlp,
    "cnn_fedntd": cnn_fedntd,
    "cnn_fedssd": cnn_fedssd,
    "cnn_fedka": cnn_fedka,
    "resnet8": resnet8,
    "resnet10": resnet10,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "resnet56": resnet56,
    "bag": bag,
    "small_transformer": small_transformer,
    "transformer": transformer,
}
TEXT_MODELS = ("bag", "small_transformer", "transformer")


def build(
    name: str,
    input_shape: Sequence[int] | TextForm,
    n_classes: int,
    seed: int = 0,
    projection: int | None = None,
    **others: Any,
) -> Network:
    """Build a model by name. Its weights depend only on the seed; torch's random state is not changed.

    `projection` (256 in MOON and FedGKD+) adds a projection head below the classifier. `options(name)` lists the other
    options of a model.

    >>> sum(p.numel() for p in build("mlp", (1, 8, 8), 10).parameters())
    4810
    >>> build("resnet8", (3, 32, 32), 10, projection=256).features(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 256])
    """
    valid = options(name)
    if isinstance(input_shape, TextForm) and name not in TEXT_MODELS:
        raise ModelError(
            f"{name} does not take texts (valid: {', '.join(TEXT_MODELS)})", key="name", value=name, valid=TEXT_MODELS
        )
    for option in others:
        if option not in valid:
            raise ModelError(
                f"{name} has no option {option!r}: {did_you_mean(option, valid)}",
                key=option,
                value=others[option],
                valid=valid,
            )
    try:
        with seeded(seed, torch.device("cpu")):
            return REGISTRY[name](input_shape, n_classes, projection=projection, **others)
    except (RuntimeError, MemoryError) as error:  # torch could not allocate its weights
        given = {"projection": projection, **others}
        raise ModelError(
            f"{name} cannot be built with {format_value(given)}: {one_line(error)}", key="model", value=name
        ) from error


def options(name: str) -> dict[str, Any]:
    """Return the options of a model and their default values.

    >>> options("resnet8")
    {'width': 16, 'channels_per_group': 16, 'norm': 'group', 'projection': None, 'head': 'linear'}
    """
    require_choice("model", name, REGISTRY, error=ModelError)
    return {key: p.default for key, p in list(inspect.signature(REGISTRY[name]).parameters.items())[2:]}
