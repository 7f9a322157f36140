"""Evaluation: one confusion matrix says everything that is measured later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.data.augment import InputPipeline
from fedkeep.engine.mapping import Each, call_one
from fedkeep.task import Task
from fedkeep.tree import Tree


@torch.no_grad()
def evaluate(
    task: Task, params: Tree, x: Any, y: Tensor, inputs: InputPipeline, each: Each = call_one, chunk: int = 1000
) -> tuple[Tensor, Tensor]:
    """Return (confusion [..., true, predicted], summed loss [...]) of one model, or of a stack with `each=vmapped`.

    `chunk` examples pass through a model at a time; a stack of K models does that K times over.
    """
    classes = task.n_classes
    confusion = torch.zeros((classes, classes), dtype=torch.float64, device=y.device)
    loss = torch.zeros((), dtype=torch.float64, device=y.device)
    for start in range(0, len(y), chunk):
        part = slice(start, start + chunk)
        inputs_part, truth = inputs(tree.take(x, part)), y[part]

        def one(w: Tree, batch: Any = inputs_part, truth: Tensor = truth) -> tuple[Tensor, Tensor]:
            z = task.apply(w, batch)
            return z.argmax(-1), task.criterion(z, truth).sum()

        predicted, total = each(one, params)
        true = torch.nn.functional.one_hot(truth, classes).double()
        guess = torch.nn.functional.one_hot(predicted, classes).double()
        confusion = confusion + true.T @ guess
        loss = loss + total
    return confusion.long(), loss
