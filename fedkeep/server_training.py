"""Training and evaluating on the public set: helpers for methods whose server trains.

Everything depends on the cohort's seed alone: the order of the examples, and what a module draws itself (dropout).
Torch's own random state stays unchanged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.rng import seeded
from fedkeep.errors import MethodError
from fedkeep.method import Cohort
from fedkeep.optim import Optimizer
from fedkeep.task import Public, Task
from fedkeep.tree import Tree

MIN_DELTA = 1e-4  # a smaller improvement does not count: ties must not flip between runtimes


def require_public(task: Task, method: str, validation: bool = False) -> Public:
    """Return the public set; raise if there is none, or no validation part where one is needed."""
    public = task.public
    if public is None:
        raise MethodError(
            f"{method} needs a public set on the server: load(..., public=0.1), or data.public=0.1 in an experiment",
            key="public",
        )
    if validation and not size(public.x_val):
        raise MethodError(
            f"{method} needs the validation part of the public set, which is empty: use more than {size(public.x)} "
            "public examples or a larger share, as in load(..., public=0.1, validation=0.25)",
            key="validation",
        )
    return public


def size(x: Any) -> int:
    """Return the number of examples, in a tensor or a dict of tensors."""
    return len(tree.leaves(x)[0])


def logits(task: Task, params: Tree, x: Any, chunk: int = 1024) -> Tensor:
    """Return a model's logits of all examples, [n, C], without gradient and in evaluation mode."""
    with torch.no_grad():
        parts = range(0, max(size(x), 1), chunk)
        return torch.cat([task.apply(params, tree.take(x, slice(start, start + chunk))) for start in parts])


def ensemble(task: Task, stacked: Tree, x: Any) -> Tensor:
    """Return the logits of each of K stacked models, [K, n, C]."""
    K = len(tree.leaves(stacked)[0])
    return torch.stack([logits(task, tree.take(stacked, k), x) for k in range(K)])


def validation_loss(task: Task, params: Tree, public: Public) -> Tensor:
    """Return a model's mean loss on the validation part."""
    return task.criterion(logits(task, params, public.x_val), public.y_val).mean()


def credibility(task: Task, params: Tree, public: Public) -> Tensor:
    """Return A [C, C]: A[i, j] is the rate at which class i is predicted as j; the row of an absent class is 0."""
    predicted, C = logits(task, params, public.x).argmax(-1), task.n_classes
    counts = torch.bincount(public.y * C + predicted, minlength=C * C).reshape(C, C).to(task.dtype)
    return counts / counts.sum(1, keepdim=True).clamp(min=1)


def batches(seed: int, n: int, batch_size: int) -> Iterator[list[np.ndarray]]:
    """Yield epochs without end: lists of batches over all n examples in a new order, the last batch smaller.

    >>> [len(batch) for batch in next(batches(seed=0, n=5, batch_size=2))]
    [2, 2, 1]
    """
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(n)
        yield [order[start : start + batch_size] for start in range(0, n, batch_size)]


def train(
    task: Task,
    params: Tree,
    loss: Callable[[Tree, Tensor], Tensor],
    check: Callable[[Tree], Tensor],
    n: int,
    seed: int,
    *,
    optimizer: Optimizer,
    lr: Callable[[int], float],
    batch_size: int,
    steps: int,
    patience: int,
) -> Tree:
    """Train on n examples with early stopping; return the weights of the best epoch.

    Args:
        task: the task.
        params: the weights to start from. They are no candidate: the result was trained, unless `steps` is 0.
        loss: `loss(params, at)`, the scalar of the batch at the positions `at`.
        check: a validation loss of the weights, computed after every epoch.
        n: the number of examples.
        seed: for the order of the examples, and for what a module draws.
        optimizer: the optimiser; its state starts fresh.
        lr: `lr(step)`, the learning rate of a step, counted from 0.
        batch_size: examples in a batch.
        steps: maximum number of steps.
        patience: training stops after this many steps without an improvement of `check` by MIN_DELTA.
    """
    params, state, step = tree.detach(params), optimizer.init(params), 0
    best, lowest, best_step = params, math.inf, 0
    with seeded(seed, task.device):
        for epoch in batches(seed, n, batch_size):
            for at in epoch[: steps - step]:
                params, state = _step(task, params, state, loss, torch.from_numpy(at), optimizer, lr(step))
                step += 1
            with torch.no_grad():
                value = float(check(params)) if step else math.inf
            if best_step == 0 or value < lowest - MIN_DELTA:
                best, lowest, best_step = params, value, step
            if step >= steps or step - best_step >= patience:
                return best
    raise AssertionError("batches never end")


def train_labelled(
    task: Task,
    params: Tree,
    loss: Callable[[Tree, Tensor], Tensor],
    cohort: Cohort,
    *,
    epochs: int,
    batch_size: int,
    patience: int,
) -> Tree:
    """Train on the public set, with early stopping by the cross-entropy of its validation part.

    With the clients' optimiser (its momentum starts fresh) and this round's learning rate, without weight decay.
    """
    public = cast(Public, task.public)
    n = size(public.x)
    per_epoch = -(-n // batch_size)
    rate = task.lr(cohort.round)
    return train(
        task,
        params,
        loss,
        lambda w: validation_loss(task, w, public),
        n,
        cohort.seed,
        optimizer=cast(Optimizer, dataclasses.replace(cast(Any, task.optimizer), weight_decay=0.0)),
        lr=lambda step: rate,
        batch_size=batch_size,
        steps=epochs * per_epoch,
        patience=patience * per_epoch,
    )


def _step(
    task: Task,
    params: Tree,
    state: Tree,
    loss: Callable[[Tree, Tensor], Tensor],
    at: Tensor,
    optimizer: Optimizer,
    lr: float,
) -> tuple[Tree, Tree]:
    with torch.enable_grad():
        params = tree.map(lambda w: w.detach().requires_grad_(), params)
        value = loss(params, at.to(task.device))
        grads = tree.like(params, torch.autograd.grad(value, tree.leaves(params), materialize_grads=True))
    with torch.no_grad():
        return optimizer.update(grads, state, tree.detach(params), lr)
