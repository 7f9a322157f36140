"""Features of a model: what its own `features` returns, or the inputs of its last layer if that is linear."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from fedkeep.errors import ModelError


def has_own_features(model: nn.Module) -> bool:
    """Return whether the model says what its features are."""
    return hasattr(model, "features") and hasattr(model, "head")


def call_with_own_features(model: nn.Module, x: Any) -> tuple[Tensor, Tensor]:
    """Return (features, logits) of a model with `features` and `head`."""
    features = cast(Any, model).features(x)
    return features, cast(Any, model).head(features)


def call_with_inputs(model: nn.Module, x: Any, layer: str) -> tuple[Tensor, Tensor]:
    """Return (inputs of a linear layer, logits) in one pass; the inputs of the call that made the logits."""
    calls: list[tuple[Tensor, Tensor]] = []

    def record(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
        calls.append((args[0] if args else kwargs["input"], output))

    hook = model.get_submodule(layer).register_forward_hook(record, with_kwargs=True)
    try:
        logits = model(x)
    finally:
        hook.remove()
    if not calls:
        raise ModelError(f"{layer} made the logits at the start of the run, but is not called now", key=layer)
    return next((inputs for inputs, output in calls if output is logits), calls[-1][0]), logits


def find_last_linear(model: nn.Module, x: Any) -> str | None:
    """Return the name of the linear layer whose output, or a view of the same shape, is the logits; None without one.

    >>> import torch
    >>> find_last_linear(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(4, 3))
    '2'
    >>> find_last_linear(nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True)), torch.rand(4, 3)) is None
    True
    """
    calls: list[tuple[str, Any, int]] = []  # a layer, what it returned, and how often that had been changed in place

    def record(name: str, output: Any) -> None:
        calls.append((name, output, _version(output)))

    hooks = [
        layer.register_forward_hook(lambda module, args, output, name=name: record(name, output))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        logits = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    made_by = (name for name, output, version in calls if _is_same(output, logits) and version == _version(logits))
    return next(made_by, None)


def _is_same(output: Any, logits: Any) -> bool:
    """Return whether these are one tensor, or two views of the same numbers."""
    if output is logits:
        return True
    if not (isinstance(output, Tensor) and isinstance(logits, Tensor)):
        return False
    same_numbers = output.data_ptr() == logits.data_ptr() and output.stride() == logits.stride()
    return same_numbers and output.shape == logits.shape


def _version(output: Any) -> int:
    """Return how often a tensor has been changed in place."""
    known = isinstance(output, Tensor) and not output.is_inference()
    return output._version if known else 0
