"""FedGKD. Yao et al., "Local-Global Knowledge Distillation in Heterogeneous Federated Learning with Non-IID Data",
arXiv:2107.00051, eq. 3-4 and algorithm 1. (Eq. 5 is `fedgkd_vote`; FedGKD+ is this with a projection head.)

Where the paper leaves a choice, or contradicts itself:

- No distillation in round 1, and w_0 is never buffered (as in the released code): a random teacher is noise.
  Algorithm 1 sends w_t from t = 1 on but starts at w_0. Until M models exist, w_bar is the mean of those there are.
- M = 5 by default. Table 3 takes the best M per cell (M = 1, 5 or 7 of table 7); section 3.2 calls M = 1 good enough.
- Clients are averaged by n_k over the round's cohort; algorithm 1 sums over all K, the released code averages evenly.
- The temperature is 1. "mse" (table 9) is the mean over the classes of the squared differences of the logits, times
  gamma/2 as well (the paper gives no coefficient; the released code uses the same).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.losses import kl, masked_mean, mse
from fedkeep.method import Cohort, FedAvg, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


def empty_buffer(task: Task, params: Tree, M: int) -> Tree:
    """Make M slots for global models, newest first, and their weights: 0 as long as nothing real is in them."""
    return {"buffer": tree.stack([params] * M), "filled": torch.zeros(M, dtype=task.dtype, device=task.device)}


def push(server: Tree, params: Tree) -> Tree:
    """Put a model into the first slot; the last one falls out."""
    filled = server["filled"]
    return {
        "buffer": tree.map(lambda slots, w: torch.cat([w[None], slots[:-1]]), server["buffer"], params),
        "filled": torch.cat([torch.ones_like(filled[:1]), filled[:-1]]),
    }


@dataclass(frozen=True)
class FedGKD(FedAvg):
    """FedGKD: distil the mean of the last M global models into local training."""

    name: ClassVar[str] = "fedgkd"
    paper: ClassVar[str] = "Yao et al., arXiv 2021"
    gamma: float = hyper(0.2, "weight of distillation (halved in the loss)", low=0, neutral=0.0, other=1.0)
    M: int = hyper(5, "number of past global models averaged", low=1, whole=True, other=1)
    distance: str = hyper("kl", "between logits: KL divergence or MSE", choices=("kl", "mse"), other="mse")

    def init_server(self, task: Task, params: Tree) -> Tree:
        """Start with an empty buffer."""
        return {"params": params, **empty_buffer(task, params, self.M)}

    def broadcast(self, server: Tree) -> Tree:
        """Send the weights, gamma (0 in round 1), and w_bar where it is another model than the current one."""
        filled = server["filled"]
        shared = {"params": server["params"], "gamma": self.gamma * filled[0]}
        if self.M > 1:
            shared["w_bar"] = tree.mean(server["buffer"], filled if filled.any() else torch.ones_like(filled))
        return shared

    def annotate(self, task: Task, shared: Tree, local: Tree, x: Any, y: Tensor) -> Tree:
        """Note the teacher's logits."""
        return {"z_bar": task.apply(shared["w_bar" if self.M > 1 else "params"], x)}

    def loss(self, task: Task, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tensor:
        """Return the mean of CE + gamma/2 KL(h(w_bar) || h(w))."""
        z = task.apply(params, batch["x"], train=True)
        far = (kl if self.distance == "kl" else mse)(z, batch["note"]["z_bar"])
        return masked_mean(task.criterion(z, batch["y"]) + shared["gamma"] / 2 * far, batch["mask"])

    def aggregate(self, task: Task, server: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """Average, and buffer the average."""
        params = tree.mean(uploads["params"], uploads["n"])
        return {"params": params, **push(server, params)}
