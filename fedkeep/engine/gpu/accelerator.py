"""The accelerator of a task on a GPU: our own kernels, and CUDA graphs of steps outside of local training."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from fedkeep._util import counter_random
from fedkeep._util.rng import random_state
from fedkeep.engine.gpu import graphs, layers, products, updates
from fedkeep.engine.gpu.kernels import has_triton
from fedkeep.optim import Optimizer
from fedkeep.task import Accelerator
from fedkeep.tree import Tree

Step = Callable[[], None]


class GpuAccelerator(Accelerator):
    """Computes models by our own kernels, and replays steps from CUDA graphs.

    Graphs are captured again in every round, since a round has new tensors. All of them share one memory pool, so what
    one needs for intermediate results serves the next. This is safe because they run one after another and every
    result that outlives a step is in a tensor from outside the graph.
    """

    queues = True

    def __init__(self, device: torch.device) -> None:
        self.device, self.works = device, True
        self.kernels = False  # whether models are computed by our own kernels
        self._newest: torch.cuda.CUDAGraph | None = None  # keeps the pool: torch frees one whose graphs are all deleted

    def call(self, model: Callable[[], Any]) -> Any:
        """Call a model, with our own kernels if the engine has chosen them."""
        return layers.use_kernels(model) if self.kernels else model()

    def drop(self, x: torch.Tensor, key: torch.Tensor, stream: int, p: float, batch: int | None) -> torch.Tensor:
        """Return x after dropout; by our own kernel, which draws the same, if there is Triton."""
        drop = layers.drop if has_triton(self.device) else counter_random.drop
        return drop(x, key, stream, p, batch)

    def as_tensors(self, grads: Tree) -> Tree:
        """Return gradients as plain tensors."""
        return products.multiply_out(grads)

    def centred(self, grads: Tree, names: AbstractSet[str], each: Callable[..., Tree]) -> Tree:
        """Return gradients, the named ones without their means; products stay products."""
        mine = {name: g for name, g in grads.items() if name in names and isinstance(g, products.Product)}
        others = super().centred(grads, names - mine.keys(), each) if len(mine) < len(names) else grads
        return {**others, **{name: g.centred() for name, g in mine.items()}}

    def update_(self, optimizer: Optimizer, grads: Tree, state: Tree, params: Tree, lr: float | torch.Tensor) -> None:
        """Update weights and the optimiser's state in place."""
        if self.kernels:
            updates.update_(optimizer, grads, state, params, lr)
        else:
            optimizer.update_(grads, state, params, lr)

    def capture(self, step: Step) -> Step:
        """Return a function that repeats a step: the first call calls it, the second captures it, others replay it."""
        return _Repeated(step, self)

    def record(self, step: Step) -> Step | None:
        """Return a function that replays what a step computes, or None if it cannot be captured. Nothing is computed.

        Only the first capture frees memory for the pool; the others find there what the graphs before them used.
        """
        if not self.works:
            return None
        pool = None if self._newest is None else self._newest.pool()
        try:
            graph = graphs.capture(step, "a step on the server", self.device, pool, free_memory=pool is None)
        except torch.OutOfMemoryError:
            if pool is None:
                raise
            graph = graphs.capture(step, "a step on the server", self.device, pool)
        if graph is None:
            self.works = False
            return None
        self._newest = graph
        return graph.replay


class _Repeated:
    """A step that is called, then captured, then replayed.

    The first call is the trial that a capture needs: it loads kernels, and shows whether the step draws random numbers
    (dropout). Such a step is never captured, because a replay would not draw what a call draws.
    """

    def __init__(self, step: Step, accelerator: GpuAccelerator) -> None:
        self.step, self.accelerator = step, accelerator
        self.tried = False
        self.repeat: Step | None = None

    def __call__(self) -> None:
        if not self.tried:
            before = self._random_states()
            self.step()
            self.tried = True
            if not all(map(torch.equal, before, self._random_states())):
                self.repeat = self.step
            return
        if self.repeat is None:
            self.repeat = self.accelerator.record(self.step) or self.step
        self.repeat()

    def _random_states(self) -> list[torch.Tensor]:
        return [random_state(device) for device in (torch.device("cpu"), self.accelerator.device)]
