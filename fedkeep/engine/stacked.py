"""Stacked: the cohort's weights on a leading client axis, one vectorised step for all clients.

Clients are sorted longest first, so that those still training are always a prefix: no client takes a padded step.
Within a step, batches of unequal size are padded and masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import tree
from fedkeep.engine.local import Job, Local, Trained, at_stage, stacked
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class Stacked:
    """Trains a cohort in one vectorised step per local step."""

    local: Local
    x: Any
    y: Tensor
    name = "stacked"

    def train(self, shared: Tree, jobs: Sequence[Job], lr: float) -> Trained:
        """Train every client of the cohort; the leaves of what returns are stacked in the order of the jobs."""
        order = sorted(range(len(jobs)), key=lambda k: -jobs[k].plan.steps)
        result = self._train_sorted(shared, [jobs[k] for k in order], lr)
        back = np.argsort(order)
        at = torch.from_numpy(back).to(self.y.device)
        params, upload, client = (tree.take(part, at) for part in result[:3])
        return Trained(params, upload, client, [result.losses[k] for k in back])

    def _train_sorted(self, shared: Tree, jobs: Sequence[Job], lr: float) -> Trained:
        local, method, task = self.local, self.local.method, self.local.task
        cohort = _Batches(self, jobs)
        client = tree.stack([job.client for job in jobs])
        with torch.no_grad(), at_stage(method, "prepare"):
            facts = tree.stack(
                [local.facts(job.plan, counts, lr) for job, counts in zip(jobs, cohort.counts, strict=True)]
            )
            mine = stacked(lambda c, f: method.prepare(task, shared, c, f), client, facts)
            params = stacked(lambda c, f: method.start(shared, c), client, facts)
            notes = [
                local.notes_of(shared, tree.take(mine, k), self.x, self.y, own) for k, own in enumerate(cohort.own)
            ]
            constant = self._drawn(shared, mine, facts, cohort, notes)
            flat_notes = tree.cat(notes)
        state = stacked(task.optimizer.init, params)
        active, tails, losses = len(jobs), [], []
        with at_stage(method, "local training"):
            running = {"params": params, "state": state, "mine": mine, "constant": constant}
            for s in range(cohort.steps[0]):
                still = int(np.searchsorted(-cohort.steps, -s, side="left"))
                if still < active:
                    tails.append(tree.take(running["params"], slice(still, active)))
                    running, active = tree.take(running, slice(still)), still
                batch = {**cohort.batch(s, active, augment=True), **running["constant"]}
                if local.notes_once:
                    batch["note"] = tree.take(flat_notes, cohort.flat(s, active))
                running["params"], running["state"], value = local.step(
                    running["params"], running["state"], batch, shared, running["mine"], lr, each=stacked
                )
                losses.append(value)
            params = tree.cat([running["params"], *reversed(tails)])
        measured = self._measure(params, shared, mine, cohort) if method.uses("measure") else {}
        with torch.no_grad(), at_stage(method, "finish"):
            upload, client = stacked(
                lambda w, loc, c, f, m: method.finish(shared, w, loc, c, f, m),
                params,
                mine,
                client,
                facts,
                measured,
            )
        per_client = [torch.stack([losses[s][k] for s in range(n)]) for k, n in enumerate(cohort.steps)]
        return Trained(params, upload, client, per_client)

    def _drawn(self, shared: Tree, mine: Tree, facts: Tree, cohort: _Batches, notes: list[Tree]) -> Tree:
        """Let every client name its examples, over a padded axis of examples."""
        local, method, task = self.local, self.local.method, self.local.task
        if not method.uses("draw"):
            return {}
        y, valid, noise = cohort.padded_labels()
        padded = tree.map(lambda *ts: nn.utils.rnn.pad_sequence(list(ts), batch_first=True), *notes)
        named = stacked(
            lambda f, y, v, u, n: method.draw(task, shared, f, y, v, u, n),
            facts,
            y,
            valid,
            noise.to(task.dtype),
            padded,
        )
        if named is None:
            return {}
        index, weight = named
        at = cohort.examples_at(index)
        labels = self.y[at]
        inputs = local.inputs(tree.take(self.x, at.reshape(-1)))
        inputs = tree.map(lambda t: t.reshape(*at.shape, *t.shape[1:]), inputs)
        note = stacked(lambda loc, x, y: local.note(shared, loc, x, y), mine, inputs, labels)
        return {"drawn": {"x": inputs, "y": labels, "weight": weight, "note": note}}

    def _measure(self, params: Tree, shared: Tree, mine: Tree, cohort: _Batches) -> Tree:
        """Sum the method's measurements over one unaugmented pass of every client."""
        local = self.local
        total: Tree = {}
        for s in range(cohort.per_epoch[0]):
            active = int(np.searchsorted(-cohort.per_epoch, -s, side="left"))
            batch = cohort.batch(s, active, augment=False)
            width = batch["mask"].shape[1]
            batch["place"] = (torch.arange(width, device=self.y.device) + s * width).expand(active, width)
            with at_stage(local.method, "measure"):
                sums = stacked(
                    lambda w, b, loc: local.measure(w, b, shared, loc),
                    tree.take(params, slice(active)),
                    batch,
                    tree.take(mine, slice(active)),
                )
            if s == 0:
                total = sums
            else:
                total = tree.map(lambda t, part: torch.cat([t[: len(part)] + part, t[len(part) :]]), total, sums)
        return total


class _Batches:
    """The plans of a cohort sorted longest first, laid out on the device as [K, S, B]."""

    def __init__(self, engine: Stacked, jobs: Sequence[Job]) -> None:
        self.engine, self.jobs, device = engine, jobs, engine.y.device
        self.steps = np.array([job.plan.steps for job in jobs])
        self.per_epoch = np.array([job.plan.per_epoch for job in jobs])
        width = max(job.plan.index.shape[1] for job in jobs)
        shape = (len(jobs), int(self.steps[0]), width)
        place, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
        augment = {key: np.zeros(shape, dtype=np.int64) for key in jobs[0].plan.augment}
        for k, job in enumerate(jobs):
            s, b = job.plan.index.shape
            place[k, :s, :b], mask[k, :s, :b] = job.plan.index, job.plan.mask
            for key, value in job.plan.augment.items():
                augment[key][k, :s, :b] = value
        sizes = [len(job.examples) for job in jobs]
        self.examples = torch.from_numpy(np.concatenate([job.examples for job in jobs])).to(device)
        self.own = torch.split(self.examples, sizes)  # every client's examples in the training data
        self.start = torch.from_numpy(np.cumsum([0, *sizes[:-1]])).to(device)
        self.place, self.mask = torch.from_numpy(place).to(device), torch.from_numpy(mask).to(device)
        self.augment = tree.map(lambda a: torch.from_numpy(a).to(device), augment)
        classes = engine.local.task.n_classes
        self.counts = [torch.bincount(engine.y[own], minlength=classes).cpu().numpy() for own in self.own]

    def flat(self, s: int, active: int) -> Tensor:
        """[active, B] places of a step's examples in the cohort's concatenation."""
        return self.place[:active, s] + self.start[:active, None]

    def examples_at(self, place: Tensor) -> Tensor:
        """Turn places among each client's own examples, [K, D], into places in the training data."""
        return self.examples[place + self.start[:, None]]

    def batch(self, s: int, active: int, augment: bool) -> Tree:
        """Step s of the first clients: x, y, mask, with leading axes [active, B]."""
        at = self.examples[self.flat(s, active)]
        flat = at.reshape(-1)
        drawn = tree.map(lambda t: t[:active, s].reshape(-1), self.augment) if augment else None
        x = self.engine.local.inputs(tree.take(self.engine.x, flat), drawn)
        return {
            "x": tree.map(lambda t: t.reshape(*at.shape, *t.shape[1:]), x),
            "y": self.engine.y[at],
            "mask": self.mask[:active, s],
        }

    def padded_labels(self) -> tuple[Tensor, Tensor, Tensor]:
        """Labels, validity and noise of every client's examples, [K, longest]."""
        pad = nn.utils.rnn.pad_sequence
        labels = [self.engine.y[own] for own in self.own]
        noise = [torch.from_numpy(job.plan.noise).to(self.place.device) for job in self.jobs]
        valid = [torch.ones(len(one), dtype=torch.bool, device=one.device) for one in labels]
        return tuple(pad(ts, batch_first=True) for ts in (labels, valid, noise))  # type: ignore[return-value]


def unstackable(task: Task, x: Any) -> str | None:
    """Try one stacked forward and backward pass on a few examples; return what stopped it, or None."""
    reached: list[str] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, name=name: reached.append(f"{name} ({type(module).__name__})")
        )
        for name, module in task._train.named_modules()
        if not any(module.children())
    ]
    two = tree.map(lambda w: torch.stack([w, w]).requires_grad_(), task.init)
    try:
        with torch.enable_grad():
            logits = stacked(lambda w: task.apply(w, x, train=True), two)
            torch.autograd.grad(logits.sum(), tree.leaves(two), materialize_grads=True)
        stacked(lambda w: task.apply(w, x), tree.detach(two))
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200]
        return f"{reached[-1] if reached else type(task._train).__name__}: {reason}"
    finally:
        for hook in hooks:
            hook.remove()
    return None
