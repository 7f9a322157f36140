"""Objects that the checks train with: a random network, a single step, an engine like that of a GPU."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import tree
from fedkeep.engine.gpu.graphs import graph_sizes
from fedkeep.engine.simulation import Simulation
from fedkeep.engine.stacked import Stacked
from fedkeep.method import Visit
from fedkeep.tree import Tree


class SurplusClients:
    """Replays steps as CUDA graphs do: for a few numbers of clients only, so that finished clients are computed too."""

    def __init__(self, engine: Stacked) -> None:
        self.engine = engine

    def run(self, buffers: Tree, live: Iterable[int], lr: float) -> Tree:
        """Take one step for every entry of `live`, in place."""
        sizes = graph_sizes(len(tree.leaves(buffers["params"])[0]))
        for s, number in enumerate(live):
            computed = min(size for size in sizes if size >= number)
            self.engine._step(buffers, torch.tensor([s]), computed, 0 if number < computed else computed, lr)
        return buffers


def one_step(sim: Simulation, pad: int) -> Tree:
    """Return one step and one measurement on a batch of 4 real examples and `pad` padded ones."""
    local, method = sim.local, sim.method
    shared, job = method.broadcast(sim.server), sim.job(5, 1)
    x, y = tree.take(local.inputs(sim.x), slice(8)), sim.y[:8]
    counts = np.bincount(y[:4].numpy(), minlength=sim.task.n_classes)
    facts = tree.take(local.facts([job.plan], counts[None], 0.1), 0)
    with torch.no_grad():
        prepared = method.prepare(Visit("prepare", sim.task, shared, job.client, facts))
        notes = local.annotate(shared, prepared, x, y)
        noise = np.linspace(0, 1, 8)
        selected = local.selected_examples(shared, facts, prepared, sim.x[:8], y, noise, notes)
    batch = {"x": tree.take(x, slice(4 + pad)), "y": y[: 4 + pad], "mask": torch.arange(4 + pad) < 4, **selected}
    params = tree.map(torch.clone, shared["params"])
    loss = local.step(params, sim.task.optimizer.init(params), batch, shared, facts, prepared, 0.1)
    batch["position"] = torch.arange(4 + pad)
    measured = local.measure(params, batch, shared, facts, prepared) if method.uses("measure") else {}
    return {"params": params, "loss": loss, "measured": measured}


class WithDropout(nn.Module):
    """A network whose output is random in training mode."""

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
