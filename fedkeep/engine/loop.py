"""The loop engine: one client after another. The reference, and the choice for large models on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep import tree
from fedkeep.engine.client_hooks import at_stage
from fedkeep.engine.local import ClientJob, ClientResult, LocalTraining
from fedkeep.tree import Tree


@dataclass
class Loop:
    """Trains a cohort client by client. With `wire`, every message goes through bytes, as in a federation."""

    local: LocalTraining
    x: Any
    y: Tensor
    wire: bool = False
    name = "loop"

    def train(self, shared: Tree, jobs: Sequence[ClientJob], lr: float) -> ClientResult:
        """Train every client of the cohort; the results are stacked in the order of the jobs."""
        results = []
        for job in jobs:
            at = torch.from_numpy(job.examples).to(self.y.device)
            received, sent, client = self._send(shared), self._send(job.sent), self._send(job.client)
            with at_stage(self.local.method, "the visit", job.id):
                x, y = tree.take(self.x, at), self.y[at]
                result = self.local.train_one(received, client, x, y, job.plan, lr, sent)
            results.append(result._replace(upload=self._send(result.upload), client=self._send(result.client)))
        params, uploads, clients, losses = zip(*results, strict=True)
        padded = nn.utils.rnn.pad_sequence(list(losses))
        return ClientResult(tree.stack(params), tree.stack(uploads), tree.stack(clients), padded)

    def _send(self, message: Tree) -> Tree:
        return tree.to(tree.from_bytes(tree.to_bytes(message)), self.y.device) if self.wire else message
