"""The papers' models by name. Any `nn.Module` from inputs to logits will do in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fedkeep.errors import ModelError, nearest
from fedkeep.models.networks import Network, cnn_fedka, cnn_fedntd, cnn_fedssd, mlp

__all__ = ["REGISTRY", "Network", "build", "cnn_fedka", "cnn_fedntd", "cnn_fedssd", "mlp"]

REGISTRY: dict[str, Callable[..., Network]] = {
    "mlp": mlp,
    "cnn_fedntd": cnn_fedntd,
    "cnn_fedssd": cnn_fedssd,
    "cnn_fedka": cnn_fedka,
}


def build(name: str, input_shape: Sequence[int], n_classes: int, seed: int = 0) -> Network:
    """Build a model by name, with weights that depend on the seed alone; torch's random state is left as it was.

    >>> sum(p.numel() for p in build("mlp", (1, 8, 8), 10).parameters())
    4810
    """
    if name not in REGISTRY:
        raise ModelError(f"unknown model {name!r}: {nearest(name, REGISTRY)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return REGISTRY[name](input_shape, n_classes)
