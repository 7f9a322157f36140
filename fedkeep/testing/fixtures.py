"""Objects that the checks train with: a random network, a single step, an engine like that of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import tree
from fedkeep.engine.client_hooks import with_own_sums
from fedkeep.engine.gpu.graphs import graph_sizes
from fedkeep.engine.local import ClientJob
from fedkeep.engine.simulation import Simulation
from fedkeep.engine.stacked import Stacked
from fedkeep.method import Batch, Visit
from fedkeep.tree import Tree


class SurplusClients:
    """Replays steps as CUDA graphs do: for a few numbers of clients only, so that finished clients are computed too."""

    def __init__(self, engine: Stacked) -> None:
        self.engine = engine

    def run(self, buffers: Tree, live: Iterable[int], widths: Iterable[int | None], lr: float) -> Tree:
        """Take one step for every entry of `live`, in place."""
        sizes = graph_sizes(len(tree.leaves(buffers["params"])[0]))
        for s, (number, width) in enumerate(zip(live, widths, strict=True)):
            computed = min(size for size in sizes if size >= number)
            certain = computed if number == computed else 0
            self.engine._step(buffers, torch.tensor([s]), computed, certain, width, lr)
        return buffers


def one_step(sim: Simulation, pad: int) -> Tree:
    """Return one refinement, one step and one measurement on a batch of 4 real examples and `pad` padded ones."""
    local = sim.local
    shared, facts, prepared, batch = _one_batch(sim, pad)
    params = tree.map(torch.clone, shared["params"])
    loss = local.step(params, sim.task.optimizer.init(local.trained(params)), batch, shared, facts, prepared, 0.1)
    batch["position"] = torch.arange(4 + pad)
    measured = local.measure(params, batch, shared, facts, prepared) if sim.method.uses("measure") else {}
    return {"params": params, "loss": loss, "measured": measured, "local": prepared}


def changed_in_a_step(sim: Simulation) -> dict[str, list[str]]:
    """Return, for each hook of a step that a method uses, the leaves of its arguments that it wrote into."""
    method = sim.method
    shared, facts, prepared, batch = _one_batch(sim, pad=0)
    params = tree.map(torch.clone, shared["params"])
    grads = tree.map(torch.clone, sim.local.trained(params))
    by_pass = {name: tree.map(torch.clone, grads) for name in method.passes}
    arguments: dict[str, tuple[Tree, ...]] = {
        **dict.fromkeys(method.passes, (params, batch)),
        "gradient_point": (params, by_pass),
        "combine_gradients": (params, by_pass),
        "correct": (params, grads),
    }
    changed = {}
    for hook, given in arguments.items():
        named = {"shared": shared, "local": prepared, **{str(k): one for k, one in enumerate(given)}}
        before = tree.map(torch.clone, named)
        with torch.no_grad():
            getattr(method, hook)(Visit(hook, sim.task, shared, facts=facts, local=prepared), *given)
        changed[hook] = _changed_leaves(before, named)
    return changed


def corrected(sim: Simulation) -> tuple[Tree, Tree]:
    """Return gradients of one client, and what `correct` makes of them."""
    shared, facts, prepared, _ = _one_batch(sim, pad=0)
    params = tree.map(torch.clone, shared["params"])
    grads = tree.map(torch.clone, sim.local.trained(params))
    with torch.no_grad():
        visit = Visit("correct", sim.task, shared, facts=facts, local=prepared)
        return grads, sim.method.correct(visit, params, tree.map(torch.clone, grads))


def changed_by_the_server(sim: Simulation) -> dict[str, list[str]]:
    """Return, for each server hook before training, the leaves of its arguments that it wrote into."""
    method, task, params = sim.method, sim.task, tree.map(torch.clone, sim.task.init)
    server = tree.map(torch.clone, sim.server)
    calls: dict[str, tuple[Tree, Callable[[], object]]] = {
        "init_server": ({"params": params}, lambda: method.init_server(task, params)),
        "init_client": ({"params": params}, lambda: method.init_client(task, params)),
        "broadcast": (server, lambda: method.broadcast(server)),
        "broadcast_to": (server, lambda: method.broadcast_to(server, 0)),
    }
    changed = {}
    for hook, (given, call) in calls.items():
        before = tree.map(torch.clone, given)
        call()
        changed[hook] = _changed_leaves(before, given)
    return changed


def _changed_leaves(before: Tree, after: Tree) -> list[str]:
    """Return the paths of the leaves that differ, are missing or are new, without the name of the argument."""
    old, new = dict(tree.items(before)), dict(tree.items(after))
    differ = [path for path in old | new if path not in old or path not in new or not torch.equal(old[path], new[path])]
    return [path.partition("/")[2] or path for path in differ]


def _one_batch(sim: Simulation, pad: int) -> tuple[Tree, Tree, Tree, Tree]:
    """Return shared, facts, local and a batch of 4 real examples and `pad` padded ones."""
    local, method = sim.local, sim.method
    shared, job = method.broadcast(sim.server), sim.job(5, 1)
    x, y = tree.take(local.inputs(sim.x), slice(8)), sim.y[:8]
    counts = np.bincount(y[:4].numpy(), minlength=sim.task.n_classes)
    facts = tree.take(local.facts([job.plan], counts[None], 0.1), 0)
    with torch.no_grad():
        prepared = with_own_sums(local_of(sim, shared, job, facts, x, y, 4, pad))
        notes = local.hooks.annotate(shared, prepared, x, y)
        own = tree.take(sim.x, slice(8))
        selected = local.hooks.selected_examples(shared, facts, prepared, own, y, np.linspace(0, 1, 8), notes)
        rehearsed = local.hooks.rehearse_all(shared, prepared, own, y, torch.arange(7, -1, -1))
    batch = {"x": tree.take(x, slice(4 + pad)), "y": y[: 4 + pad], "mask": torch.arange(4 + pad) < 4, **selected}
    if method.uses("annotate"):
        batch["note"] = tree.take(notes, slice(4 + pad))
    if method.noise_size:
        batch["noise"] = local.noise(torch.tensor(job.plan.noise_seed), 0, 4 + pad)
    if rehearsed:
        batch["rehearsed"] = tree.take(rehearsed, slice(4 + pad))
    return shared, facts, prepared, batch


def local_of(sim: Simulation, shared: Tree, job: ClientJob, facts: Tree, x: Any, y: Tensor, n: int, pad: int) -> Tree:
    """Return what `prepare` returns, refined by a batch of n real and some padded examples."""
    method, task = sim.method, sim.task
    local = method.prepare(Visit("prepare", task, shared, job.client, facts, sent=job.sent))
    if not method.uses("refine"):
        return local
    places, some = torch.arange(n + pad), slice(n + pad)
    batch: Batch = {"x": tree.take(x, some), "y": y[some], "mask": places < n, "position": places}
    return method.refine(Visit("refine", task, shared, job.client, facts, local, job.sent), batch)


class WithDropout(nn.Module):
    """A network whose output is random in training mode."""

    last_stage = ("body",)

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body, self.out = nn.Linear(16, 32), nn.Linear(32, 4)

    def features(self, x: Tensor) -> Tensor:
        """Return what the classifier gets."""
        return nn.functional.dropout(self.body(x.flatten(1)).relu(), 0.5, self.training)

    def head(self, h: Tensor) -> Tensor:
        """Return the logits."""
        return self.out(h)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.features(x))
