"""Training of a cohort in chunks, as many clients at a time as settings and memory allow."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedkeep.engine.choose import choose_engine
from fedkeep.engine.local import ClientJob, ClientResult, LocalTraining
from fedkeep.engine.loop import Loop
from fedkeep.engine.settings import Settings
from fedkeep.engine.stacked import Stacked
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")


class Trainer:
    """The engine with the training data on its device. Training changes no state of the federation.

    `shared` is what the server sends in the first round to all clients, `sent` to one of them; the engine is chosen by
    a trial step with both.
    """

    def __init__(self, local: LocalTraining, x: Any, y: Tensor, shared: Tree, settings: Settings, sent: Tree) -> None:
        self.local, self.x, self.y, self._shared, self._sent = local, x, y, shared, sent
        self._tf32, self._at_once, self._rounds = settings.tf32, settings.at_once, settings.rounds
        self.engine = self._choose(settings.engine)

    def train(
        self, shared: Tree, jobs: Sequence[ClientJob], lr: float
    ) -> Iterator[tuple[Sequence[ClientJob], ClientResult]]:
        """Train the clients; yield them chunk by chunk. An engine may reuse a chunk's memory for the next."""
        while jobs:
            size = -(-len(jobs) // -(-len(jobs) // (self._at_once or len(jobs))))  # chunks of about the same size
            try:
                result = self.engine.train(shared, jobs[:size], lr)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                self._at_once = size // 2
                log.warning("%d clients at a time do not fit into memory: at most %d from now on", size, self._at_once)
                self.engine = self._choose(self.engine.name)
                torch.cuda.empty_cache()
                continue
            yield jobs[:size], result
            jobs = jobs[size:]

    def plan_ahead(self, jobs: Sequence[ClientJob]) -> None:
        """Let the engine prepare the jobs of the next round, which have no client states yet."""
        if isinstance(self.engine, Stacked) and (self._at_once is None or len(jobs) <= self._at_once):
            self.engine.plan_ahead(jobs)

    def _choose(self, name: str) -> Loop | Stacked:
        return choose_engine(name, self._tf32, self.local, self.x, self.y, self._shared, self._rounds, self._sent)
