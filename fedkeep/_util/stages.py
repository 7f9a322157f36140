"""The last stage of a model: consecutive modules whose input and output a method reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fedkeep.errors import ModelError


def stage_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules of a model's last stage, in order; raise unless its `last_stage` names some."""
    names = getattr(model, "last_stage", ())
    known = dict(model.named_modules())
    if not isinstance(names, Sequence) or isinstance(names, str) or not names or not all(n in known for n in names):
        raise ModelError(
            f"{type(model).__name__} needs an attribute last_stage for a method that reads feature maps: the names of "
            'its last modules before pooling or classification, such as ("layer4",)',
            key="model.last_stage",
            value=names,
        )
    return tuple(names)


def call_with_stage(model: nn.Module, x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (input of the last stage, its output, logits) in one pass."""
    names, seen = stage_names(model), {}

    def enter(module: nn.Module, args: Any) -> None:
        seen["in"] = args[0]

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        seen["out"] = output

    hooks = [
        model.get_submodule(names[0]).register_forward_pre_hook(enter),
        model.get_submodule(names[-1]).register_forward_hook(leave),
    ]
    try:
        logits = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return seen["in"], seen["out"], logits


def call_stage(model: nn.Module, maps: Tensor) -> Tensor:
    """Return the output of the last stage for this input."""
    for name in stage_names(model):
        maps = model.get_submodule(name)(maps)
    return maps
