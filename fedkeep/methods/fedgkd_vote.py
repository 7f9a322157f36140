"""FedGKD-VOTE. Yao et al., "Local-Global Knowledge Distillation in Heterogeneous Federated Learning with Non-IID
Data", 2021 (arXiv:2107.00051), eq. 5, algorithm 1 and "Parameter setting" in section 5.1.

Choices and deviations: docs/methods/fedgkd_vote.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep import server_training, tree
from fedkeep.losses import kl, masked_mean
from fedkeep.method import Batch, Cohort, FedAvg, Note, Params, ServerTree, Shared, Visit, hyper
from fedkeep.methods._model_buffer import empty_buffer, push
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedGKDVote(FedAvg):
    """FedGKD-VOTE: distil each of the last M global models, weighted by its loss on the server's validation data."""

    name: ClassVar[str] = "fedgkd_vote"
    title: ClassVar[str] = "FedGKD-VOTE"
    paper: ClassVar[str] = "Yao et al., arXiv 2021"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    lam: float = hyper(
        0.1,
        "weight of distillation, divided among the M models",
        search=(0.01, 1.0),
        low=0,
        fedavg_at=0.0,
        test_value=1.0,
    )
    M: int = hyper(5, "number of past global models", search=(1, 10), low=1, whole=True, test_value=1)
    b: float = hyper(0.0, "temperature of the vote; 0 stands for 1/M, the paper's value", low=0, test_value=2.0)

    def annotate(self, visit: Visit, x: Any, y: Tensor) -> Note:
        """Note the M teachers' logits, [B, M, C]."""
        shared = visit.shared
        models = [shared["params"], *(tree.take(shared["older"], m) for m in range(self.M - 1))]
        return {"z_m": torch.stack([visit.task.apply(w, x) for w in models], 1)}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of CE + sum_m gamma_m/2 KL(h(w_m) || h(w))."""
        z = visit.task.apply(params, batch["x"], train=True)
        distance = (visit.shared["gamma"] / 2 * kl(z[:, None], batch["note"]["z_m"])).sum(-1)
        return masked_mean(visit.task.criterion(z, batch["y"]) + distance, batch["mask"])

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with an empty buffer; raise without validation examples."""
        server_training.require_public(task, self.name, validation=True)
        buffer = empty_buffer(task, params, self.M)
        return {"params": params, **buffer, "losses": torch.zeros_like(buffer["filled"])}

    def broadcast(self, server: ServerTree) -> Shared:
        """Send the M models (the newest is "params") and their gammas: 0 for empty slots."""
        filled = server["filled"]
        votes = torch.where(filled > 0, -server["losses"] / (self.b or 1 / self.M), -torch.inf).softmax(0)
        shared = {"params": server["params"], "gamma": 2 * self.lam * torch.where(filled > 0, votes, 0)}
        if self.M > 1:
            shared["older"] = tree.take(server["buffer"], slice(1, None))
        return shared

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average, add the average to the buffer, and measure its loss."""
        params = tree.mean(uploads["params"], uploads["n"])
        newest = server_training.validation_loss(task, params, server_training.require_public(task, self.name))
        losses = torch.cat([newest[None], server["losses"][:-1]])
        return {"params": params, **push(server, params), "losses": losses}
