"""The stacked engine: the cohort's weights on a leading client axis, one vectorised step for all clients.

Clients are sorted longest first, so that those still training are always a prefix: no client takes a padded step.
Within a step, batches of unequal size are padded and masked. On a GPU the steps are replayed from CUDA graphs, on a CPU
from recordings.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import tree
from fedkeep.data.texts import Texts
from fedkeep.engine.client_hooks import at_stage, require_pair, require_selection, with_own_sums
from fedkeep.engine.gpu.graphs import Graphs
from fedkeep.engine.gpu.images import gather
from fedkeep.engine.local import ClientJob, ClientResult, LocalTraining
from fedkeep.engine.mapping import Each, map_clients, one_stream_each
from fedkeep.engine.refine import refine_stack
from fedkeep.engine.replay import Replay
from fedkeep.engine.stacked_plan import StackedPlan, TextWidths
from fedkeep.method import Visit
from fedkeep.tree import Tree


class Stacked:
    """Trains a cohort in one vectorised step per local step.

    `each` maps a function over the clients: `map_clients` by vmap, `vmap_with_kernels` by vmap with our own kernels, or
    `one_stream_each`, one client after another, for modules that vmap does not support. `rounds` is the length of the
    run: in a long one, steps on a CPU are recorded and replayed.
    """

    name = "stacked"

    def __init__(self, local: LocalTraining, x: Any, y: Tensor, each: Each = map_clients, rounds: int = 1) -> None:
        self.local, self.x, self.y, self.each = local, x, y, each
        self.graphs = Graphs(self._step, local.task) if y.device.type == "cuda" else None
        self._ahead: StackedPlan | None = None  # of the next cohort
        self._texts = TextWidths(x) if isinstance(x, Texts) else None
        self.replay: Replay | None = None
        if y.device.type == "cpu" and each is map_clients:
            compute = functools.partial(local.gradients.compute, each=each)
            self.replay = Replay(compute, local.task.n_weights, rounds, local.trained)

    def train(self, shared: Tree, jobs: Sequence[ClientJob], lr: float) -> ClientResult:
        """Train every client of the cohort; the results are stacked in the order of the jobs."""
        order = _longest_first(jobs)
        result = self._train_sorted(shared, [jobs[k] for k in order], lr)
        back = torch.from_numpy(np.argsort(order)).to(self.y.device, non_blocking=True)  # the host does not wait
        taken: dict[tuple[Any, ...], Tensor] = {}  # by place in memory: an upload often holds the local model

        def take(t: Tensor) -> Tensor:
            key = (t.data_ptr(), t.shape, t.stride(), t.dtype)
            if key not in taken:
                taken[key] = t[back]
            return taken[key]

        params, upload, client = (tree.map(take, part) for part in result[:3])
        return ClientResult(params, upload, client, result.losses[:, back])

    def plan_ahead(self, jobs: Sequence[ClientJob]) -> None:
        """Copy the plans of the next cohort to the device while it is busy."""
        if self.graphs and jobs:
            self._ahead = self._plan([jobs[k] for k in _longest_first(jobs)])

    def _plan(self, jobs: Sequence[ClientJob]) -> StackedPlan:
        may_drop, rehearses = self.local.task.may_drop, self.local.method.uses("rehearse")
        return StackedPlan(jobs, self.y.device, may_drop, rehearses, self._texts)

    def _train_sorted(self, shared: Tree, jobs: Sequence[ClientJob], lr: float) -> ClientResult:
        method, task = self.local.method, self.local.task
        plan, self._ahead = self._ahead, None
        if plan is None or not plan.is_of(jobs):
            plan = self._plan(jobs)
        client, sent = tree.stack([job.client for job in jobs]), tree.stack([job.sent for job in jobs])
        facts = self.local.facts([job.plan for job in jobs], np.stack([job.counts for job in jobs]), lr)
        with torch.no_grad():
            with at_stage(method, "prepare"):
                local: Tree = {}
                if method.uses("prepare"):
                    local = map_clients(
                        lambda c, f, s: method.prepare(Visit("prepare", task, shared, c, f, sent=s)),
                        client,
                        facts,
                        sent,
                    )
            if method.uses("refine"):
                with at_stage(method, "refine"):
                    parts = {"shared": shared, "sent": sent, "client": client, "facts": facts, "local": local}
                    each = self._each_without_kernels
                    gather = functools.partial(self._batch, augment=None, width=plan.widest)
                    local = refine_stack(method, task, each, parts, plan, gather)
            local = with_own_sums(local)
            with at_stage(method, "start"):
                if method.uses("start"):
                    params = map_clients(
                        lambda c, f, loc, s: method.start(Visit("start", task, shared, c, f, loc, s)),
                        client,
                        facts,
                        local,
                        sent,
                    )
                else:
                    params = tree.map(lambda w: w.expand(len(jobs), *w.shape), shared["params"])
            with at_stage(method, "annotate"):
                notes = self._notes(shared, local, plan)
            with at_stage(method, "select_examples"):
                selected = self._selected(shared, facts, local, plan, notes)
            with at_stage(method, "rehearse"):
                rehearsed = self._client_by_client(self.local.hooks.rehearse_all, shared, local, plan)
            buffers = {
                "shared": shared,
                "facts": facts,
                "local": local,
                "selected": selected,
                "params": tree.map(torch.clone, params),
                "state": map_clients(task.optimizer.init, self.local.trained(params)),
                "notes": notes if self.local.hooks.annotates_once else {},
                "rehearsed": rehearsed,
                "plan": plan.steps_on_device,
                "noise_seed": plan.noise_seeds() if method.noise_size else {},
                "losses": torch.zeros(plan.steps_on_device["at"].shape[:2], dtype=task.dtype, device=self.y.device),
            }
        with at_stage(method, "local training"):
            if self.graphs:
                buffers = self.graphs.run(buffers, plan.live, plan.widths, lr)
            else:
                if self.replay:
                    self.replay.expect(plan.live)
                for s, (active, width) in enumerate(zip(plan.live, plan.widths, strict=True)):
                    self._step(buffers, s, active, active, width, lr)
        params, local, losses = buffers["params"], buffers["local"], buffers["losses"][: len(plan.live)]
        measured = self._measure(params, shared, facts, local, plan) if method.uses("measure") else {}
        with torch.no_grad(), at_stage(method, "finish"):
            upload, client = map_clients(
                lambda w, c, f, loc, s, m: require_pair(
                    method,
                    "finish",
                    "(upload, state)",
                    method.finish(Visit("finish", task, shared, c, f, loc, s), w, m),
                ),
                params,
                client,
                facts,
                local,
                sent,
                measured,
            )
        return ClientResult(params, upload, client, losses)

    def _step(
        self,
        buffers: Tree,
        s: int | Tensor,
        n_computed: int,
        n_certainly_live: int,
        width: int | None,
        lr: float | Tensor,
    ) -> None:
        """Take step s with the first clients, in place; `width` is that of a batch of texts.

        The first `n_certainly_live` of them still train. The others, up to `n_computed`, are computed too, but those
        that finished earlier keep their weights.
        """
        running = {part: buffers[part] for part in ("params", "state", "facts", "local", "selected", "noise_seed")}
        if n_computed < buffers["losses"].shape[1]:
            running = tree.take(running, slice(n_computed))
        plan = tree.map(lambda t: _row(t, s, n_computed), buffers["plan"])
        batch = {**self._batch(plan, plan["augment"], width), **running["selected"]}
        if self.local.hooks.annotates_once:
            batch["note"] = tree.take(buffers["notes"], plan["place"])
        if "dropout_key" in plan:
            batch["dropout_key"] = plan["dropout_key"]
        if buffers["rehearsed"]:
            batch["rehearsed"] = tree.take(buffers["rehearsed"], plan["rehearsal"])
        if self.local.method.noise_size:
            batch["noise"] = self.local.noise(running["noise_seed"], s, plan["at"].shape[-1])
        uncertain: Tree = {}
        if n_certainly_live < n_computed:
            changing = {"tracked": running["local"].get("tracked", {}), **{k: running[k] for k in ("params", "state")}}
            uncertain = tree.take(changing, slice(n_certainly_live, n_computed))
        before = tree.map(torch.clone, uncertain)
        losses = self.local.step(
            running["params"],
            running["state"],
            batch,
            buffers["shared"],
            running["facts"],
            running["local"],
            lr,
            each=self.each,
            gradients=self.replay,
        )
        if before:
            live = plan["mask"].any(1)
            losses = torch.where(live, losses, 0)

            def keep(new: Tensor, old: Tensor) -> None:
                new.copy_(torch.where(live[n_certainly_live:].reshape(-1, *[1] * (new.ndim - 1)), new, old))

            tree.map(keep, uncertain, before)
        if isinstance(s, int):
            buffers["losses"][s, :n_computed] = losses
        else:
            buffers["losses"][:, :n_computed].index_copy_(0, s, losses[None])

    @property
    def _each_without_kernels(self) -> Each:
        """The mapping for hooks that call the model outside of a step."""
        return one_stream_each if self.each is one_stream_each else map_clients

    def _batch(self, plan: Tree, augment: Tree | None, width: int | None) -> Tree:
        """Gather a step's examples: x, y, mask, with leading axes [clients, B]."""
        at = plan["at"]
        drawn = tree.map(lambda t: t.reshape(-1), augment) if augment else None
        return {"x": self._inputs(at, drawn, width), "y": self.y[at], "mask": plan["mask"]}

    def _inputs(self, at: Tensor, drawn: Tree | None = None, width: int | None = None) -> Any:
        """Return the examples at these positions, [clients, n], as model inputs [clients, n, ...]."""
        x = gather(self.x, at.reshape(-1), self.local.inputs, drawn, width)
        return tree.map(lambda t: t.reshape(*at.shape, *t.shape[1:]), x)

    def _notes(self, shared: Tree, local: Tree, plan: StackedPlan) -> Tree:
        """Annotate the cohort's examples: client by client, or all at once if `prepare` returns nothing."""
        if local and self.graphs and self.each is not one_stream_each:
            return self._notes_of_stack(shared, local, plan)
        return self._client_by_client(self.local.hooks.annotate_all, shared, local, plan)

    def _client_by_client(self, hook: Callable[..., Tree], shared: Tree, local: Tree, plan: StackedPlan) -> Tree:
        """Call a hook with all examples of every client; of all clients at once if `prepare` returns nothing."""
        if not local:
            return hook(shared, local, self.x, self.y, plan.examples)
        parts = [hook(shared, tree.take(local, k), self.x, self.y, own) for k, own in enumerate(plan.own)]
        return tree.cat(parts)

    def _notes_of_stack(self, shared: Tree, local: Tree, plan: StackedPlan) -> Tree:
        """Annotate the examples of all clients together, over a padded axis: a GPU has room for several clients."""
        if not self.local.hooks.annotates:
            return {}
        longest, clients = max(plan.sizes), len(plan.sizes)
        place = torch.arange(longest, device=self.y.device)
        at = plan.examples[plan.start[:, None] + torch.minimum(place, plan.last[:, None])]
        size = max(1, self.local.hooks.annotation_batch_size(self.x, self.y.device) // clients)
        parts = [
            self.each(
                lambda loc, x, y: self.local.hooks.annotate(shared, loc, x, y), local, self._inputs(own), self.y[own]
            )
            for own in torch.split(at, size, dim=1)
        ]
        notes = tree.map(lambda *ts: torch.cat(ts, dim=1), *parts)
        return tree.map(lambda t: torch.cat([row[:n] for row, n in zip(t, plan.sizes, strict=True)]), notes)

    def _selected(self, shared: Tree, facts: Tree, local: Tree, plan: StackedPlan, notes: Tree) -> Tree:
        """Let every client select its examples, over a padded axis of examples."""
        method, task = self.local.method, self.local.task
        if not method.uses("select_examples"):
            return {}
        pad = nn.utils.rnn.pad_sequence
        y = pad([self.y[own] for own in plan.own], batch_first=True)
        valid, noise = plan.valid_and_noise()
        padded = tree.map(lambda t: pad(list(torch.split(t, plan.sizes)), batch_first=True), notes)
        choice = map_clients(
            lambda f, loc, y, v, u, n: method.select_examples(
                Visit("select_examples", task, shared, facts=f, local=loc), y, v, u, n
            ),
            facts,
            local,
            y,
            valid,
            noise.to(task.dtype),
            padded,
        )
        if choice is None:
            return {}
        index, weight = require_selection(method, choice)
        own = index.clamp(max=plan.last[:, None])  # padded places have weight 0; the last own example stands in
        at = plan.examples[own + plan.start[:, None]]
        inputs = self._inputs(at)
        note = self._each_without_kernels(
            lambda loc, x, y: self.local.hooks.annotate(shared, loc, x, y), local, inputs, self.y[at]
        )
        return {"selected": {"x": inputs, "y": self.y[at], "weight": weight, "note": note}}

    def _measure(self, params: Tree, shared: Tree, facts: Tree, local: Tree, plan: StackedPlan) -> Tree:
        """Sum the method's measurements over one unaugmented pass of every client."""
        task, device = self.local.task, self.y.device
        batches, clients = plan.one_pass()
        width = batches["at"].shape[-1]
        total: Tree = {}
        counter = torch.zeros(1, dtype=torch.int64, device=device)

        def measured(active: int) -> Tree:
            """Measure the next batch of the first clients."""
            row = tree.map(lambda t: _row(t, counter, active), batches)
            batch = self._batch(row, None, plan.widest)
            batch["position"] = (torch.arange(width, device=device) + counter * width).expand(active, width)
            return self._each_without_kernels(  # type: ignore[no-any-return]
                lambda w, b, f, loc: self.local.measure(w, b, shared, f, loc),
                *(tree.take(part, slice(active)) for part in (params, batch, facts, local)),
            )

        def add(active: int) -> None:
            tree.map(lambda t, part: t[:active].add_(part), total, measured(active))
            counter.add_(1)

        with at_stage(self.local.method, "measure"):
            total = tree.map(torch.clone, measured(clients[0]))
            counter.add_(1)
            for active, group in itertools.groupby(clients[1:]):
                step = task.accelerator.capture(functools.partial(add, active))
                for _ in group:
                    step()
        return total


def _longest_first(jobs: Sequence[ClientJob]) -> list[int]:
    """Return the jobs' order: the most steps first; among equals, those with a dropped batch, which is measured."""
    return sorted(range(len(jobs)), key=lambda k: (-jobs[k].plan.steps, not len(jobs[k].plan.dropped)))


def _row(t: Tensor, s: int | Tensor, clients: int) -> Tensor:
    """Take step s of the first clients from [S, K, ...]; the host never reads a step counter on the device."""
    return t[s, :clients] if isinstance(s, int) else t[:, :clients].index_select(0, s)[0]
