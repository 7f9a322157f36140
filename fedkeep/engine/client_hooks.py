"""The client hooks of a method: checks of what they return, and where in a visit an error happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedkeep.engine.round_parts import visit_part
from fedkeep.errors import MethodError
from fedkeep.method import FedAvg


def require_whole_batches(method: FedAvg, part_size: int | None) -> None:
    """Raise if a method computes with single examples, or batches are divided, for a model of batch statistics."""
    if part_size is not None:
        raise MethodError(
            "accumulate divides batches, by whose statistics BatchNorm normalises: use accumulate = 1 or nn.GroupNorm",
            key="accumulate",
        )
    for hook in ("measure", "select_examples"):
        if method.uses(hook):
            raise MethodError(
                f"{method.name} computes with single examples ({hook}), but with BatchNorm by the statistics of the "
                "batch an example's logits depend on the others: use nn.GroupNorm with this method",
                key="model",
                value=hook,
            )


def require_pair(method: FedAvg, hook: str, pair: str, value: Any) -> tuple[Any, Any]:
    """Return what a hook returned; raise unless it is a pair."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise MethodError(f"{method.name}: {hook} must return {pair}, not {type(value).__name__}", key=hook)
    return value


def require_selection(method: FedAvg, choice: Any) -> tuple[Tensor, Tensor]:
    """Return the index and the weight of the selected examples; raise unless they are whole numbers and as many."""
    index, weight = require_pair(method, "select_examples", "(index, weight)", choice)
    if index.is_floating_point() or index.dtype == torch.bool or index.shape != weight.shape:
        raise MethodError(
            f"{method.name}: select_examples must return positions (whole numbers) and as many weights, not "
            f"{index.dtype} {tuple(index.shape)} and {weight.dtype} {tuple(weight.shape)}",
            key="select_examples",
        )
    return index, weight


@contextmanager
def at_stage(method: FedAvg, stage: str, client: int | None = None) -> Iterator[None]:
    """Add to an error where it happened, the error itself stays the same; mark the stage for a profiler."""
    try:
        with visit_part(stage):
            yield
    except Exception as error:
        who = "" if client is None else f" of client {client}"
        error.add_note(f"in {stage}{who}, method {method.name}")
        raise
