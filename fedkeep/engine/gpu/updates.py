"""Steps of the optimisers on a GPU, in place and by our own kernels where those are faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.engine.gpu.kernels import kernels
from fedkeep.engine.gpu.products import Product, multiply_out
from fedkeep.optim import SGD, Adam, Optimizer
from fedkeep.tree import Tree

LARGE = 8192  # entries from which a weight has a launch of its own; torch updates all smaller ones in one


def update_(optimizer: Optimizer, grads: Tree, state: Tree, params: Tree, lr: float | Tensor) -> None:
    """Update weights and state in place; products go into the weights directly, if the optimiser is SGD."""
    if not isinstance(optimizer, SGD | Adam) or type(optimizer) not in (SGD, Adam):  # a subclass may do something else
        optimizer.update_(multiply_out(grads), state, params, lr)
        return
    if not isinstance(optimizer, SGD):
        grads = multiply_out(grads)
    slots = {name: one for name, one in state.items() if isinstance(one, dict)}  # moments: one of each weight
    trees: dict[str, dict[str, Tensor]] = {
        name: dict(tree.items(one)) for name, one in {"params": params, "grads": grads, **slots}.items()
    }
    large = [path for path in trees["params"] if _is_served(*(one[path] for one in trees.values()))]
    of_large = [{name: one.pop(path) for name, one in trees.items()} for path in large]
    weights, gradients = trees.pop("params"), trees.pop("grads")
    if weights:
        optimizer.update_(multiply_out(gradients), {**state, **trees}, weights, lr)
    elif isinstance(optimizer, Adam):
        state["t"] += 1
    if of_large:
        rate = lr if isinstance(lr, Tensor) else torch.full((), lr, device=of_large[0]["params"].device)
        for one in of_large:
            _update_large_(optimizer, one, state, rate)


def _is_served(w: Tensor, g: Tensor, *slots: Tensor) -> bool:
    """Return whether our kernels update this weight: its tensors lie in memory as they expect, and it is large."""
    lies = all(t.dtype == torch.float32 and t.is_contiguous() for t in (w, *slots))
    return lies and (isinstance(g, Product) or (w.numel() >= LARGE and g.is_contiguous() and g.dtype == w.dtype))


def _update_large_(optimizer: SGD | Adam, one: dict[str, Any], state: Tree, lr: Tensor) -> None:
    updates, w, g = kernels().updates, one["params"], one["grads"]
    if isinstance(optimizer, Adam):
        betas = optimizer.beta1, optimizer.beta2
        t = state["t"].reshape(-1)[0]  # the same for all clients
        updates.adam_(w, one["m"], one["v"], g, t, lr, betas, optimizer.eps, optimizer.weight_decay)
    elif isinstance(g, Product):
        updates.product_sgd_(w, one.get("buffer"), *g.factors, lr, optimizer.momentum, optimizer.weight_decay)
    else:
        updates.sgd_(w, one.get("buffer"), g, lr, optimizer.momentum, optimizer.weight_decay)
