"""Evaluation of models on test examples: logits, losses, confusion matrices, right predictions by class."""

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
from fedkeep.engine.scores import Scorer
from fedkeep.metrics import count_pairs
from fedkeep.runs.history import Record
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
    for at, inputs_part in _in_chunks(task, x, len(y), inputs, chunk):
        truth = y[at]

        def one(w: Tree, batch: Any = inputs_part, truth: Tensor = truth) -> tuple[Tensor, Tensor]:
            z = task.apply(w, batch)
            return z.argmax(-1), task.criterion(z, truth).sum()

        predicted, total = each(one, params)
        confusion = confusion + count_pairs(truth, predicted, classes)
        loss = loss + total
    return confusion, loss


@torch.no_grad()
def logits_and_loss(
    task: Task, params: Tree, x: Any, y: Tensor, inputs: InputPipeline, chunk: int = EVAL_BATCH
) -> tuple[Tensor, Tensor]:
    """Return (logits [N, C], summed loss) of one model on these examples."""
    logits = torch.empty((len(y), task.n_classes), dtype=task.dtype, device=y.device)
    loss = torch.zeros((), dtype=torch.float64, device=y.device)
    for at, inputs_part in _in_chunks(task, x, len(y), inputs, chunk):
        truth = y[at]
        z = task.apply(params, inputs_part)
        logits[at] = z
        loss = loss + task.criterion(z, truth).sum()
    return logits, loss


def _in_chunks(task: Task, x: Any, n: int, inputs: InputPipeline, chunk: int) -> Iterator[tuple[Tensor | slice, Any]]:
    """Yield positions and model inputs of all n examples, `chunk` at a time; texts by length, and fewer long ones."""
    if isinstance(x, Texts) and not task.mixes_examples:
        parts: Iterator[Tensor | slice] = x.batches(min(chunk, x.at_a_time))
    else:
        parts = (slice(start, start + chunk) for start in range(0, n, chunk))
    for at in parts:
        yield at, gather(x, at, inputs)


@torch.no_grad()
def class_hits(
    task: Task, params: Tree, x: Any, y: Tensor, inputs: InputPipeline, each: Each = call_one, chunk: int = 1000
) -> Tensor:
    """Return how many examples of each class one model, or each of a stack, classifies right: [..., C]."""
    hits = torch.zeros((), dtype=torch.long, device=y.device)
    for at, inputs_part in _in_chunks(task, x, len(y), inputs, chunk):
        truth = y[at]

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
    scorer: Scorer

    def start(self, params: Tree) -> Tree:
        """Evaluate the global model; every rank has its part of the test set. A GPU may still be at work on return.

        The result is empty on every rank but the first.
        """
        part = self._own_part()
        x, y = tree.take(self.x, part), self.y[part]

        def evaluate_part() -> Tree:
            logits, loss = logits_and_loss(self.task, params, x, y, self.inputs, self.chunk(1))
            return {"logits": logits, "loss": loss}

        parts = self.ranks.gather(evaluate_part, self.task.device)
        if not parts:
            return {}
        logits, losses = ([one[key] for one in parts] for key in ("logits", "loss"))
        return self.scorer.start(torch.cat(logits) if len(parts) > 1 else logits[0], torch.stack(losses).sum(0))

    def read(self, scores: Tree, round: int) -> Record:
        """Return the part of a round's record that `start` computed; nothing on every rank but the first."""
        return self.scorer.read(scores, round) if scores else {}

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
