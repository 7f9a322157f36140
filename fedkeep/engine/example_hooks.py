"""The hooks that a visit calls with a client's examples, besides training: notes, selected and rehearsed examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.data.augment import InputPipeline
from fedkeep.data.texts import Texts
from fedkeep.engine import device
from fedkeep.engine.client_hooks import require_selection
from fedkeep.engine.gpu.images import gather
from fedkeep.method import FedAvg, Visit
from fedkeep.task import Task
from fedkeep.tree import Tree

REHEARSED_AT_ONCE = 256  # examples: the hook may compute gradients, which takes more memory than notes


@dataclass(frozen=True)
class ExampleHooks:
    """Calls `annotate`, `select_examples` and `rehearse` of a method."""

    method: FedAvg
    task: Task
    inputs: InputPipeline
    chunk: int  # examples annotated at a time; on a GPU up to eight times as many

    @property
    def annotates_once(self) -> bool:
        """Whether notes are computed once per visit: not where they change with augmentation or with the batch."""
        return self.method.uses("annotate") and not self.inputs.augment and not self.task.mixes_examples

    @property
    def annotates(self) -> bool:
        """Whether a visit needs the notes of all of its examples at its start."""
        return self.annotates_once or (self.method.uses("annotate") and self.method.uses("select_examples"))

    def annotate(self, shared: Tree, local: Tree, x: Any, y: Tensor) -> Tree:
        """Return the notes of some examples, without gradient."""
        if not self.method.uses("annotate"):
            return {}
        with torch.no_grad():
            return self.method.annotate(Visit("annotate", self.task, shared, local=local), x, y)

    def with_notes(self, batch: Tree, shared: Tree, local: Tree) -> Tree:
        """Return a batch whose notes are computed when they are read."""
        return _LazyNotes(batch, lambda: self.annotate(shared, local, batch["x"], batch["y"]))

    def annotate_all(self, shared: Tree, local: Tree, x: Any, y: Tensor, own: Tensor) -> Tree:
        """Return the notes of all of a client's own examples, unaugmented, if this visit needs them; else nothing."""
        if not self.annotates:
            return {}
        size = self.annotation_batch_size(x, own.device)
        return self._for_all(lambda x, y: self.annotate(shared, local, x, y), x, y, own, size)

    def rehearse_all(self, shared: Tree, local: Tree, x: Any, y: Tensor, own: Tensor) -> Tree:
        """Return what the method rehearses of all of a client's own examples, unaugmented."""
        if not self.method.uses("rehearse"):
            return {}
        visit = Visit("rehearse", self.task, shared, local=local)
        return self._for_all(lambda x, y: self.method.rehearse(visit, x, y), x, y, own, REHEARSED_AT_ONCE)

    def _for_all(self, hook: Callable[[Any, Tensor], Tree], x: Any, y: Tensor, own: Tensor, size: int) -> Tree:
        """Call a hook with all of a client's own examples, `size` at a time; texts by length."""
        if not isinstance(x, Texts):
            return tree.cat([hook(gather(x, at, self.inputs), y[at]) for at in torch.split(own, size)])
        batches = list(tree.take(x, own).batches(size))
        results = tree.cat([hook(gather(x, own[at], self.inputs), y[own[at]]) for at in batches])
        return tree.take(results, torch.argsort(torch.cat(batches)))

    def annotation_batch_size(self, x: Any, place: torch.device) -> int:
        """Return how many examples are annotated at a time; on a CPU the same in every runtime."""
        if isinstance(x, Texts):
            return min(self.chunk, x.at_a_time)
        if place.type == "cpu":
            return self.chunk
        example = sum(t[:1].numel() for t in tree.leaves(x)) * self.task.dtype.itemsize
        return device.eval_batch_size(example, 8 * self.chunk)

    def selected_examples(
        self, shared: Tree, facts: Tree, local: Tree, x: Any, y: Tensor, noise: np.ndarray, notes: Tree
    ) -> Tree:
        """Return {"selected": the examples that the method selects for this visit}, or nothing."""
        if not self.method.uses("select_examples"):
            return {}
        valid = torch.ones(len(y), dtype=torch.bool, device=y.device)
        uniform = torch.from_numpy(noise).to(y.device, self.task.dtype)
        visit = Visit("select_examples", self.task, shared, facts=facts, local=local)
        choice = self.method.select_examples(visit, y, valid, uniform, notes)
        if choice is None:
            return {}
        index, weight = require_selection(self.method, choice)
        inputs = self.inputs(tree.take(x, index))
        note = self.annotate(shared, local, inputs, y[index])
        return {"selected": {"x": inputs, "y": y[index], "weight": weight, "note": note}}


class _LazyNotes(dict[str, Any]):
    """A batch whose notes are computed when they are read."""

    def __init__(self, batch: Tree, annotate: Callable[[], Tree]) -> None:
        super().__init__(batch)
        self.annotate = annotate

    def __missing__(self, key: str) -> Tree:
        if key != "note":
            raise KeyError(key)
        self["note"] = self.annotate()
        return self["note"]  # type: ignore[no-any-return]
