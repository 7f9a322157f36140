"""Form of a method's upload: its names, shapes and dtypes, without a client and without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.engine.server_hooks import broadcast_to
from fedkeep.errors import MethodError
from fedkeep.method import Batch, FedAvg, Visit
from fedkeep.task import Task
from fedkeep.task.example_gradients import ExampleGradients
from fedkeep.tree import Tree


class _TaskWithoutModel(Task):
    """A task whose model ignores its inputs, so that hooks can be called without any: all logits are 0."""

    def __init__(self, task: Task) -> None:
        self.__dict__.update(task.__dict__)
        self.public = None
        self.gradients = ExampleGradients()

    def apply(self, params: Tree, x: Any, train: bool = False, batch: int | None = None) -> Tensor:
        """Return logits of 0 that depend on every weight."""
        zero = sum(((w * 0).sum() for w in tree.leaves(params)), torch.zeros((), device=self.device))
        return torch.zeros(len(x), self.n_classes, dtype=self.dtype, device=self.device) + zero.to(self.dtype)

    def head(self, params: Tree, features: Tensor, train: bool = False) -> Tensor:
        """Return logits of 0 that depend on every weight."""
        return self.apply(params, features, train)

    def outputs(self, params: Tree, x: Any, train: bool = False, batch: int | None = None) -> tuple[Tensor, Tensor]:
        """Return (features of 0, as many as the classifier has columns, and logits of 0)."""
        logits = self.apply(params, x, train)
        widths = [w.shape[1] for w in self.init.values() if w.ndim == 2 and len(w) == self.n_classes]
        return logits[:, :1].expand(-1, widths[-1] if widths else 1), logits


def upload_form(method: FedAvg, task: Task, server: Tree) -> Tree:
    """Return an upload of the right form, made by the method's own hooks for a client with one example.

    No value of it means anything.
    """
    task = _TaskWithoutModel(task)
    shared, sent = method.broadcast(server), broadcast_to(method, server, 0)
    precise = torch.promote_types(task.dtype, torch.float32)
    one = torch.ones((), dtype=precise, device=task.device)
    counts = torch.nn.functional.one_hot(torch.zeros((), dtype=torch.long), task.n_classes).to(one)
    facts = {"n": one, "steps": one, "effective_steps": one, "label_counts": counts, "lr": one}
    x, y = torch.zeros(1, 1, dtype=task.dtype, device=task.device), torch.zeros(1, dtype=torch.long, device=task.device)
    batch: Batch = {"x": x, "y": y, "mask": y == 0, "position": y}
    try:
        client = method.init_client(task, shared["params"])
        local = method.prepare(Visit("prepare", task, shared, client, facts, sent=sent))
        if method.uses("refine"):
            local = method.refine(Visit("refine", task, shared, client, facts, local, sent), batch)
        params = method.start(Visit("start", task, shared, client, facts, local, sent))
        if method.uses("annotate"):
            batch["note"] = method.annotate(Visit("annotate", task, shared, local=local), x, y)
        measured = {}
        if method.uses("measure"):
            measured = method.measure(Visit("measure", task, shared, facts=facts, local=local), params, batch)
        upload, _ = method.finish(Visit("finish", task, shared, client, facts, local, sent), params, measured)
    except Exception as error:
        raise MethodError(
            f"{method.name}: its upload cannot be computed for one example without a model "
            f"({type(error).__name__}: {error})",
            key="finish",
        ) from error
    return tree.detach(upload)
