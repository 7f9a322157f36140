"""FedGKD-VOTE. Yao et al., "Local-Global Knowledge Distillation in Heterogeneous Federated Learning with Non-IID
Data", arXiv:2107.00051, eq. 5, algorithm 1 and "Parameter setting" in section 5.1.

Where the paper leaves a choice, or contradicts itself:

- gamma_m / 2 = lam softmax_m(-L_m / b) over the models that are there; `b` is the paper's beta, 1/M unless given.
- L_m is the loss of model m on the *validation* part of the server's public set, computed once, when the model is
  made. The paper takes 10% of the training data for it, so table 1's "no proxy data" does not hold for VOTE.
- No distillation in round 1 and w_0 is never buffered, as in `fedgkd`.
- Table 3 gives 72.99 for CIFAR-10, alpha 0.1, M = 5; table 8 gives 72.41 for the same.
- The released code computes this loss under `no_grad`, so that nothing is distilled; here it has its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep import server_training, tree
from fedkeep.errors import MethodError
from fedkeep.losses import kl, masked_mean
from fedkeep.method import Cohort, FedAvg, hyper
from fedkeep.methods.fedgkd import empty_buffer, push
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedGKDVote(FedAvg):
    """FedGKD-VOTE: distil the last M global models one by one, the better ones on the server's data the more."""

    name: ClassVar[str] = "fedgkd_vote"
    paper: ClassVar[str] = "Yao et al., arXiv 2021"
    lam: float = hyper(0.1, "weight of distillation, shared out among the M models", low=0, neutral=0.0, other=1.0)
    M: int = hyper(5, "number of past global models", low=1, whole=True, other=1)
    b: float = hyper(0.0, "temperature of the vote; 0 stands for 1/M, the paper's value", low=0, other=2.0)

    def init_server(self, task: Task, params: Tree) -> Tree:
        """Start with an empty buffer; refuse without validation examples."""
        if task.public is None or not len(task.public.y_val):
            raise MethodError(
                "fedgkd_vote weighs past models by their loss on the server's validation examples, and there are none: "
                'give the data a public part, as in load("cifar10", public=0.1, validation=0.25)'
            )
        buffer = empty_buffer(task, params, self.M)
        return {"params": params, **buffer, "losses": torch.zeros_like(buffer["filled"])}

    def broadcast(self, server: Tree) -> Tree:
        """Send the M models (the newest is "params") and their gammas: 0 for empty slots."""
        filled = server["filled"]
        votes = torch.where(filled > 0, -server["losses"] / (self.b or 1 / self.M), -torch.inf).softmax(0)
        shared = {"params": server["params"], "gamma": 2 * self.lam * torch.where(filled > 0, votes, 0)}
        if self.M > 1:
            shared["older"] = tree.take(server["buffer"], slice(1, None))
        return shared

    def annotate(self, task: Task, shared: Tree, local: Tree, x: Any, y: Tensor) -> Tree:
        """Note the M teachers' logits, [B, M, C]."""
        models = [shared["params"], *(tree.take(shared["older"], m) for m in range(self.M - 1))]
        return {"z_m": torch.stack([task.apply(w, x) for w in models], 1)}

    def loss(self, task: Task, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tensor:
        """Return the mean of CE + sum_m gamma_m/2 KL(h(w_m) || h(w))."""
        z = task.apply(params, batch["x"], train=True)
        far = (shared["gamma"] / 2 * kl(z[:, None], batch["note"]["z_m"])).sum(-1)
        return masked_mean(task.criterion(z, batch["y"]) + far, batch["mask"])

    def aggregate(self, task: Task, server: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """Average, buffer the average, and measure its loss."""
        params = tree.mean(uploads["params"], uploads["n"])
        newest = server_training.validation_loss(task, params, server_training.require_public(task, self.name))
        losses = torch.cat([newest[None], server["losses"][:-1]])
        return {"params": params, **push(server, params), "losses": losses}
