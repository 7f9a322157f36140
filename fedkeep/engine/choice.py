"""Which runtime a run takes."""

from __future__ import annotations

import logging
from typing import Any

import torch

from fedkeep.engine import layers
from fedkeep.engine.local import Local, unrolled, vmapped
from fedkeep.engine.loop import Loop
from fedkeep.engine.settings import SMALL_MODEL
from fedkeep.engine.stacked import Stacked, unstackable
from fedkeep.errors import EngineError

log = logging.getLogger("fedkeep")


def choose_engine(name: str, tf32: bool, local: Local, x: Any, y: torch.Tensor, two: Any) -> Loop | Stacked:
    """Pick the runtime. `auto`: stacked on a GPU or for a small model, if the module can be stacked; else the loop.

    On a GPU, a module that `vmap` cannot take is stacked all the same, every client on a stream of its own, unless it
    draws random numbers. `two` are two examples as the model is given them.
    """
    task = local.task
    if name == "loop" or (name == "auto" and y.device.type == "cpu" and task.n_weights > SMALL_MODEL):
        return Loop(local, x, y)
    own = layers.available(task.device, task.dtype, task.autocast, tf32)
    stopped_by = unstackable(task, two, vmapped)
    if stopped_by is None:
        own = own and unstackable(task, two, layers.mapped) is None
        return Stacked(local, x, y, layers.mapped if own else vmapped)
    if y.device.type == "cuda" and unstackable(task, two, unrolled) is None:
        return Stacked(local, x, y, unrolled)
    if name == "stacked":
        raise EngineError(f"this model cannot be stacked, take engine='loop'; stopped by {stopped_by}")
    log.warning("clients are trained one after another, because the model cannot be stacked: %s", stopped_by)
    return Loop(local, x, y)
