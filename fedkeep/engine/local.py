"""Local training: the one step in which a client's weights change, and one client's whole round.

The step is written once for both engines. `each` decides for how many clients at a time: `once` calls a function
for one client, `stacked` maps it over a leading client axis. The gradient of the *sum* of the clients' losses is
every client's own gradient, so one level of `vmap` and plain autograd suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.data.augment import Inputs
from fedkeep.data.plan import Plan
from fedkeep.errors import MethodError
from fedkeep.method import FedAvg
from fedkeep.task import Task, seeded
from fedkeep.tree import Tree

Each = Callable[..., Any]


def once(fn: Callable[..., Any], *trees: Any) -> Any:
    """Call a function for one client."""
    return fn(*trees)


def stacked(fn: Callable[..., Any], *trees: Any) -> Any:
    """Map a function over the leading client axis of every tree. Randomness inside belongs in the plan."""
    return torch.vmap(fn, randomness="error")(*trees)


class Job(NamedTuple):
    """One client's share of a round."""

    id: int
    examples: np.ndarray  # indices into the training data
    plan: Plan
    client: Tree


class Trained(NamedTuple):
    """What comes out of local training, of one client or stacked over a cohort."""

    params: Tree  # the local model
    upload: Tree
    client: Tree  # the state it keeps
    losses: list[Tensor]  # one [S] per client


@dataclass(frozen=True)
class Local:
    """Local training as it is for every client of a run."""

    method: FedAvg
    task: Task
    inputs: Inputs
    clip_norm: float | None = None
    chunk: int = 1024  # examples annotated at a time

    @property
    def notes_once(self) -> bool:
        """Whether notes can be computed once a round: not where augmentation changes the inputs at every step."""
        return self.method.uses("annotate") and not self.inputs.augment

    def note(self, shared: Tree, local: Tree, x: Any, y: Tensor) -> Tree:
        """Annotate examples; no gradient flows into a note."""
        if not self.method.uses("annotate"):
            return {}
        with torch.no_grad():
            return self.method.annotate(self.task, shared, local, x, y)

    def loss(self, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tensor:
        """Return the method's loss on one client's batch, annotating it first where that was not done before."""
        if "note" not in batch:
            batch = {**batch, "note": self.note(shared, local, batch["x"], batch["y"])}
        loss = self.method.loss(self.task, params, batch, shared, local)
        if loss.ndim:
            raise MethodError(
                f"{self.method.name}: the loss must be a single number, not {tuple(loss.shape)}: average the examples "
                "with losses.masked_mean(values, batch['mask'])"
            )
        return loss

    def update(self, grads: Tree, params: Tree, state: Tree, shared: Tree, local: Tree, lr: float) -> tuple[Tree, Tree]:
        """Correct and clip one client's gradient, and take the optimiser's step."""
        grads = self.method.correct(grads, params, shared, local)
        if self.clip_norm is not None:
            norm = tree.dot(grads, grads).sqrt()
            grads = tree.scale(grads, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return self.task.optimizer.update(grads, state, params, lr)

    def step(
        self, params: Tree, state: Tree, batch: Tree, shared: Tree, local: Tree, lr: float, each: Each = once
    ) -> tuple[Tree, Tree, Tensor]:
        """Take one local step: (new weights, new optimiser state, loss)."""
        params = tree.map(lambda w: w.detach().requires_grad_(), params)
        with torch.enable_grad():
            losses = each(lambda w, b, loc: self.loss(w, b, shared, loc), params, batch, local)
            total = losses.sum()
        if not losses.requires_grad:
            raise MethodError(
                f"{self.method.name}: the loss carries no gradient to the weights; was it computed under no_grad, "
                "or from detached tensors?"
            )
        grads = tree.like(params, torch.autograd.grad(total, tree.leaves(params), materialize_grads=True))
        with torch.no_grad():
            params = tree.detach(params)
            params, state = each(
                lambda g, w, s, loc: self.update(g, w, s, shared, loc, lr), grads, params, state, local
            )
        return params, state, losses.detach()

    def facts(self, plan: Plan, counts: np.ndarray, lr: float) -> Tree:
        """Gather what the runtime knows of a client this round, in the weights' dtype or, if that is half, float32."""
        precise = torch.promote_types(self.task.dtype, torch.float32)

        def number(value: Any) -> Tensor:
            return torch.tensor(value, dtype=precise, device=self.task.device)

        return {
            "n": number(float(counts.sum())),
            "steps": number(float(plan.steps)),
            "effective_steps": number(self.task.optimizer.effective_steps(plan.steps)),
            "label_counts": number(counts),
            "lr": number(lr),
        }

    def train_one(self, shared: Tree, client: Tree, x: Any, y: Tensor, plan: Plan, lr: float) -> Trained:
        """Train one client on its own examples, as stored: what every runtime must agree with."""
        method, task = self.method, self.task
        counts = torch.bincount(y, minlength=task.n_classes).cpu().numpy()
        facts = self.facts(plan, counts, lr)
        index = torch.from_numpy(plan.index).to(y.device)
        augment = {key: torch.from_numpy(value).to(y.device) for key, value in plan.augment.items()}

        def take(at: Tensor, drawn: Tree | None = None) -> Tree:
            mask = torch.ones(len(at), dtype=torch.bool, device=y.device)
            return {"x": self.inputs(tree.take(x, at), drawn), "y": y[at], "mask": mask}

        with seeded(plan.seed, y.device):
            with torch.no_grad(), at_stage(method, "prepare"):
                local = method.prepare(task, shared, client, facts)
                params = method.start(shared, client)
                notes = self.notes_of(shared, local, x, y, torch.arange(len(y), device=y.device))
                constant = self.drawn(shared, local, facts, x, y, plan.noise, notes)
            state, losses = self.task.optimizer.init(params), []
            with at_stage(method, "local training"):
                for s, size in enumerate(plan.size):
                    at = index[s, :size]
                    batch = {**take(at, tree.take(augment, (s, slice(size)))), **constant}
                    if self.notes_once:
                        batch["note"] = tree.take(notes, at)
                    params, state, value = self.step(params, state, batch, shared, local, lr)
                    losses.append(value)
            measured: Tree = {}
            if method.uses("measure"):
                with at_stage(method, "measure"):
                    for s in range(plan.per_epoch):
                        place = torch.arange(plan.size[s], device=y.device) + s * index.shape[1]
                        batch = {**take(index[s, : plan.size[s]]), "place": place}
                        sums = self.measure(params, batch, shared, local)
                        measured = tree.add(measured, sums) if measured else sums
            with torch.no_grad(), at_stage(method, "finish"):
                upload, client = method.finish(shared, params, local, client, facts, measured)
        return Trained(params, upload, client, [torch.stack(losses)])

    def measure(self, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tree:
        """Sum the method's measurements over one client's batch."""
        batch = {**batch, "note": self.note(shared, local, batch["x"], batch["y"])}
        return tree.detach(self.method.measure(self.task, params, batch, shared, local))  # type: ignore[no-any-return]

    def notes_of(self, shared: Tree, local: Tree, x: Any, y: Tensor, own: Tensor) -> Tree:
        """Annotate all of a client's own examples, unaugmented and unpadded, where this round needs it."""
        if not (self.notes_once or (self.method.uses("annotate") and self.method.uses("draw"))):
            return {}
        parts = torch.split(own, self.chunk)
        return tree.cat([self.note(shared, local, self.inputs(tree.take(x, at)), y[at]) for at in parts])

    def drawn(self, shared: Tree, local: Tree, facts: Tree, x: Any, y: Tensor, noise: np.ndarray, notes: Tree) -> Tree:
        """Return {"drawn": the examples the method names for this round}, or nothing."""
        if not self.method.uses("draw"):
            return {}
        valid = torch.ones(len(y), dtype=torch.bool, device=y.device)
        uniform = torch.from_numpy(noise).to(y.device, self.task.dtype)
        named = self.method.draw(self.task, shared, facts, y, valid, uniform, notes)
        if named is None:
            return {}
        index, weight = named
        inputs = self.inputs(tree.take(x, index))
        note = self.note(shared, local, inputs, y[index])
        return {"drawn": {"x": inputs, "y": y[index], "weight": weight, "note": note}}


@contextmanager
def at_stage(method: FedAvg, stage: str) -> Iterator[None]:
    """Add to an error where it happened; the error itself stays what it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while {method.name} was at: {stage}")
        raise
