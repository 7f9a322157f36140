"""A trial step of stacked training: two clients, one step each, through every hook that training calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import tree
from fedkeep._util.rng import random_state, seeded
from fedkeep.data.plan import make_plan
from fedkeep.engine.evaluate import evaluate
from fedkeep.engine.local import ClientJob, LocalTraining
from fedkeep.engine.mapping import Each
from fedkeep.engine.stacked import Stacked
from fedkeep.errors import FedkeepError
from fedkeep.task import Task
from fedkeep.tree import Tree

_RANDOM = "it draws random numbers other than dropout's, which are not tied to a client's seed"
_MANY = 256  # examples of a client from which a method selects some


def why_not_stackable(
    local: LocalTraining, x: Any, y: Tensor, shared: Tree, each: Each, sent: Tree | None = None
) -> str | None:
    """Train two clients for one step, stacked; return what prevents it, or None. Nothing changes.

    Weights, inputs and states are stacked as in training, and one batch is padded. `sent` is what one client gets
    besides what is shared. Random numbers other than dropout's prevent stacking too: they would not be tied to a
    client's seed.
    """
    try:
        draws_random_numbers = _train_two_clients(local, x, y, shared, each, sent or {})
    except FedkeepError:
        raise  # the method or the model is wrong, in every engine
    except Exception:
        with _calls_recorded(local.task) as calls:
            try:
                _train_two_clients(local, x, y, shared, each, sent or {})
            except Exception as again:
                error = again
        return f"{_culprit(local.task, calls, error)}: {_first_line(error)}"
    return f"{_model_name(local.task)}: {_RANDOM}" if draws_random_numbers else None


def _train_two_clients(local: LocalTraining, x: Any, y: Tensor, shared: Tree, each: Each, sent: Tree) -> bool:
    """Train and evaluate a stack of two clients; return whether that drew random numbers."""
    task = local.task
    engine = Stacked(local, x, y, each)
    engine.graphs = None
    with seeded(0, task.device):
        before = random_state(task.device)
        jobs = [_job(local, x, y, shared, client, size)._replace(sent=sent) for client, size in enumerate((2, 1))]
        result = engine.train(shared, jobs, task.lr(1))
        evaluate(task, result.params, tree.take(x, slice(2)), y[:2], local.inputs.without_augmentation, each=each)
        return not torch.equal(before, random_state(task.device))


def _job(local: LocalTraining, x: Any, y: Tensor, shared: Tree, client: int, size: int) -> ClientJob:
    """Return a client's job: one step with `size` of its examples, which are the first of the training data."""
    many = local.method.uses("select_examples") or local.method.uses("hold_out")
    n = min(len(y), _MANY if many else 2)
    image = tuple(x.shape[-2:]) if isinstance(x, Tensor) and x.ndim == 4 else (0, 0)
    hold_out = local.method.hold_out()
    plan = make_plan(0, 1, client, n, 1, min(2, n), local.inputs.augment, (image[0], image[1]), hold_out=hold_out)
    step = {"index": plan.index[:1], "size": np.minimum(plan.size[:1], size), "per_epoch": 1, "held": plan.held[:2]}
    plan = dataclasses.replace(plan, **step, augment={key: value[:1] for key, value in plan.augment.items()})
    counts = torch.bincount(y[:n], minlength=local.task.n_classes).cpu().numpy()
    state = tree.to(local.method.init_client(local.task, shared["params"]), local.task.device)
    return ClientJob(client, np.arange(n), counts, plan, state, {})


@contextmanager
def _calls_recorded(task: Task) -> Iterator[list[str]]:
    """Record which modules are being called, the innermost last; what remains after an error is where it happened.

    Hooks switch off fast paths of some modules, so that the first trial runs without them.
    """
    calls: list[str] = []

    def enter(module: nn.Module, args: Any, name: str) -> None:
        if not name:
            calls.clear()  # of an error that a method has handled
        calls.append(f"{name} ({type(module).__name__})" if name else _model_name(task))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        calls.pop()

    hooks = []
    for whole in task.modules:
        for name, module in whole.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda m, args, name=name: enter(m, args, name)))
            hooks.append(module.register_forward_hook(leave))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _culprit(task: Task, calls: list[str], error: Exception) -> str:
    """Return the module in which an error happened; outside of all modules, the model and the stage of training."""
    if calls:
        return calls[-1]
    stage = ", ".join(getattr(error, "__notes__", ()))
    return f"{_model_name(task)} {stage}".strip()


def _model_name(task: Task) -> str:
    return f"the model ({type(task.train_module).__name__})"


def _first_line(error: Exception) -> str:
    if "randomness" in str(error) and str(error).startswith("vmap"):
        return _RANDOM
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
