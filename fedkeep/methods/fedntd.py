"""FedNTD. Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022, eq. 10-11 and algorithm 1.

Where the paper leaves a choice:

- The factor tau^2 of eq. 3 is kept in eq. 11 (both agree at the default tau = 1).
- Clients are averaged by n_k (eq. 2), not uniformly (algorithm 1).
- Section 4.1 says learning rate 0.1, appendix B.3 says 0.01: take 0.01 for its experiments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedkeep.losses import masked_mean, not_true_kl
from fedkeep.method import FedAvg, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedNTD(FedAvg):
    """FedNTD: distil the global model into local training, but only over the classes that are not the true one."""

    name: ClassVar[str] = "fedntd"
    paper: ClassVar[str] = "Lee et al., NeurIPS 2022"
    beta: float = hyper(1.0, "weight of not-true distillation", low=0, neutral=0.0, other=0.3)
    tau: float = hyper(1.0, "temperature of both softmaxes", above=0, other=3.0)

    def annotate(self, task: Task, shared: Tree, local: Tree, x: Any, y: Tensor) -> Tree:
        """Note the global model's logits z_g."""
        return {"z_g": task.apply(shared["params"], x)}

    def loss(self, task: Task, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tensor:
        """Return the mean of CE(z, y) + beta tau^2 KL(q_g || q_l), the softmaxes over the not-true classes."""
        z, y = task.apply(params, batch["x"], train=True), batch["y"]
        distilled = not_true_kl(z, batch["note"]["z_g"], y, self.tau)
        return masked_mean(task.criterion(z, y) + self.beta * distilled, batch["mask"])
