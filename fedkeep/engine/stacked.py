"""Stacked: the cohort's weights on a leading client axis, one vectorised step for all clients.

Clients are sorted longest first, so that those still training are always a prefix: no client takes a padded step.
Within a step, batches of unequal size are padded and masked. On a GPU the steps are replayed from CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import tree
from fedkeep.engine.gpu.graphs import Graphs
from fedkeep.engine.local import ClientJob, ClientResult, LocalTraining, at_stage
from fedkeep.engine.mapping import Each, map_clients, one_stream_each
from fedkeep.engine.stacked_plan import StackedPlan
from fedkeep.tree import Tree


class Stacked:
    """Trains a cohort in one vectorised step per local step.

    `each` is how a function is mapped over the clients: `vmapped` by vmap, `layers.mapped` by vmap with our own
    kernels, `unrolled` one by one on streams of their own, for modules that vmap cannot take.
    """

    name = "stacked"

    def __init__(self, local: LocalTraining, x: Any, y: Tensor, each: Each = map_clients) -> None:
        self.local, self.x, self.y, self.each = local, x, y, each
        self.graphs = Graphs(self._step, local.task) if y.device.type == "cuda" else None

    def train(self, shared: Tree, jobs: Sequence[ClientJob], lr: float) -> ClientResult:
        """Train every client of the cohort; the leaves of what returns are stacked in the order of the jobs."""
        order = sorted(range(len(jobs)), key=lambda k: -jobs[k].plan.steps)
        result = self._train_sorted(shared, [jobs[k] for k in order], lr)
        back = torch.from_numpy(np.argsort(order)).to(self.y.device)
        params, upload, client = (tree.take(part, back) for part in result[:3])
        return ClientResult(params, upload, client, result.losses[:, back])

    def _train_sorted(self, shared: Tree, jobs: Sequence[ClientJob], lr: float) -> ClientResult:
        local, method, task = self.local, self.local.method, self.local.task
        cohort = StackedPlan(jobs, self.y.device)
        client = tree.stack([job.client for job in jobs])
        facts = local.facts([job.plan for job in jobs], np.stack([job.counts for job in jobs]), lr)
        with torch.no_grad(), at_stage(method, "prepare"):
            mine = map_clients(lambda c, f: method.prepare(task, shared, c, f), client, facts)
            params = map_clients(lambda c, f: method.start(shared, c), client, facts)
            notes = self._notes(shared, mine, cohort)
            held = {
                "shared": shared,
                "local": mine,
                "drawn": self._drawn(shared, mine, facts, cohort, notes),
                "params": tree.map(torch.clone, params),
                "state": map_clients(task.optimizer.init, params),
                "notes": notes if local.notes_once else {},
                "plan": cohort.plan,
                "losses": torch.zeros(cohort.plan["at"].shape[:2], dtype=task.dtype, device=self.y.device),
            }
        with at_stage(method, "local training"):
            if self.graphs:
                held = self.graphs.run(held, cohort.live, lr)
            else:
                for s, active in enumerate(cohort.live):
                    self._step(held, s, active, active, lr)
        params, losses = held["params"], held["losses"][: len(cohort.live)]
        measured = self._measure(params, shared, mine, cohort) if method.uses("measure") else {}
        with torch.no_grad(), at_stage(method, "finish"):
            upload, client = map_clients(
                lambda w, loc, c, f, m: method.finish(shared, w, loc, c, f, m), params, mine, client, facts, measured
            )
        return ClientResult(params, upload, client, losses)

    def _step(self, held: Tree, s: int | Tensor, active: int, sure: int, lr: float | Tensor) -> None:
        """Take step s with the first `active` clients, in place; from `sure` on they may have finished before."""
        local = self.local
        running = {part: held[part] for part in ("params", "state", "local", "drawn")}
        if active < held["losses"].shape[1]:
            running = tree.take(running, slice(active))
        plan = tree.map(lambda t: _row(t, s, active), held["plan"])
        batch = {**self._batch(plan, plan["augment"]), **running["drawn"]}
        if local.notes_once:
            batch["note"] = tree.take(held["notes"], plan["place"])
        unsure: Tree = {}
        if sure < active:
            unsure = tree.take({part: running[part] for part in ("params", "state")}, slice(sure, active))
        before = tree.map(torch.clone, unsure)
        losses = local.step(
            running["params"], running["state"], batch, held["shared"], running["local"], lr, each=self.each
        )
        if before:
            live = plan["mask"].any(1)
            losses = torch.where(live, losses, 0)

            def keep(new: Tensor, old: Tensor) -> None:
                new.copy_(torch.where(live[sure:].reshape(-1, *[1] * (new.ndim - 1)), new, old))

            tree.map(keep, unsure, before)
        if isinstance(s, int):
            held["losses"][s, :active] = losses
        else:
            held["losses"][:, :active].index_copy_(0, s, losses[None])

    def _batch(self, plan: Tree, augment: Tree | None) -> Tree:
        """Gather a step's examples: x, y, mask, with leading axes [active, B]."""
        at = plan["at"]
        drawn = tree.map(lambda t: t.reshape(-1), augment) if augment else None
        x = self.local.inputs(tree.take(self.x, at.reshape(-1)), drawn)
        x = tree.map(lambda t: t.reshape(*at.shape, *t.shape[1:]), x)
        return {"x": x, "y": self.y[at], "mask": plan["mask"]}

    def _notes(self, shared: Tree, mine: Tree, cohort: StackedPlan) -> Tree:
        """Annotate the cohort's examples, client after client; all at once where no client says anything of its own."""
        if not mine:
            return self.local.notes_of(shared, mine, self.x, self.y, cohort.examples)
        parts = [
            self.local.notes_of(shared, tree.take(mine, k), self.x, self.y, own) for k, own in enumerate(cohort.own)
        ]
        return tree.cat(parts)

    def _drawn(self, shared: Tree, mine: Tree, facts: Tree, cohort: StackedPlan, notes: Tree) -> Tree:
        """Let every client name its examples, over a padded axis of examples."""
        local, method, task = self.local, self.local.method, self.local.task
        if not method.uses("draw"):
            return {}
        pad = nn.utils.rnn.pad_sequence
        y = pad([self.y[own] for own in cohort.own], batch_first=True)
        valid, noise = cohort.valid_and_noise()
        padded = tree.map(lambda t: pad(list(torch.split(t, cohort.sizes)), batch_first=True), notes)
        named = map_clients(
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
        at = cohort.examples[index + cohort.start[:, None]]
        inputs = local.inputs(tree.take(self.x, at.reshape(-1)))
        inputs = tree.map(lambda t: t.reshape(*at.shape, *t.shape[1:]), inputs)
        each = one_stream_each if self.each is one_stream_each else map_clients
        note = each(lambda loc, x, y: local.note(shared, loc, x, y), mine, inputs, self.y[at])
        return {"drawn": {"x": inputs, "y": self.y[at], "weight": weight, "note": note}}

    def _measure(self, params: Tree, shared: Tree, mine: Tree, cohort: StackedPlan) -> Tree:
        """Sum the method's measurements over one unaugmented pass of every client."""
        local = self.local
        total: Tree = {}
        for s in range(cohort.per_epoch[0]):
            active = int(np.searchsorted(-cohort.per_epoch, -s, side="left"))
            batch = self._batch(tree.take(cohort.plan, (s, slice(active))), augment=None)
            width = batch["mask"].shape[1]
            batch["place"] = (torch.arange(width, device=self.y.device) + s * width).expand(active, width)
            with at_stage(local.method, "measure"):
                sums = map_clients(
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


def _row(t: Tensor, s: int | Tensor, active: int) -> Tensor:
    """Take step s of the first clients from [S, K, ...]; a step counter on the device is never read by the host."""
    return t[s, :active] if isinstance(s, int) else t[:, :active].index_select(0, s)[0]


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
