"""The client hooks of a method: checks of what they return, and where in a visit an error happened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.text import format_value
from fedkeep.engine.round_parts import visit_part
from fedkeep.errors import MethodError
from fedkeep.method import FedAvg
from fedkeep.task import Task
from fedkeep.tree import Tree


def require_whole_batches(method: FedAvg, part_size: int | None) -> None:
    """Raise if a method computes with single examples, or batches are divided, for a model of batch statistics."""
    if part_size is not None:
        raise MethodError(
            "accumulate divides batches, by whose statistics BatchNorm normalises: use accumulate = 1 or nn.GroupNorm",
            key="accumulate",
        )
    for hook in ("refine", "measure", "select_examples", "rehearse"):
        if method.uses(hook):
            raise MethodError(
                f"{method.name} computes with single examples ({hook}), but with BatchNorm by the statistics of the "
                "batch an example's logits depend on the others: use nn.GroupNorm with this method",
                key="model",
                value=hook,
            )


def require_weight_names(method: FedAvg, task: Task, hook: str) -> frozenset[str]:
    """Return the names of weights that `frozen` or `centred_weights` returns; raise unless the model has them all."""
    listed = getattr(method, hook)(task)
    names: list[Any] = list(listed) if isinstance(listed, Iterable) and not isinstance(listed, str) else [None]
    if not all(isinstance(name, str) for name in names):
        raise MethodError(f"{method.name}: {hook} must return names of weights, not {format_value(listed)}", key=hook)
    if unknown := sorted(set(names) - task.init.keys()):
        raise MethodError(f"{method.name}: {hook} names {unknown[0]!r}, which is not a weight of the model", key=hook)
    if hook == "frozen" and set(names) == task.init.keys():
        raise MethodError(f"{method.name}: frozen names all weights, so nothing would be trained", key=hook)
    return frozenset(names)


def require_pair(method: FedAvg, hook: str, pair: str, value: Any) -> tuple[Any, Any]:
    """Return what a hook returned; raise unless it is a pair."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise MethodError(f"{method.name}: {hook} must return {pair}, not {type(value).__name__}", key=hook)
    return value


def require_loss(method: FedAvg, name: str, value: Any, tracked: Tree) -> tuple[Tensor, Tree]:
    """Return the loss of a pass and the sums that it tracks; raise unless they are those that `prepare` started.

    Only the pass `loss` tracks sums.
    """
    if name != "loss" or not (tracked or isinstance(value, tuple)):
        return value, {}
    loss, sums = require_pair(method, "loss", "(loss, sums), since prepare returns `tracked`", value)
    if not isinstance(sums, dict) or tree.spec(sums) != tree.spec(tracked):
        raise MethodError(
            f"{method.name}: the sums that loss returns must be like the `tracked` that prepare returns, with the same "
            "names, shapes and dtypes",
            key="loss",
        )
    return loss, sums


def with_own_sums(local: Tree) -> Tree:
    """Return what `prepare` returned, with copies of the sums that training adds to."""
    return {**local, "tracked": tree.map(torch.clone, local["tracked"])} if "tracked" in local else local


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
