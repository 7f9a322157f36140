"""CUDA graphs: a local step is captured once and replayed, so that the host launches one thing per step.

A graph reads and writes fixed places in memory. So all that a round's training touches is held in buffers that stay
where they are, and every round is copied into them. The plan lies on the device, and a counter there, advanced by the
graph itself, says which step is due.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.task import Task
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

_GROWING = ("notes", "plan", "losses")  # their leading axis follows the clients' sizes, and changes with the round
_STACKS = 4  # numbers of clients for which buffers are kept


class Graphs:
    """Runs the steps of stacked training from captured graphs.

    `step(held, s, active, sure, lr)` takes one step with the first `active` clients. Graphs exist for a few numbers of
    clients only; where fewer are still training, the last ones of a graph are computed for nothing and left as they
    were.
    """

    def __init__(self, step: Callable[..., None], task: Task) -> None:
        self.step, self.task = step, task
        self.stacks: dict[int, _Buffers] = {}
        self.works = True

    def run(self, held: Tree, live: Sequence[int], lr: float) -> Tree:
        """Take one step for every entry of `live`, the number of clients then training; return where it all lies."""
        if not self.works:
            return self._eagerly(held, live, lr)
        clients = len(tree.leaves(held["params"])[0])
        buffers = self.stacks.pop(clients, None)
        if buffers is None or not buffers.takes(held):
            buffers = _Buffers(held, self.task)
        self.stacks[clients] = buffers  # the last used comes last
        while len(self.stacks) > _STACKS:
            del self.stacks[next(iter(self.stacks))]
        buffers.load(held, lr)
        sizes = graph_sizes(clients)
        for number in live:
            active = min(size for size in sizes if size >= number)
            sure = active if number == active else max([size for size in sizes if size < active], default=0)
            graph = buffers.graphs.get((active, sure))
            if graph is None:
                graph = self._capture(buffers, active, sure)
                if graph is None:
                    return self._eagerly(held, live, lr)
                buffers.graphs[active, sure] = graph
            graph.replay()
        return buffers.held

    def _eagerly(self, held: Tree, live: Sequence[int], lr: float) -> Tree:
        for s, active in enumerate(live):
            self.step(held, s, active, active, lr)
        return held

    def _capture(self, buffers: _Buffers, active: int, sure: int) -> torch.cuda.CUDAGraph | None:
        """Capture one step. Trial steps come first, as capturing wants it; what they changed is put back."""

        def step() -> None:
            self.step(buffers.held, buffers.s, active, sure, buffers.lr)
            buffers.s += 1

        changed = {"s": buffers.s, **{part: buffers.held[part] for part in ("params", "state", "losses")}}
        before = tree.map(torch.clone, changed)
        aside = torch.cuda.Stream(self.task.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self.task.device))
        with torch.cuda.stream(aside):
            for _ in range(2):
                buffers.s.zero_()
                step()
        torch.cuda.current_stream(self.task.device).wait_stream(aside)
        tree.copy_(changed, before)
        graph = torch.cuda.CUDAGraph()
        try:
            with _nothing_collected(), torch.cuda.graph(graph, pool=buffers.pool):
                step()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.works = False
            log.warning(
                "local steps are launched one operation at a time, because they cannot be captured as a CUDA graph: %s",
                str(error).splitlines()[0],
            )
            return None
        buffers.pool = graph.pool()
        return graph


class _Buffers:
    """Memory that stays in place for cohorts of one size, and the graphs that work on it."""

    def __init__(self, held: Tree, task: Task) -> None:
        self.held = {
            part: tree.map(_roomy if part in _GROWING else torch.clone, inside) for part, inside in held.items()
        }
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.pool: Any = None  # of memory, shared by these graphs; torch refuses one whose graphs are all gone
        self.s = torch.zeros(1, dtype=torch.int64, device=task.device)
        self.lr = torch.zeros((), dtype=torch.promote_types(task.dtype, torch.float32), device=task.device)

    def takes(self, held: Tree) -> bool:
        """Say whether a round fits into the buffers."""
        mine, theirs = dict(tree.items(self.held)), dict(tree.items(held))
        return mine.keys() == theirs.keys() and all(
            mine[path].dtype == t.dtype
            and mine[path].shape[1:] == t.shape[1:]
            and (mine[path].shape[:1] >= t.shape[:1] if _grows(path) else mine[path].shape[:1] == t.shape[:1])
            for path, t in theirs.items()
        )

    def load(self, held: Tree, lr: float) -> None:
        """Copy a round in."""
        mine = dict(tree.items(self.held))
        for path, t in tree.items(held):
            (mine[path][: len(t)] if _grows(path) else mine[path]).copy_(t)
        self.s.zero_()
        self.lr.fill_(lr)


def graph_sizes(clients: int) -> list[int]:
    """List the few numbers of clients for which a graph is captured: steps of a quarter less, down to one.

    >>> ladder(10)
    [10, 7, 5, 3, 2, 1]
    """
    sizes = [clients]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] * 3 // 4)
    return sizes


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep Python from collecting garbage: to free another run's graphs would break the capture of this one."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _grows(path: str) -> bool:
    return path.split("/")[0] in _GROWING


def _roomy(t: Tensor) -> Tensor:
    """Make a buffer like t, its leading axis rounded up to a power of two."""
    return t.new_zeros(max(4, 1 << (len(t) - 1).bit_length()), *t.shape[1:])
