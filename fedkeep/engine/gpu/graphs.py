"""CUDA graphs of the local training step: captured once and replayed, so that a step costs one launch.

A graph reads and writes fixed addresses. All tensors of a round's training are therefore copied into buffers that stay
allocated from round to round. The plan of the round is among them, and so is a step counter, which the graph itself
advances.
"""

from __future__ import annotations

import functools
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

_VARIABLE_LENGTH = ("notes", "rehearsed", "plan", "losses")  # their leading axes have another length in every round
_MAX_COHORT_SIZES = 4  # buffers stay allocated for this many numbers of clients


class Graphs:
    """Runs the steps of stacked training from captured graphs.

    `step(buffers, s, n_computed, n_certainly_live, width, lr)` computes step s for the first `n_computed` clients, in
    place. Clients from `n_certainly_live` on may have finished, and the step leaves those that have unchanged. `width`
    is that of a batch of texts, of which there are few, or None. Graphs are captured for a few numbers of clients only
    (`graph_sizes`), so a step may compute more clients than still train.
    """

    def __init__(self, step: Callable[..., None], task: Task) -> None:
        self.step, self.task = step, task
        self.static: dict[int, _StaticBuffers] = {}  # by the number of clients, the most recently used last
        self.works = True

    def run(self, buffers: Tree, live: Sequence[int], widths: Sequence[int | None], lr: float) -> Tree:
        """Take one step per entry of `live`, the number of clients still training; return the trained buffers."""
        if not self.works:
            return self._run_without_graphs(buffers, live, widths, lr)
        n_clients = len(tree.leaves(buffers["params"])[0])
        static = self.static.pop(n_clients, None)
        if static is None or not static.fits(buffers):
            static = _StaticBuffers(buffers, self.task)
        self.static[n_clients] = static
        while len(self.static) > _MAX_COHORT_SIZES:
            del self.static[next(iter(self.static))]
        static.load(buffers, lr)
        sizes = graph_sizes(n_clients)
        for n_live, width in zip(live, widths, strict=True):
            n_computed = min(size for size in sizes if size >= n_live)
            smaller = max([size for size in sizes if size < n_computed], default=0)
            n_certainly_live = n_computed if n_live == n_computed else smaller
            graph = static.graphs.get((n_computed, n_certainly_live, width))
            if graph is None:
                graph = self._capture(static, n_computed, n_certainly_live, width)
                if graph is None:
                    return self._run_without_graphs(buffers, live, widths, lr)
                static.graphs[n_computed, n_certainly_live, width] = graph
            graph.replay()
        return static.buffers

    def _run_without_graphs(self, buffers: Tree, live: Sequence[int], widths: Sequence[int | None], lr: float) -> Tree:
        for s, (n_live, width) in enumerate(zip(live, widths, strict=True)):
            self.step(buffers, s, n_live, n_live, width, lr)
        return buffers

    def _capture(
        self, static: _StaticBuffers, n_computed: int, n_certainly_live: int, width: int | None
    ) -> torch.cuda.CUDAGraph | None:
        """Capture one step; return None where that fails.

        Capturing needs a few warm-up steps before it. The values that they change are restored.
        """

        def step() -> None:
            self.step(static.buffers, static.s, n_computed, n_certainly_live, width, static.lr)
            static.s += 1

        changed = {"s": static.s, "tracked": static.buffers["local"].get("tracked", {})}
        changed.update({part: static.buffers[part] for part in ("params", "state", "losses")})
        before = tree.map(torch.clone, changed)
        side_stream = torch.cuda.Stream(self.task.device)  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream(self.task.device))
        with torch.cuda.stream(side_stream):
            for _ in range(2):
                static.s.zero_()
                step()
        torch.cuda.current_stream(self.task.device).wait_stream(side_stream)
        tree.copy_(changed, before)
        graph = capture(step, "the local training step", self.task.device, static.pool)
        if graph is None:
            self.works = False
        else:
            static.pool = graph.pool()
        return graph


def capture(
    step: Callable[[], None], what: str, device: torch.device, pool: Any, free_memory: bool = True
) -> torch.cuda.CUDAGraph | None:
    """Capture what a step launches, without computing it; where that fails, log a warning and return None.

    `free_memory` first returns torch's unused memory to the device, for a pool that has to grow. It takes much longer
    than the capture of a short step.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with _garbage_collection_disabled(collect=free_memory):
            torch.cuda.synchronize(device)
            if free_memory:
                torch.cuda.empty_cache()
            with torch.cuda.stream(_capture_stream(device)):
                graph.capture_begin(pool=pool)
                try:
                    step()
                finally:
                    graph.capture_end()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        log.warning(
            "%s cannot be captured as a CUDA graph, so its operations are launched one by one, which is slower: %s",
            what,
            str(error).splitlines()[0],
        )
        return None
    return graph


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _StaticBuffers:
    """Buffers at fixed addresses for cohorts of one size, and the graphs that read and write them."""

    def __init__(self, buffers: Tree, task: Task) -> None:
        self.buffers = {
            part: tree.map(_padded_buffer if part in _VARIABLE_LENGTH else torch.clone, inside)
            for part, inside in buffers.items()
        }
        # by (n_computed, n_certainly_live, width)
        self.graphs: dict[tuple[int, int, int | None], torch.cuda.CUDAGraph] = {}
        self.pool: Any = None  # memory pool that these graphs share; torch rejects a pool whose graphs are all deleted
        self.s = torch.zeros(1, dtype=torch.int64, device=task.device)
        self.lr = torch.zeros((), dtype=torch.promote_types(task.dtype, torch.float32), device=task.device)

    def fits(self, buffers: Tree) -> bool:
        """Return whether the tensors of a round fit into these buffers."""
        mine, theirs = dict(tree.items(self.buffers)), dict(tree.items(buffers))
        return mine.keys() == theirs.keys() and all(
            mine[path].dtype == t.dtype
            and mine[path].shape[1:] == t.shape[1:]
            and (mine[path].shape[:1] >= t.shape[:1] if _varies(path) else mine[path].shape[:1] == t.shape[:1])
            for path, t in theirs.items()
        )

    def load(self, buffers: Tree, lr: float) -> None:
        """Copy the tensors of a round into these buffers, and reset the step counter."""
        mine = dict(tree.items(self.buffers))
        for path, t in tree.items(buffers):
            (mine[path][: len(t)] if _varies(path) else mine[path]).copy_(t)
        self.s.zero_()
        self.lr.fill_(lr)


def graph_sizes(n_clients: int) -> list[int]:
    """List the numbers of clients for which a graph is captured: each a quarter less than the one before, down to one.

    >>> graph_sizes(10)
    [10, 7, 5, 3, 2, 1]
    """
    sizes = [n_clients]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] * 3 // 4)
    return sizes


@contextmanager
def _garbage_collection_disabled(collect: bool) -> Iterator[None]:
    """Disable garbage collection: if it freed another run's graphs during a capture, the capture would fail."""
    enabled = gc.isenabled()
    if collect:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _varies(path: str) -> bool:
    return path.split("/")[0] in _VARIABLE_LENGTH


def _padded_buffer(t: Tensor) -> Tensor:
    """Return a buffer of zeros like t, its leading axis rounded up to a power of two, at least 4."""
    return t.new_zeros(max(4, 1 << (len(t) - 1).bit_length()), *t.shape[1:])
