"""Local training: the step in which a client's weights change, and the whole visit of one client.

The step is written once for both engines; `engine/gradients.py` computes its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util import counter_random
from fedkeep._util.rng import seeded
from fedkeep.data.augment import InputPipeline
from fedkeep.data.plan import ClientPlan
from fedkeep.engine.client_hooks import at_stage, require_pair, require_whole_batches, with_own_sums
from fedkeep.engine.example_hooks import ExampleHooks
from fedkeep.engine.gradients import StepGradients
from fedkeep.engine.mapping import Each, call_one
from fedkeep.engine.refine import refine_one
from fedkeep.method import Batch, FedAvg, Visit
from fedkeep.task import Task
from fedkeep.tree import Tree


class ClientJob(NamedTuple):
    """One client's part of a round."""

    id: int
    examples: np.ndarray  # indices into the training data
    counts: np.ndarray  # examples of each class
    plan: ClientPlan
    client: Tree  # its state
    sent: Tree  # what the server sends to it alone


class ClientResult(NamedTuple):
    """The result of local training, of one client or stacked over a cohort."""

    params: Tree  # the local model
    upload: Tree
    client: Tree  # the client's next state
    losses: Tensor  # [S], or [S, K]: 0 where a client had fewer steps


@dataclass(frozen=True)
class LocalTraining:
    """Local training, the same for every client of a run."""

    method: FedAvg
    task: Task
    inputs: InputPipeline
    clip_norm: float | None = None
    part_size: int | None = None  # examples of a batch whose gradient is computed at a time; None: all
    chunk: int = 1024  # examples annotated at a time; on a GPU up to eight times as many

    def __post_init__(self) -> None:
        if self.task.mixes_examples:
            require_whole_batches(self.method, self.part_size)

    @functools.cached_property
    def hooks(self) -> ExampleHooks:
        """The hooks that are called with a client's examples, besides training."""
        return ExampleHooks(self.method, self.task, self.inputs, self.chunk)

    @functools.cached_property
    def gradients(self) -> StepGradients:
        """The losses and gradients of a step."""
        return StepGradients(self.method, self.task, self.hooks, self.clip_norm, self.part_size)

    def trained(self, params: Tree) -> Tree:
        """Return those of the weights that are not frozen."""
        return self.gradients.trained(params)

    # One step

    def step(
        self,
        params: Tree,
        state: Tree,
        batch: Tree,
        shared: Tree,
        facts: Tree,
        local: Tree,
        lr: float | Tensor,
        each: Each = call_one,
        gradients: Callable[[Tree], tuple[Tensor, Tree, Tree]] | None = None,
    ) -> Tensor:
        """Take one local step, in place: the only function in which a client's weights change. Return the loss.

        `gradients` may compute what `StepGradients.compute` does in another way, with the same result.
        """
        trees = {"params": params, "batch": batch, "shared": shared, "facts": facts, "local": local}
        losses, grads, sums = gradients(trees) if gradients is not None else self.gradients.compute(trees, each)
        optimizer, params = self.task.optimizer, self.trained(params)
        with torch.no_grad():
            if self.task.dtype == torch.float32 and optimizer.fused:
                self.task.accelerator.update_(optimizer, grads, state, params, lr)
            else:
                grads = self.task.accelerator.as_tensors(grads)
                new = each(lambda g, s, w: optimizer.update(g, s, w, lr), grads, state, params)
                tree.copy_(params, new[0])
                tree.copy_(state, new[1])
            tree.map(Tensor.add_, local.get("tracked", {}), sums)
        return losses

    # One visit

    def train_one(
        self, shared: Tree, client: Tree, x: Any, y: Tensor, plan: ClientPlan, lr: float, sent: Tree | None = None
    ) -> ClientResult:
        """Train one client on its own examples, as stored. Every runtime must agree with this function."""
        method, task = self.method, self.task
        counts = torch.bincount(y, minlength=task.n_classes).cpu().numpy()
        facts = tree.take(self.facts([plan], counts[None], lr), 0)
        index = torch.from_numpy(plan.index).to(y.device)
        augment = {key: torch.from_numpy(value).to(y.device) for key, value in plan.augment.items()}
        dropout_keys = torch.from_numpy(plan.dropout_keys).to(y.device) if task.may_drop else None

        def take(at: Tensor, drawn: Tree | None = None) -> Tree:
            mask = torch.ones(len(at), dtype=torch.bool, device=y.device)
            return {"x": self.inputs(tree.take(x, at), drawn), "y": y[at], "mask": mask}

        def take_in_order(batches: Sequence[np.ndarray]) -> Iterator[Tree]:
            for s, own in enumerate(batches):
                at = torch.from_numpy(own).to(y.device)
                yield {**take(at), "position": torch.arange(len(at), device=y.device) + s * index.shape[1]}

        def visit(hook: str, local: Tree) -> Visit:
            return Visit(hook, task, shared, client, facts, local, sent or {})

        with seeded(plan.seed, y.device):
            with torch.no_grad():
                with at_stage(method, "prepare"):
                    local = method.prepare(visit("prepare", {}))
                if method.uses("refine"):
                    with at_stage(method, "refine"):
                        local = refine_one(method, visit, local, lambda: take_in_order(plan.refine_batches))
                local = with_own_sums(local)
                with at_stage(method, "start"):
                    params = tree.map(torch.clone, method.start(visit("start", local)))
                with at_stage(method, "annotate"):
                    notes = self.hooks.annotate_all(shared, local, x, y, torch.arange(len(y), device=y.device))
                with at_stage(method, "select_examples"):
                    selected = self.hooks.selected_examples(shared, facts, local, x, y, plan.noise, notes)
                with at_stage(method, "rehearse"):
                    rehearsed = self.hooks.rehearse_all(shared, local, x, y, torch.arange(len(y), device=y.device))
            state, losses = task.optimizer.init(self.trained(params)), []
            with at_stage(method, "local training"):
                for s, size in enumerate(plan.size):
                    at = index[s, :size]
                    batch = {**take(at, tree.take(augment, (s, slice(size)))), **selected}
                    if self.hooks.annotates_once:
                        batch["note"] = tree.take(notes, at)
                    if dropout_keys is not None:
                        batch["dropout_key"] = dropout_keys[s]
                    if rehearsed:
                        now = torch.from_numpy(plan.rehearsal[s, :size]).to(y.device)
                        batch["rehearsed"] = tree.take(rehearsed, now)
                    if method.noise_size:
                        batch["noise"] = self.noise(torch.tensor(plan.noise_seed, device=y.device), s, size)
                    losses.append(self.step(params, state, batch, shared, facts, local, lr))
            measured: Tree = {}
            if method.uses("measure"):
                with at_stage(method, "measure"):
                    for batch in take_in_order(plan.one_pass):
                        sums = self.measure(params, batch, shared, facts, local)
                        measured = tree.add(measured, sums) if measured else sums
            with torch.no_grad(), at_stage(method, "finish"):
                result = method.finish(visit("finish", local), params, measured)
                upload, client = require_pair(method, "finish", "(upload, state)", result)
        return ClientResult(params, upload, client, torch.stack(losses))

    def facts(self, plans: Sequence[ClientPlan], counts: np.ndarray, lr: float) -> Tree:
        """Return the facts of K clients, [K] each, from their plans and label counts [K, C]."""
        precise = torch.promote_types(self.task.dtype, torch.float32)
        steps = [plan.steps for plan in plans]
        facts = {
            "n": counts.sum(1),
            "steps": steps,
            "effective_steps": [self.task.optimizer.effective_steps(s) for s in steps],
            "label_counts": counts,
            "lr": [lr] * len(plans),
        }
        return {
            key: torch.tensor(np.asarray(value), dtype=precise, device=self.task.device) for key, value in facts.items()
        }

    def measure(self, params: Tree, batch: Tree, shared: Tree, facts: Tree, local: Tree) -> Tree:
        """Return the method's sums over one client's batch."""
        batch = self.hooks.with_notes(batch, shared, local)
        visit = Visit("measure", self.task, shared, facts=facts, local=local)
        return tree.detach(self.method.measure(visit, params, cast(Batch, batch)))

    def noise(self, seed: Tensor, step: int | Tensor, examples: int) -> Tensor:
        """Return the random numbers of a step, for the seed of one client or those of several."""
        precise = torch.promote_types(self.task.dtype, torch.float32)
        return counter_random.uniform(seed, step, examples, self.method.noise_size, precise)
