"""The loss of a local step and its gradient: of all passes, combined, centred, corrected and clipped.

It is written once for both engines. `each` decides for how many clients at a time: `call_one` for one client,
`map_clients` over a leading client axis. The gradient of the *sum* of the clients' losses is every client's own
gradient, so one level of `vmap` and ordinary autograd are enough.

A `Visit` is built inside the mapped function: `vmap` takes trees, not objects.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.batch_norm import real_examples
from fedkeep._util.dropout import keyed
from fedkeep.engine.batch_parts import weighted_parts
from fedkeep.engine.client_hooks import require_loss, require_weight_names
from fedkeep.engine.example_hooks import ExampleHooks
from fedkeep.engine.mapping import Each, call_one
from fedkeep.errors import MethodError
from fedkeep.method import FedAvg, Visit
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class StepGradients:
    """Losses and gradients of local steps, the same for every client of a run."""

    method: FedAvg
    task: Task
    hooks: ExampleHooks
    clip_norm: float | None
    part_size: int | None  # examples of a batch whose gradient is computed at a time; None: all

    @functools.cached_property
    def _frozen(self) -> frozenset[str]:
        return require_weight_names(self.method, self.task, "frozen")

    @functools.cached_property
    def _centred(self) -> frozenset[str]:
        return require_weight_names(self.method, self.task, "centred_weights") - self._frozen

    def trained(self, params: Tree) -> Tree:
        """Return those of the weights that are not frozen."""
        return {name: w for name, w in params.items() if name not in self._frozen} if self._frozen else params

    def compute(self, trees: Tree, each: Each) -> tuple[Tensor, Tree, Tree]:
        """Return every client's loss, the gradient for its optimiser and its sums.

        The gradients of all passes are combined, centred, corrected and clipped, in this order.
        """
        params, batch, shared, facts, local = (trees[key] for key in ("params", "batch", "shared", "facts", "local"))
        method, accelerator = self.method, self.task.accelerator
        several = len(method.passes) > 1
        if several and method.uses("annotate") and "note" not in batch:  # once for all passes
            noted = each(lambda b, loc: self._annotate_batch(shared, loc, b, each), batch, local)
            batch = {**batch, "note": noted}
        losses: dict[str, Tensor] = {}
        gradients: Tree = {}
        sums: Tree = {}
        for name in method.passes:
            point = params
            if gradients and method.uses("gradient_point"):
                with torch.no_grad():
                    point = each(
                        lambda w, g, f, loc: method.gradient_point(
                            self._in_step("gradient_point", shared, f, loc), w, g
                        ),
                        params,
                        gradients,
                        facts,
                        local,
                    )
            losses[name], gradient, tracked = self._accumulated(name, point, batch, shared, facts, local, each)
            sums = tracked or sums
            gradients[name] = accelerator.as_tensors(gradient) if several else gradient
        grads = gradients["loss"]
        with torch.no_grad():
            if several:
                grads = each(lambda g, w, f, loc: self._combined(g, w, shared, f, loc), gradients, params, facts, local)
            if self._centred:
                grads = accelerator.centred(grads, self._centred, each)
            if method.corrects or self.clip_norm is not None:
                grads = accelerator.as_tensors(grads)
                grads = each(lambda g, w, f, loc: self._corrected(g, w, shared, f, loc), grads, params, facts, local)
        return losses["loss"].detach(), grads, tree.detach(sums)

    def _accumulated(
        self, name: str, point: Tree, batch: Tree, shared: Tree, facts: Tree, local: Tree, each: Each
    ) -> tuple[Tensor, Tree, Tree]:
        """Return what `_gradient` does, part by part."""
        if self.part_size is None:
            return self._gradient(name, point, batch, shared, facts, local, each)
        if "tracked" in local:
            raise MethodError(
                f"{self.method.name} adds up sums over batches, which accumulate would divide: use accumulate = 1",
                key="accumulate",
            )
        sums: Tree = {}
        axis = 0 if each is call_one else 1
        for part, weight in weighted_parts(batch, axis, self.part_size, self.task.dtype):
            losses, grads, _ = self._gradient(name, point, part, shared, facts, local, each, weight)
            found = {"losses": losses.detach(), "grads": self.task.accelerator.as_tensors(grads)}
            sums = tree.add(sums, found) if sums else found
        return sums["losses"], sums["grads"], {}

    def _gradient(
        self,
        name: str,
        point: Tree,
        batch: Tree,
        shared: Tree,
        facts: Tree,
        local: Tree,
        each: Each,
        weight: Tensor | None = None,
    ) -> tuple[Tensor, Tree, Tree]:
        """Return every client's loss and gradient of one pass at these weights, and the sums that the pass tracks.

        Loss and gradient are multiplied by a weight per client.
        """
        point = tree.detach(point)
        trained = tree.map(lambda w: w.requires_grad_(), self.trained(point))
        with torch.enable_grad():
            losses, sums = each(
                lambda w, b, f, loc: self._loss(name, w, b, shared, f, loc, each), point, batch, facts, local
            )
            losses = losses if weight is None else losses * weight
            total = losses.sum()
        if not losses.requires_grad:
            raise MethodError(
                f"{self.method.name}: {name} carries no gradient to the weights; was it computed under no_grad, "
                "or from detached tensors?",
                key=name,
            )
        grads = torch.autograd.grad(total, tree.leaves(trained), materialize_grads=True)
        return losses, tree.like(trained, grads), sums

    def _loss(
        self, name: str, params: Tree, batch: Tree, shared: Tree, facts: Tree, local: Tree, each: Each
    ) -> tuple[Tensor, Tree]:
        """Return the loss of one pass on one client's batch, and the sums to track.

        Missing notes are computed if the loss reads them.
        """
        if "note" not in batch:
            batch = self.hooks.with_notes(batch, shared, local)
        visit = self._in_step(name, shared, facts, local)
        with self._of_batch(batch, each):
            result = getattr(self.method, name)(visit, params, batch)
        loss, sums = require_loss(self.method, name, result, local.get("tracked", {}))
        if loss.ndim:
            raise MethodError(
                f"{self.method.name}: {name} must return a single number, not {tuple(loss.shape)}: average over the "
                "examples with losses.masked_mean(values, batch['mask'])",
                key=name,
            )
        return loss, sums

    def _annotate_batch(self, shared: Tree, local: Tree, batch: Tree, each: Each) -> Tree:
        with self._of_batch(batch, each):
            return self.hooks.annotate(shared, local, batch["x"], batch["y"])

    @contextmanager
    def _of_batch(self, batch: Tree, each: Each) -> Iterator[None]:
        """Let BatchNorm leave out the padding of this batch, which one client does not have, and key its dropout.

        All passes of a step have the same draws: they are gradients of one function of the weights.
        """
        padded = each is not call_one
        statistics = real_examples(batch["mask"], padded) if self.task.mixes_examples else nullcontext()
        with statistics, keyed(batch["dropout_key"]) if "dropout_key" in batch else nullcontext():
            yield

    def _combined(self, gradients: Tree, params: Tree, shared: Tree, facts: Tree, local: Tree) -> Tree:
        """Return one gradient of one client, given those of all passes."""
        visit = self._in_step("combine_gradients", shared, facts, local)
        grads = self.method.combine_gradients(visit, params, gradients)
        if grads.keys() != self.trained(params).keys():
            raise MethodError(
                f"{self.method.name}: combine_gradients must return one gradient, with the names of the weights, "
                f"not {', '.join(grads)}",
                key="combine_gradients",
            )
        return grads

    def _corrected(self, grads: Tree, params: Tree, shared: Tree, facts: Tree, local: Tree) -> Tree:
        """Correct and clip the gradient of one client."""
        if self.method.corrects:
            grads = self.method.correct(self._in_step("correct", shared, facts, local), params, grads)
        if self.clip_norm is not None:
            norm = tree.dot(grads, grads).sqrt()
            grads = tree.scale(grads, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return grads

    def _in_step(self, hook: str, shared: Tree, facts: Tree, local: Tree) -> Visit:
        return Visit(hook, self.task, shared, facts=facts, local=local)
