"""Which runtime a run takes."""

from __future__ import annotations

import logging
from typing import Any

import torch

from fedkeep import tree
from fedkeep.engine.local import Local
from fedkeep.engine.loop import Loop
from fedkeep.engine.stacked import Stacked, unstackable
from fedkeep.errors import EngineError

log = logging.getLogger("fedkeep")

SMALL_MODEL = 100_000  # up to as many weights, stacking a cohort pays on a CPU too


def choose_engine(name: str, local: Local, x: Any, y: torch.Tensor, two: Any) -> Loop | Stacked:
    """Pick the runtime. `auto`: stacked on a GPU or for a small model, if the module can be stacked; else the loop."""
    n_weights = sum(w.numel() for w in tree.leaves(local.task.init))
    if name == "loop" or (name == "auto" and y.device.type == "cpu" and n_weights > SMALL_MODEL):
        return Loop(local, x, y)
    stopped_by = unstackable(local.task, two)
    if stopped_by is None:
        return Stacked(local, x, y)
    if name == "stacked":
        raise EngineError(f"this model cannot be stacked, take engine='loop'; stopped by {stopped_by}")
    log.warning("clients are trained one after another, because the model cannot be stacked: %s", stopped_by)
    return Loop(local, x, y)
