"""Choice of the engine: loop or stacked, and how the stack is mapped."""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch import Tensor

from fedkeep.engine.gpu import layers
from fedkeep.engine.gpu.accelerator import GpuAccelerator
from fedkeep.engine.local import LocalTraining
from fedkeep.engine.loop import Loop
from fedkeep.engine.mapping import map_clients, one_stream_each
from fedkeep.engine.settings import SMALL_MODEL
from fedkeep.engine.stacked import Stacked
from fedkeep.engine.trial_step import why_not_stackable
from fedkeep.errors import EngineError
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")


def choose_engine(
    name: str,
    tf32: bool,
    local: LocalTraining,
    x: Any,
    y: Tensor,
    shared: Tree,
    rounds: int = 1,
    sent: Tree | None = None,
) -> Loop | Stacked:
    """Return the engine. `auto`: stacked on a GPU or for a small model, if a trial step can be stacked; else the loop.

    On a GPU, a module that `vmap` does not support is stacked too, with one stream for each client, unless it draws
    random numbers. `shared` is what the server sends in the first round to all clients, `sent` to one of them; `rounds`
    is the length of the run.
    """
    task, trial = local.task, functools.partial(why_not_stackable, local, x, y, shared, sent=sent)
    if name == "loop" or (name == "auto" and y.device.type == "cpu" and task.n_weights > SMALL_MODEL):
        return Loop(local, x, y)
    without_kernels = None
    if isinstance(task.accelerator, GpuAccelerator) and layers.available(task.device, task.dtype, task.autocast, tf32):
        task.accelerator.kernels = True
        without_kernels = trial(layers.vmap_with_kernels)
        if without_kernels is None:
            return Stacked(local, x, y, layers.vmap_with_kernels)
        task.accelerator.kernels = False
    reason = trial(map_clients)
    if reason is None:
        if without_kernels:
            log.warning("rounds are slower than they could be, without fedkeep's own kernels: %s", without_kernels)
        return Stacked(local, x, y, map_clients, rounds)
    if y.device.type == "cuda" and trial(one_stream_each) is None:
        return Stacked(local, x, y, one_stream_each)
    if name == "stacked":
        raise EngineError(
            f"this model cannot be stacked, use engine='loop'; the cause is {reason}", key="engine", value=name
        )
    log.warning("clients are trained one after another, because the model cannot be stacked: %s", reason)
    return Loop(local, x, y)
