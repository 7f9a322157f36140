"""What a task is made of: the public set, and the accelerator of a runtime."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedkeep import tree
from fedkeep._util import counter_random
from fedkeep._util.centring import subtract_mean
from fedkeep.optim import Optimizer
from fedkeep.tree import Tree


@dataclass(frozen=True, repr=False)
class Public:
    """The public set, the server's own examples: a training part and a validation part."""

    x: Any
    y: Tensor
    x_val: Any
    y_val: Tensor

    def __repr__(self) -> str:
        return f"<Public: {len(self.y)} examples for training, {len(self.y_val)} for validation>"


class Accelerator:
    """What a runtime adds to make work on its device shorter, without changing results. This one adds nothing."""

    queues = False  # whether operations only enter a queue, so that the device idles whenever the host reads a result

    def call(self, model: Callable[[], Any]) -> Any:
        """Call a model; its layers may be computed by other kernels."""
        return model()

    def drop(self, x: Tensor, key: Tensor, stream: int, p: float, batch: int | None) -> Tensor:
        """Return x after dropout, with the draws of `counter_random.kept`."""
        return counter_random.drop(x, key, stream, p, batch)

    def as_tensors(self, grads: Tree) -> Tree:
        """Return gradients as plain tensors; kernels may have left some as products."""
        return grads

    def centred(self, grads: Tree, names: AbstractSet[str], each: Callable[..., Tree]) -> Tree:
        """Return gradients, the named ones without their means; `each` maps over clients."""
        named = {name: g for name, g in grads.items() if name in names}
        return {**grads, **each(lambda one: tree.map(subtract_mean, one), named)}

    def update_(self, optimizer: Optimizer, grads: Tree, state: Tree, params: Tree, lr: float | Tensor) -> None:
        """Update weights and the optimiser's state in place."""
        optimizer.update_(grads, state, params, lr)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats a step, which reads and writes the same tensors in place at every call.

        The step may be called only once or twice and what it computed be replayed from then on, so nothing else may
        change with its calls.
        """
        return step
