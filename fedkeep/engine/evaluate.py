"""Evaluation: confusion matrices of the global model and of local models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.data.augment import InputPipeline
from fedkeep.data.texts import Texts
from fedkeep.engine import device
from fedkeep.engine.distributed import Ranks
from fedkeep.engine.gpu.images import gather
from fedkeep.engine.mapping import Each, call_one
from fedkeep.runs.history import Record
from fedkeep.runs.packed import as_table
from fedkeep.task import Task
from fedkeep.tree import Tree

EVAL_BATCH = 1000  # examples at a time, in every runtime, where logits depend on the batch


@torch.no_grad()
def evaluate(
    task: Task, params: Tree, x: Any, y: Tensor, inputs: InputPipeline, each: Each = call_one, chunk: int = EVAL_BATCH
) -> tuple[Tensor, Tensor]:
    """Return (confusion [..., true, predicted], summed loss [...]) of one model, or of a stack with `each`.

    `chunk` examples pass through a model at a time; a stack of K models needs K times the memory.
    """
    classes = task.n_classes
    confusion = torch.zeros((classes, classes), dtype=torch.long, device=y.device)
    loss = torch.zeros((), dtype=torch.float64, device=y.device)
    for inputs_part, truth in _in_chunks(x, y, inputs, chunk):

        def one(w: Tree, batch: Any = inputs_part, truth: Tensor = truth) -> tuple[Tensor, Tensor]:
            z = task.apply(w, batch)
            return z.argmax(-1), task.criterion(z, truth).sum()

        predicted, total = each(one, params)
        confusion = confusion + count_pairs(truth, predicted, classes)
        loss = loss + total
    return confusion, loss


def _in_chunks(x: Any, y: Tensor, inputs: InputPipeline, chunk: int) -> Iterator[tuple[Any, Tensor]]:
    """Yield the examples, as the model gets them, and their labels, `chunk` at a time; fewer where texts are long."""
    chunk = min(chunk, x.at_a_time) if isinstance(x, Texts) else chunk
    for start in range(0, len(y), chunk):
        part = slice(start, start + chunk)
        yield gather(x, part, inputs), y[part]


def count_pairs(truth: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Return how often each class [B] was predicted as each class [..., B]: [..., true, predicted].

    Counted, not multiplied from one-hot vectors: that takes C^2 operations for every example and model.
    """
    models = predicted.reshape(-1, predicted.shape[-1])
    first = torch.arange(len(models), device=truth.device)[:, None] * classes
    cells = (first + truth) * classes + models
    cells, size = cells.reshape(-1), len(models) * classes**2
    if cells.is_cuda:  # where bincount waits for the device
        counts = torch.zeros(size, dtype=torch.long, device=cells.device).index_add_(0, cells, torch.ones_like(cells))
    else:
        counts = torch.bincount(cells, minlength=size)
    return counts.reshape(*predicted.shape[:-1], classes, classes)


@torch.no_grad()
def class_hits(
    task: Task, params: Tree, x: Any, y: Tensor, inputs: InputPipeline, each: Each = call_one, chunk: int = 1000
) -> Tensor:
    """Return how many examples of each class one model, or each of a stack, classifies right: [..., C]."""
    hits = torch.zeros((), dtype=torch.long, device=y.device)
    for inputs_part, truth in _in_chunks(x, y, inputs, chunk):

        def one(w: Tree, batch: Any = inputs_part) -> Tensor:
            return task.apply(w, batch).argmax(-1)

        right = (each(one, params) == truth).long()
        counts = torch.zeros((*right.shape[:-1], task.n_classes), dtype=torch.long, device=y.device)
        hits = hits + counts.index_add_(-1, truth, right)
    return hits


@dataclass(frozen=True)
class Evaluator:
    """Evaluates models on the test set."""

    task: Task
    x: Any
    y: Tensor
    inputs: InputPipeline  # without augmentation
    ranks: Ranks
    example_bytes: int

    def global_model(self, params: Tree) -> Record:
        """Return `confusion` and `test_loss` of the global model."""
        return self.read(self.start(params))

    def start(self, params: Tree) -> list[Tree]:
        """Evaluate the global model; every rank has its part of the test set. A GPU may still be at work on return."""
        part = self._own_part()
        x, y = tree.take(self.x, part), self.y[part]

        def evaluate_part() -> Tree:
            confusion, loss = evaluate(self.task, params, x, y, self.inputs, chunk=self.chunk(1))
            return {"confusion": confusion, "loss": loss}

        return self.ranks.gather(evaluate_part, self.task.device)

    def read(self, parts: list[Tree]) -> Record:
        """Return the record of what `start` returned; nothing on every rank but the first."""
        if not parts:
            return {}
        confusion, loss = (torch.stack([one[key] for one in parts]).sum(0) for key in ("confusion", "loss"))
        return {"confusion": as_table(confusion.cpu()), "test_loss": float(loss) / len(self.y)}

    def local_models(self, params: Tree, clients: int, each: Each | None) -> Tensor:
        """Return, for each of some stacked models, how many test examples of each class it classifies right: [K, C].

        `each` maps over the stack; None evaluates one model after another.
        """
        if each is not None:
            return class_hits(self.task, params, self.x, self.y, self.inputs, each, self.chunk(clients))
        single = [
            class_hits(self.task, tree.take(params, k), self.x, self.y, self.inputs, chunk=self.chunk(1))
            for k in range(clients)
        ]
        return torch.stack(single)

    def _own_part(self) -> slice:
        """Return this rank's part of the test set; whole batches, where logits depend on the batch."""
        if not self.task.mixes_examples:
            return self.ranks.slice(len(self.y))
        batches = self.ranks.slice(-(-len(self.y) // EVAL_BATCH))
        return slice(batches.start * EVAL_BATCH, batches.stop * EVAL_BATCH)

    def chunk(self, models: int) -> int:
        """Return how many examples pass through each of some models at a time."""
        if self.task.mixes_examples:
            return EVAL_BATCH
        most = 1000 if self.task.device.type == "cpu" else device.eval_batch_size(self.example_bytes, 10_000)
        most = min(most, self.x.at_a_time) if isinstance(self.x, Texts) else most
        return max(1, most // models)
