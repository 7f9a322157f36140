"""Local training: the one step in which a client's weights change, and one client's whole round.

The step is written once for both engines. `each` decides for how many clients at a time: `once` calls a function
for one client, `vmapped` maps it over a leading client axis. The gradient of the *sum* of the clients' losses is
every client's own gradient, so one level of `vmap` and plain autograd suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.rng import seeded
from fedkeep.data.augment import InputPipeline
from fedkeep.data.plan import ClientPlan
from fedkeep.engine import device
from fedkeep.engine.mapping import Each, call_one
from fedkeep.errors import MethodError
from fedkeep.method import FedAvg
from fedkeep.task import Task
from fedkeep.tree import Tree


class ClientJob(NamedTuple):
    """One client's share of a round."""

    id: int
    examples: np.ndarray  # indices into the training data
    counts: np.ndarray  # how many of each class
    plan: ClientPlan
    client: Tree


class ClientResult(NamedTuple):
    """What comes out of local training, of one client or stacked over a cohort."""

    params: Tree  # the local model
    upload: Tree
    client: Tree  # the state it keeps
    losses: Tensor  # [S], or [S, K]: 0 where a client had fewer steps


@dataclass(frozen=True)
class LocalTraining:
    """Local training as it is for every client of a run."""

    method: FedAvg
    task: Task
    inputs: InputPipeline
    clip_norm: float | None = None
    chunk: int = 1024  # examples annotated at a time; on a GPU up to eight times as many

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
        """Return the method's loss on one client's batch; without notes it is annotated, if the loss looks at them."""
        if "note" not in batch:
            batch = _Noted(batch, lambda: self.note(shared, local, batch["x"], batch["y"]))
        loss = self.method.loss(self.task, params, batch, shared, local)
        if loss.ndim:
            raise MethodError(
                f"{self.method.name}: the loss must be a single number, not {tuple(loss.shape)}: average the examples "
                "with losses.masked_mean(values, batch['mask'])"
            )
        return loss

    def corrected(self, grads: Tree, params: Tree, shared: Tree, local: Tree) -> Tree:
        """Correct and clip one client's gradient."""
        grads = self.method.correct(grads, params, shared, local)
        if self.clip_norm is not None:
            norm = tree.dot(grads, grads).sqrt()
            grads = tree.scale(grads, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return grads

    def step(
        self,
        params: Tree,
        state: Tree,
        batch: Tree,
        shared: Tree,
        local: Tree,
        lr: float | Tensor,
        each: Each = call_one,
    ) -> Tensor:
        """Take one local step, the only place where a client's weights change: in place. Return the loss."""
        given = tree.map(lambda w: w.detach().requires_grad_(), params)
        with torch.enable_grad():
            losses = each(lambda w, b, loc: self.loss(w, b, shared, loc), given, batch, local)
            total = losses.sum()
        if not losses.requires_grad:
            raise MethodError(
                f"{self.method.name}: the loss carries no gradient to the weights; was it computed under no_grad, "
                "or from detached tensors?"
            )
        grads = tree.like(params, torch.autograd.grad(total, tree.leaves(given), materialize_grads=True))
        with torch.no_grad():
            if self.method.uses("correct") or self.clip_norm is not None:
                grads = each(lambda g, w, loc: self.corrected(g, w, shared, loc), grads, params, local)
            optimizer = self.task.optimizer
            if self.task.dtype == torch.float32 and optimizer.fused:
                optimizer.update_(grads, state, params, lr)
            else:
                new = each(lambda g, s, w: optimizer.update(g, s, w, lr), grads, state, params)
                tree.copy_(params, new[0])
                tree.copy_(state, new[1])
        return losses.detach()  # type: ignore[no-any-return]

    def facts(self, plans: Sequence[ClientPlan], counts: np.ndarray, lr: float) -> Tree:
        """Gather what the runtime knows of K clients this round, [K] each, from their plans and label counts [K, C].

        In the weights' dtype or, if that is half, float32.
        """
        precise = torch.promote_types(self.task.dtype, torch.float32)
        steps = [plan.steps for plan in plans]
        known = {
            "n": counts.sum(1),
            "steps": steps,
            "effective_steps": [self.task.optimizer.effective_steps(s) for s in steps],
            "label_counts": counts,
            "lr": [lr] * len(plans),
        }
        return {
            key: torch.tensor(np.asarray(value), dtype=precise, device=self.task.device) for key, value in known.items()
        }

    def train_one(self, shared: Tree, client: Tree, x: Any, y: Tensor, plan: ClientPlan, lr: float) -> ClientResult:
        """Train one client on its own examples, as stored: what every runtime must agree with."""
        method, task = self.method, self.task
        counts = torch.bincount(y, minlength=task.n_classes).cpu().numpy()
        facts = tree.take(self.facts([plan], counts[None], lr), 0)
        index = torch.from_numpy(plan.index).to(y.device)
        augment = {key: torch.from_numpy(value).to(y.device) for key, value in plan.augment.items()}

        def take(at: Tensor, drawn: Tree | None = None) -> Tree:
            mask = torch.ones(len(at), dtype=torch.bool, device=y.device)
            return {"x": self.inputs(tree.take(x, at), drawn), "y": y[at], "mask": mask}

        with seeded(plan.seed, y.device):
            with torch.no_grad(), at_stage(method, "prepare"):
                local = method.prepare(task, shared, client, facts)
                params = tree.map(torch.clone, method.start(shared, client))
                notes = self.notes_of(shared, local, x, y, torch.arange(len(y), device=y.device))
                constant = self.drawn(shared, local, facts, x, y, plan.noise, notes)
            state, losses = self.task.optimizer.init(params), []
            with at_stage(method, "local training"):
                for s, size in enumerate(plan.size):
                    at = index[s, :size]
                    batch = {**take(at, tree.take(augment, (s, slice(size)))), **constant}
                    if self.notes_once:
                        batch["note"] = tree.take(notes, at)
                    losses.append(self.step(params, state, batch, shared, local, lr))
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
        return ClientResult(params, upload, client, torch.stack(losses))

    def measure(self, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tree:
        """Sum the method's measurements over one client's batch."""
        batch = _Noted(batch, lambda: self.note(shared, local, batch["x"], batch["y"]))
        return tree.detach(self.method.measure(self.task, params, batch, shared, local))  # type: ignore[no-any-return]

    def notes_of(self, shared: Tree, local: Tree, x: Any, y: Tensor, own: Tensor) -> Tree:
        """Annotate all of a client's own examples, unaugmented and unpadded, where this round needs it."""
        if not (self.notes_once or (self.method.uses("annotate") and self.method.uses("draw"))):
            return {}
        parts = torch.split(own, self.noted_at_a_time(x, own.device))
        return tree.cat([self.note(shared, local, self.inputs(tree.take(x, at)), y[at]) for at in parts])

    def noted_at_a_time(self, x: Any, place: torch.device) -> int:
        """Return how many examples are annotated at a time: on a CPU the same number in every runtime."""
        if place.type == "cpu":
            return self.chunk
        example = sum(t[:1].numel() for t in tree.leaves(x)) * self.task.dtype.itemsize
        return device.eval_batch_size(example, 8 * self.chunk)

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


class _Noted(dict[str, Any]):
    """A batch whose notes are computed when somebody looks at them."""

    def __init__(self, batch: Tree, annotate: Callable[[], Tree]) -> None:
        super().__init__(batch)
        self.annotate = annotate

    def __missing__(self, key: str) -> Tree:
        if key != "note":
            raise KeyError(key)
        self["note"] = self.annotate()
        return self["note"]  # type: ignore[no-any-return]


@contextmanager
def at_stage(method: FedAvg, stage: str) -> Iterator[None]:
    """Add to an error where it happened; the error itself stays what it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while {method.name} was at: {stage}")
        raise
