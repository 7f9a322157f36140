"""FedNTD. Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022, eq. 10-11 and algorithm 1; its ablations: KD to NTD (eq. 17-18, table 12), MSE (appendix L, table 14).

Where the paper leaves a choice, or contradicts itself:

- The factor tau^2 of eq. 3 is kept in eq. 11, and in KD (they agree at the default tau = 1).
- Clients are averaged by n_k (eq. 2), not uniformly (algorithm 1).
- Section 4.1 says learning rate 0.1, appendix B.3 says 0.01: take 0.01 for its experiments.
- Plain KD (`lam = 0`) is CE + beta tau^2 KL over all classes: eq. 17 at lambda = 0, "KD" in table 12 and figure 11.
  Eq. 3 writes (1 - beta) CE + beta tau^2 KL, which has no CE left at beta = 1; up to the scale of the loss it is this
  one with beta / (1 - beta). Eq. 17 has no beta: here it stands before L(lambda), at 1 by default.
- Table 12 gives 54.9 for NTD at alpha = 0.1, tables 1 and 7 give 54.42.
- MSE is the mean over the C-1 not-true logits, without tau (appendix L gives no formula). Table 14: it fails at
  beta = 0.3, so lower beta with it (0.05 was its best).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedkeep.errors import MethodError
from fedkeep.losses import kl, masked_mean, mse, not_true
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
    lam: float = hyper(1.0, "from plain distillation (0) to not-true distillation (1)", low=0, high=1, other=0.0)
    distance: str = hyper("kl", "between logits: KL divergence or MSE", choices=("kl", "mse"), other="mse")

    def init_server(self, task: Task, params: Tree) -> Tree:
        """Refuse two classes, where a softmax over the one that is not true teaches nothing."""
        if task.n_classes < 3 and self.beta and self.lam and self.distance == "kl":
            raise MethodError(f"fedntd needs at least three classes, not {task.n_classes}: with two it is just FedAvg")
        return super().init_server(task, params)

    def annotate(self, task: Task, shared: Tree, local: Tree, x: Any, y: Tensor) -> Tree:
        """Note the global model's logits z_g."""
        return {"z_g": task.apply(shared["params"], x)}

    def loss(self, task: Task, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tensor:
        """Return the mean of CE(z, y) + beta tau^2 KL(q_g || q_l), the softmaxes over the not-true classes."""
        z, y, z_g = task.apply(params, batch["x"], train=True), batch["y"], batch["note"]["z_g"]
        distilled = self.lam * self.far(not_true(z, y), not_true(z_g, y))
        if self.lam < 1:
            distilled = distilled + (1 - self.lam) * self.far(z, z_g)
        return masked_mean(task.criterion(z, y) + self.beta * distilled, batch["mask"])

    def far(self, z: Tensor, z_g: Tensor) -> Tensor:
        """Return how far these logits are from the global model's."""
        return kl(z, z_g, self.tau) if self.distance == "kl" else mse(z, z_g)
