"""Choice of the engine: loop or stacked, and how the stack is mapped."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.rng import seeded
from fedkeep.engine.gpu import layers
from fedkeep.engine.local import LocalTraining
from fedkeep.engine.loop import Loop
from fedkeep.engine.mapping import Each, map_clients, one_stream_each
from fedkeep.engine.settings import SMALL_MODEL
from fedkeep.engine.stacked import Stacked
from fedkeep.errors import EngineError
from fedkeep.task import Task

log = logging.getLogger("fedkeep")


def choose_engine(name: str, tf32: bool, local: LocalTraining, x: Any, y: Tensor, sample: Any) -> Loop | Stacked:
    """Return the engine. `auto`: stacked on a GPU or for a small model, if the module can be stacked; else the loop.

    On a GPU, a module that `vmap` does not support is stacked too, with one stream for each client, unless it draws
    random numbers. `sample` is a batch of two examples, as the model gets them.
    """
    task = local.task
    if name == "loop" or (name == "auto" and y.device.type == "cpu" and task.n_weights > SMALL_MODEL):
        return Loop(local, x, y)
    kernels = layers.available(task.device, task.dtype, task.autocast, tf32)
    reason = why_not_stackable(task, sample, map_clients)
    if reason is None:
        kernels = kernels and why_not_stackable(task, sample, layers.vmap_with_kernels) is None
        return Stacked(local, x, y, layers.vmap_with_kernels if kernels else map_clients)
    if y.device.type == "cuda" and why_not_stackable(task, sample, one_stream_each) is None:
        return Stacked(local, x, y, one_stream_each)
    if name == "stacked":
        raise EngineError(
            f"this model cannot be stacked, use engine='loop'; the cause is {reason}", key="engine", value=name
        )
    log.warning("clients are trained one after another, because the model cannot be stacked: %s", reason)
    return Loop(local, x, y)


def why_not_stackable(task: Task, x: Any, each: Each) -> str | None:
    """Try one stacked forward and backward pass on a few examples; return what prevents it, or None.

    Random numbers prevent it too: they would not be tied to a client's seed.
    """
    reached: list[str] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, name=name: reached.append(f"{name} ({type(module).__name__})")
        )
        for name, module in task.train_module.named_modules()
        if not any(module.children())
    ]
    two = tree.map(lambda w: torch.stack([w, w]).requires_grad_(), task.init)
    try:
        with seeded(0, task.device):
            before = _random_state(task.device)
            with torch.enable_grad():
                logits = each(lambda w: task.apply(w, x, train=True), two)
                torch.autograd.grad(logits.sum(), tree.leaves(two), materialize_grads=True)
            each(lambda w: task.apply(w, x), tree.detach(two))
            if not torch.equal(before, _random_state(task.device)):
                return f"{type(task.train_module).__name__}: it draws random numbers in training"
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200]
        return f"{reached[-1] if reached else type(task.train_module).__name__}: {reason}"
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
