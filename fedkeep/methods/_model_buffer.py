"""A buffer of the last M global models, shared by FedGKD and FedGKD-VOTE."""

from __future__ import annotations

import torch

from fedkeep import tree
from fedkeep.task import Task
from fedkeep.tree import Tree


def empty_buffer(task: Task, params: Tree, M: int) -> Tree:
    """Return M slots for global models, newest first; `filled` is 0 for a slot without a trained model."""
    return {"buffer": tree.stack([params] * M), "filled": torch.zeros(M, dtype=task.dtype, device=task.device)}


def push(server: Tree, params: Tree) -> Tree:
    """Return the buffer with this model in the first slot; the last slot's model is dropped."""
    filled = server["filled"]
    return {
        "buffer": tree.map(lambda slots, w: torch.cat([w[None], slots[:-1]]), server["buffer"], params),
        "filled": torch.cat([torch.ones_like(filled[:1]), filled[:-1]]),
    }
