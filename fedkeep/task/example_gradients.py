"""Gradients of single examples, and sums of their squares, for a task."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util import layerwise
from fedkeep._util.private_apis import is_batched
from fedkeep._util.rng import seeded
from fedkeep.tree import Tree

if TYPE_CHECKING:
    from fedkeep.task.task import Task

_AT_ONCE = 10  # gradients of single examples in memory at a time: each is as large as the model


class ExampleGradients:
    """Computes gradients of single examples in evaluation mode, and remembers what a model supports."""

    def __init__(self) -> None:
        self.maps_examples = True  # until vmap over examples has failed
        self.layers: dict[Any, list[layerwise.Layer] | None] = {}  # for squared gradients, by the form of an example

    def of_examples(self, task: Task, params: Tree, x: Any, y: Tensor) -> Tree:
        """Return the gradient of the criterion for every example, [B, ...] each.

        They are computed by `vmap` over the examples; for a model that it does not support, one after another.
        """

        def single(w: Tree, x: Any, y: Tensor) -> Tensor:
            return task.criterion(task.apply(w, tree.map(lambda t: t[None], x)), y[None]).sum()

        gradient = torch.func.grad(single)
        if self.maps_examples:
            try:
                return torch.func.vmap(gradient, in_dims=(None, 0, 0))(params, x, y)  # type: ignore[no-any-return]
            except torch.OutOfMemoryError:
                raise
            except Exception:
                if is_batched(y):  # inside another vmap, which may be the reason
                    raise
                self.maps_examples = False
        with torch.backends.cudnn.flags(enabled=False):  # it has no gradient of an RNN in evaluation mode
            return tree.stack([gradient(params, tree.take(x, i), y[i]) for i in range(len(y))])

    def squared(self, task: Task, params: Tree, x: Any, y: Tensor, weight: Tensor) -> Tree:
        """Return the sum over the examples of weight * (gradient of the criterion)^2.

        They are computed layer by layer; for a model that this does not support, from the gradient of every example.
        """
        form = layerwise.example_form(x)
        if form not in self.layers:
            self.layers[form] = self._find_layers(task, x)
        layers = self.layers[form]
        if layers is not None:
            chunk = layerwise.chunk_size(layers, task.device, task.dtype)
            try:
                return _sum_over(chunk, functools.partial(_layerwise_squares, task, layers), params, x, y, weight)
            except layerwise.NotLayerwiseError:
                self.layers[form] = None
        return _sum_over(_AT_ONCE, functools.partial(self._squares, task), params, x, y, weight)

    def _find_layers(self, task: Task, x: Any) -> list[layerwise.Layer] | None:
        """Return the layers for inputs of this form; None if their sums are not those of single examples.

        This is tried out with random inputs and weights, in float64: rounding must not switch a ReLU on or off.
        """
        try:
            exact = task.in_float64
            params, inputs, y, weight = layerwise.random_trial(task.init, x, task.n_classes)
            with seeded(0, task.device):
                layers = layerwise.find_layers(lambda w: _losses(exact, w, inputs, y), params, len(y))
                squares = _layerwise_squares(exact, layers, params, inputs, y, weight)
                return layers if layerwise.agree(squares, self._squares(exact, params, inputs, y, weight)) else None
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return None

    def _squares(self, task: Task, params: Tree, x: Any, y: Tensor, weight: Tensor) -> Tree:
        each = self.of_examples(task, params, x, y)
        return tree.map(lambda g: torch.tensordot(weight, g**2, dims=1), each)


def _layerwise_squares(
    task: Task, layers: list[layerwise.Layer], params: Tree, x: Any, y: Tensor, weight: Tensor
) -> Tree:
    return layerwise.squared_gradients(lambda w: _losses(task, w, x, y), params, layers, weight)


def _losses(task: Task, params: Tree, x: Any, y: Tensor) -> Tensor:
    """Return the criterion of every example, by the module's own layers: no accelerator replaces them."""
    task = task.without_accelerator
    return task.criterion(task.apply(params, x), y)


def _sum_over(chunk: int, squares: Callable[..., Tree], params: Tree, *examples: Any) -> Tree:
    """Return the sum of `squares(params, x, y, weight)` over chunks of the examples."""
    total: Tree = {}
    for start in range(0, len(examples[-1]), chunk):
        part = (tree.take(one, slice(start, start + chunk)) for one in examples)
        sums = squares(params, *part)
        total = tree.add(total, sums) if total else sums
    return total or tree.zeros_like(params)
