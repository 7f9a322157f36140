"""Local training: the step in which a client's weights change, and the whole visit of one client.

The step is written once for both engines. `each` decides for how many clients at a time: `call_one` for one client,
`map_clients` over a leading client axis. The gradient of the *sum* of the clients' losses is every client's own
gradient, so one level of `vmap` and ordinary autograd are enough.

A `Visit` is built inside the mapped function: `vmap` takes trees, not objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util import counter_random
from fedkeep._util.batch_norm import real_examples
from fedkeep._util.dropout import keyed
from fedkeep._util.rng import seeded
from fedkeep.data.augment import InputPipeline
from fedkeep.data.plan import ClientPlan
from fedkeep.data.texts import Texts
from fedkeep.engine import device
from fedkeep.engine.batch_parts import weighted_parts
from fedkeep.engine.client_hooks import (
    at_stage,
    require_loss,
    require_pair,
    require_selection,
    require_weight_names,
    require_whole_batches,
    with_own_sums,
)
from fedkeep.engine.gpu.images import gather
from fedkeep.engine.mapping import Each, call_one
from fedkeep.engine.refine import refine_one
from fedkeep.errors import MethodError
from fedkeep.method import Batch, FedAvg, Visit
from fedkeep.task import Task
from fedkeep.tree import Tree

REHEARSED_AT_ONCE = 256  # examples: the hook may compute gradients, which takes more memory than notes


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

        `gradients` may compute what `losses_and_gradients` does in another way, with the same result.
        """
        trees = {"params": params, "batch": batch, "shared": shared, "facts": facts, "local": local}
        losses, grads, sums = gradients(trees) if gradients is not None else self.losses_and_gradients(trees, each)
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

    @functools.cached_property
    def _frozen(self) -> frozenset[str]:
        return require_weight_names(self.method, self.task)

    def trained(self, params: Tree) -> Tree:
        """Return those of the weights that are not frozen."""
        return {name: w for name, w in params.items() if name not in self._frozen} if self._frozen else params

    def losses_and_gradients(self, trees: Tree, each: Each) -> tuple[Tensor, Tree, Tree]:
        """Return every client's loss, the gradient for its optimiser (combined, corrected, clipped) and its sums."""
        params, batch, shared, facts, local = (trees[key] for key in ("params", "batch", "shared", "facts", "local"))
        method = self.method
        several = len(method.passes) > 1
        changed = several or method.uses("correct") or self.clip_norm is not None
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
            gradients[name] = self.task.accelerator.as_tensors(gradient) if changed else gradient
        grads = gradients if several else gradients["loss"]
        with torch.no_grad():
            if changed:
                grads = each(
                    lambda g, w, f, loc: self._final_gradient(g, w, shared, f, loc), grads, params, facts, local
                )
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
            batch = _LazyNotes(batch, lambda: self.annotate(shared, local, batch["x"], batch["y"]))
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
            return self.annotate(shared, local, batch["x"], batch["y"])

    @contextmanager
    def _of_batch(self, batch: Tree, each: Each) -> Iterator[None]:
        """Let BatchNorm leave out the padding of this batch, which one client does not have, and key its dropout.

        All passes of a step have the same draws: they are gradients of one function of the weights.
        """
        padded = each is not call_one
        statistics = real_examples(batch["mask"], padded) if self.task.mixes_examples else nullcontext()
        with statistics, keyed(batch["dropout_key"]) if "dropout_key" in batch else nullcontext():
            yield

    def _final_gradient(self, grads: Tree, params: Tree, shared: Tree, facts: Tree, local: Tree) -> Tree:
        """Combine the passes' gradients of one client, correct and clip."""
        if len(self.method.passes) > 1:
            visit = self._in_step("combine_gradients", shared, facts, local)
            grads = self.method.combine_gradients(visit, params, grads)
            if grads.keys() != self.trained(params).keys():
                raise MethodError(
                    f"{self.method.name}: combine_gradients must return one gradient, with the names of the weights, "
                    f"not {', '.join(grads)}",
                    key="combine_gradients",
                )
        grads = self.method.correct(self._in_step("correct", shared, facts, local), params, grads)
        if self.clip_norm is not None:
            norm = tree.dot(grads, grads).sqrt()
            grads = tree.scale(grads, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return grads

    def _in_step(self, hook: str, shared: Tree, facts: Tree, local: Tree) -> Visit:
        return Visit(hook, self.task, shared, facts=facts, local=local)

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
                    notes = self.annotate_all(shared, local, x, y, torch.arange(len(y), device=y.device))
                with at_stage(method, "select_examples"):
                    selected = self.selected_examples(shared, facts, local, x, y, plan.noise, notes)
                with at_stage(method, "rehearse"):
                    rehearsed = self.rehearse_all(shared, local, x, y, torch.arange(len(y), device=y.device))
            state, losses = task.optimizer.init(self.trained(params)), []
            with at_stage(method, "local training"):
                for s, size in enumerate(plan.size):
                    at = index[s, :size]
                    batch = {**take(at, tree.take(augment, (s, slice(size)))), **selected}
                    if self.annotates_once:
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
        batch = _LazyNotes(batch, lambda: self.annotate(shared, local, batch["x"], batch["y"]))
        visit = self._in_step("measure", shared, facts, local)
        return tree.detach(self.method.measure(visit, params, cast(Batch, batch)))

    # Notes, selected and rehearsed examples, random numbers

    def noise(self, seed: Tensor, step: int | Tensor, examples: int) -> Tensor:
        """Return the random numbers of a step, for the seed of one client or those of several."""
        precise = torch.promote_types(self.task.dtype, torch.float32)
        return counter_random.uniform(seed, step, examples, self.method.noise_size, precise)

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
        """Call a hook with all of a client's own examples, `size` at a time."""
        return tree.cat([hook(gather(x, at, self.inputs), y[at]) for at in torch.split(own, size)])

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
        visit = self._in_step("select_examples", shared, facts, local)
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
