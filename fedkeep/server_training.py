"""Training and evaluating on the public set: helpers for methods whose server trains.

Everything depends on the cohort's seed alone: the order of the examples, dropout, and what else a module draws. Torch's
own random state stays unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.counter_random import step_key
from fedkeep._util.dropout import keyed
from fedkeep._util.rng import seeded
from fedkeep.errors import MethodError
from fedkeep.method import Cohort
from fedkeep.optim import Optimizer
from fedkeep.task import Public, Task
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

MIN_DELTA = 1e-4  # a smaller improvement does not count: ties must not flip between runtimes
_STEPS_PER_POLL = 16  # at least, where the device waits during a poll; fewer steps are computed in vain after a stop


def require_public(task: Task, method: str, validation: bool = False) -> Public:
    """Return the public set; raise if there is none, or no validation part where one is needed."""
    public = task.public
    if public is None:
        raise MethodError(
            f"{method} needs a public set on the server: load(..., public=0.1), or data.public=0.1 in an experiment",
            key="public",
        )
    if task.mixes_examples:
        raise MethodError(
            f"{method} computes logits of the public set; with BatchNorm by the statistics of the batch they depend on "
            "how it is divided into batches: use nn.GroupNorm with this method",
            key="model",
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
    chunk = _of_texts(x, chunk)
    with torch.no_grad():
        parts = range(0, max(size(x), 1), chunk)
        return torch.cat([task.apply(params, tree.take(x, slice(start, start + chunk))) for start in parts])


def ensemble(task: Task, stacked: Tree, x: Any) -> Tensor:
    """Return the logits of each of K stacked models, [K, n, C]; on a GPU all models at once, by `vmap`.

    Models that `vmap` does not support, or that need too much memory at once, are computed one after another.
    """
    K = len(tree.leaves(stacked)[0])
    if task.device.type != "cpu":
        try:
            return _logits_of_all(task, stacked, x, _chunk(task, x, K))
        except Exception as error:  # an error of the model itself is raised below
            log.debug("the clients' models are computed one after another: %s", error)
    return torch.stack([logits(task, tree.take(stacked, k), x) for k in range(K)])


def _logits_of_all(task: Task, stacked: Tree, x: Any, chunk: int) -> Tensor:
    one = torch.vmap(task.apply, in_dims=(0, None))
    with torch.no_grad():
        parts = range(0, max(size(x), 1), chunk)
        return torch.cat([one(stacked, tree.take(x, slice(start, start + chunk))) for start in parts], dim=1)


def _chunk(task: Task, x: Any, models: int) -> int:
    """Return how many examples K models compute at a time: together 8192, of at most 128 MiB.

    >>> task = Task(torch.nn.Linear(2, 2), n_classes=2, n_clients=1)
    >>> _chunk(task, torch.zeros(9, 3, 32, 32), models=10), _chunk(task, torch.zeros(9, 3, 224, 224), models=10)
    (819, 22)
    """
    example = sum(t[0].numel() if len(t) else 1 for t in tree.leaves(x)) * task.dtype.itemsize
    return max(1, _of_texts(x, min(8192, (1 << 27) // example), tokens=1 << 19) // models)


def _of_texts(x: Any, most: int, tokens: int = 1 << 16) -> int:
    """Return how many examples to compute at a time: fewer than `most` where texts are long.

    >>> _of_texts({"input_ids": torch.zeros(9, 512, dtype=torch.long)}, 1024), _of_texts(torch.zeros(9, 512), 1024)
    (128, 1024)
    """
    widths = [t.shape[1] for t in tree.leaves(x) if t.ndim == 2 and not t.is_floating_point()]
    return min(most, max(1, tokens // max(widths))) if widths and isinstance(x, dict) else most


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


@dataclass(frozen=True)
class Options:
    """How the server trains.

    `lr(step)` is the learning rate of a step, counted from 0. Training ends after `steps` steps, or after `patience`
    steps without an improvement by MIN_DELTA. The optimiser's state starts fresh. With `include_start`, the weights
    that training starts from are a candidate: an epoch counts only if it improves on them.
    """

    optimizer: Optimizer
    lr: Callable[[int], float]
    batch_size: int
    steps: int
    patience: int
    include_start: bool = False


def train(
    task: Task,
    params: Tree,
    loss: Callable[[Tree, Tensor], Tensor],
    check: Callable[[Tree], Tensor],
    n: int,
    seed: int,
    options: Options,
) -> Tree:
    """Train on n examples with early stopping; return the weights of the best epoch.

    The weights that `loss` and `check` receive change in place from step to step, and on a GPU both functions may be
    replayed without being called: they must be pure functions of their arguments.

    Args:
        task: the task.
        params: the weights to start from. Unless `options` include them, they are no candidate: the result was trained,
            unless `steps` is 0.
        loss: `loss(params, at)`, the scalar of the batch at the positions `at`.
        check: a validation loss of the weights, computed after every epoch.
        n: the number of examples.
        seed: for the order of the examples, and for what a module draws.
        options: how to train.
    """
    params = tree.detach(params)
    if not (n and options.steps):
        return params
    training = _Training(task, params, loss, check, n, seed, options)
    with seeded(seed, task.device):
        training.run()
    return cast(Tree, training.best["params"])


def train_labelled(
    task: Task,
    params: Tree,
    loss: Callable[[Tree, Tensor], Tensor],
    cohort: Cohort,
    *,
    epochs: int,
    batch_size: int,
    patience: int,
    include_start: bool = False,
) -> Tree:
    """Train on the public set, with early stopping by the cross-entropy of its validation part.

    With the clients' optimiser (its momentum starts fresh) and this round's learning rate, without weight decay.
    """
    public = cast(Public, task.public)
    n = size(public.x)
    per_epoch = -(-n // batch_size)
    rate = task.lr(cohort.round)
    optimizer = cast(Optimizer, dataclasses.replace(cast(Any, task.optimizer), weight_decay=0.0))
    steps, patience = epochs * per_epoch, patience * per_epoch
    options = Options(optimizer, lambda step: rate, batch_size, steps, patience, include_start)
    return train(task, params, loss, lambda w: validation_loss(task, w, public), n, cohort.seed, options)


def train_network(
    task: Task,
    network: Tree,
    loss: Callable[[Tree, Tree], tuple[Tensor, Tree]],
    draws: Tree,
    optimizer: Optimizer,
    state: Tree,
    lr: float,
) -> tuple[Tree, Tree]:
    """Train a network of the server's own, such as a generator; return it and the optimiser's state.

    On a GPU the loss may be replayed without being called: it must be a pure function of its arguments.

    Args:
        task: the task.
        network: {"params": its weights, "buffers": what changes without a gradient, such as running means}.
        loss: `loss(network, draw)` returns the scalar of one step and the next buffers.
        draws: random labels, noise and so on, stacked on a leading axis: one entry per step.
        optimizer: for the weights.
        state: its state, from `optimizer.init(network["params"])` or from the last round.
        lr: the learning rate.
    """
    network, state = tree.map(torch.clone, tree.detach(network)), tree.map(torch.clone, state)
    row = torch.zeros(1, dtype=torch.int64, device=task.device)

    def step() -> None:
        draw = tree.map(lambda t: t.index_select(0, row)[0], draws)
        with torch.enable_grad():
            params = tree.map(lambda w: w.detach().requires_grad_(), network["params"])
            value, buffers = loss({"params": params, "buffers": network["buffers"]}, draw)
            grads = tree.like(params, torch.autograd.grad(value, tree.leaves(params), materialize_grads=True))
        with torch.no_grad():
            _update(task, optimizer, grads, state, network["params"], lr)
            tree.copy_(network["buffers"], buffers)
            row.add_(1)

    repeat = task.accelerator.capture(step)
    for _ in range(len(tree.leaves(draws)[0])):
        repeat()
    return network, state


def _update(task: Task, optimizer: Optimizer, grads: Tree, state: Tree, params: Tree, lr: float | Tensor) -> None:
    """Take a step of an optimiser, in place."""
    if task.device.type != "cpu" and task.dtype == torch.float32 and optimizer.fused:
        task.accelerator.update_(optimizer, grads, state, params, lr)
        return
    new_params, new_state = optimizer.update(grads, state, params, lr)
    tree.copy_(params, new_params)
    tree.copy_(state, new_state)


class _Training:
    """Training in place: a step and a check read and write the same tensors at every call, so both can be replayed.

    Early stopping happens on the device. The host polls `stopped` after every epoch, or more rarely where a poll
    makes the device idle. What is computed after the stop does not change `best`.
    """

    def __init__(
        self,
        task: Task,
        params: Tree,
        loss: Callable[[Tree, Tensor], Tensor],
        check: Callable[[Tree], Tensor],
        n: int,
        seed: int,
        options: Options,
    ) -> None:
        self.task, self.loss, self.check, self.n, self.seed, self.options = task, loss, check, n, seed, options
        per_epoch = -(-n // options.batch_size)
        self.epochs_per_poll = -(-_STEPS_PER_POLL // per_epoch) if task.accelerator.queues else 1
        rows = self.epochs_per_poll * per_epoch
        self.params, self.state = tree.map(torch.clone, params), options.optimizer.init(params)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=task.device)

        # the steps until the next poll, one in a row; the last batch of an epoch may fill only a part of its row
        self.plan = {
            "at": zeros(rows, min(n, options.batch_size)),
            "lr": zeros(rows, dtype=torch.promote_types(task.dtype, torch.float32)),
        }
        self.row, self.step_count, self.stopped = zeros(), zeros(), zeros(dtype=torch.bool)
        precise = torch.float32 if task.device.type == "mps" else torch.float64  # which MPS does not have
        # the step of the best weights is -1 until there is a candidate
        self.best: Tree = {"params": tree.map(torch.clone, params), "value": zeros(dtype=precise), "step": zeros() - 1}

    def run(self) -> None:
        """Train to the end."""
        accelerator = self.task.accelerator
        check = accelerator.capture(self.take_check)
        steps: dict[int, Callable[[], None]] = {}  # by the size of the batch
        polls, first_step = self._epochs_between_polls(), 0
        epochs = next(polls)
        if self.options.include_start:
            check()
        while epochs:
            self._load(epochs, first_step)
            for epoch in epochs:
                for at in epoch:
                    if len(at) not in steps:
                        steps[len(at)] = accelerator.capture(functools.partial(self.take_step, len(at)))
                    steps[len(at)]()
                check()
                first_step += len(epoch)
            epochs = next(polls, [])  # drawn while the device computes
            if self.stopped:
                return

    def take_step(self, batch_size: int) -> None:
        """Take the next step of the plan, with a batch of this size."""
        at, lr = (part.index_select(0, self.row.reshape(1))[0] for part in (self.plan["at"], self.plan["lr"]))
        optimizer = self.options.optimizer
        dropout = keyed(step_key(self.seed, self.step_count)) if self.task.may_drop else nullcontext()
        with torch.enable_grad(), dropout:
            params = tree.map(lambda w: w.detach().requires_grad_(), self.params)
            value = self.loss(params, at[:batch_size])
            grads = tree.like(params, torch.autograd.grad(value, tree.leaves(params), materialize_grads=True))
        with torch.no_grad():
            _update(self.task, optimizer, grads, self.state, self.params, lr)
            self.row += 1
            self.step_count += 1

    @torch.no_grad()
    def take_check(self) -> None:
        """Compare the weights with the best so far, and note whether training has stopped."""
        best, value = self.best, self.check(self.params)
        now = {"params": self.params, "value": value.to(best["value"].dtype), "step": self.step_count}
        better = ~self.stopped & ((best["step"] < 0) | (now["value"] < best["value"] - MIN_DELTA))
        tree.map(lambda kept, new: torch.where(better, new, kept, out=kept), best, now)
        self.stopped |= self.step_count - best["step"] >= self.options.patience

    def _epochs_between_polls(self) -> Iterator[list[list[np.ndarray]]]:
        """Yield the epochs that are trained until the host polls whether training has stopped."""
        left, endless = self.options.steps, batches(self.seed, self.n, self.options.batch_size)
        while left:
            epochs: list[list[np.ndarray]] = []
            while left and len(epochs) < self.epochs_per_poll:
                epochs.append(next(endless)[:left])
                left -= len(epochs[-1])
            yield epochs

    def _load(self, epochs: list[list[np.ndarray]], first_step: int) -> None:
        """Copy the next steps to the device."""
        steps = [at for epoch in epochs for at in epoch]
        at = np.zeros((len(steps), self.plan["at"].shape[1]), dtype=np.int64)
        for row, positions in enumerate(steps):
            at[row, : len(positions)] = positions
        lr = [self.options.lr(first_step + row) for row in range(len(steps))]
        self.plan["at"][: len(steps)] = torch.from_numpy(at)
        self.plan["lr"][: len(steps)] = torch.tensor(lr, dtype=self.plan["lr"].dtype)
        self.row.zero_()
