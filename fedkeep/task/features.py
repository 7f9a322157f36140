"""Features of a model: what its own `features` returns, or the input of its last layer if that is linear."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn


def has_own_features(model: nn.Module) -> bool:
    """Return whether the model says what its features are."""
    return hasattr(model, "features") and hasattr(model, "head")


def call_with_features(model: nn.Module, x: Any, layer: str | None) -> tuple[Tensor, Tensor]:
    """Return (features, logits) in one pass. `layer` is the last linear layer; None: the model's own features."""
    if layer is None:
        features = cast(Any, model).features(x)
        return features, cast(Any, model).head(features)
    inputs: list[Tensor] = []
    hook = model.get_submodule(layer).register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    try:
        logits = model(x)
    finally:
        hook.remove()
    return inputs[-1], logits


def call_head(model: nn.Module, features: Tensor, layer: str | None) -> Tensor:
    """Return the logits of features."""
    head = cast(Any, model).head if layer is None else model.get_submodule(layer)
    return head(features)  # type: ignore[no-any-return]


def find_last_linear(model: nn.Module, x: Any) -> str | None:
    """Return the name of the linear layer whose output is the logits; None if there is none.

    >>> find_last_linear(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(4, 3))
    '2'
    >>> find_last_linear(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.rand(4, 3)) is None
    True
    """
    outputs: dict[str, Any] = {}
    hooks = [
        layer.register_forward_hook(lambda module, args, output, name=name: outputs.update({name: output}))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        logits = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    same = [name for name, output in outputs.items() if _equal(output, logits)]
    return same[-1] if same else None


def _equal(output: Any, logits: Tensor) -> bool:
    """Return whether a layer's output is the logits. One of nested tensors, or of another form, is not."""
    flat = isinstance(output, Tensor) and not output.is_nested
    return flat and output.shape == logits.shape and torch.equal(output, logits)
