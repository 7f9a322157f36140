"""MOON. Li et al., "Model-Contrastive Federated Learning", CVPR 2021, eq. 3-5 and algorithm 1.

Where the paper leaves a choice, or others read it differently:

- The features are what the model's classifier sees: `features(x)`. The paper puts a projection head there (two dense
  layers, output 256): build the model with `projection=256`. FedGKD and FedSSD do so; FedNTD uses no head.
- At a client's first visit its previous model is the global one. Both similarities are then equal, the term is the
  constant mu log 2 and its gradient 0: a first visit trains as FedAvg does.
- Table 5 of FedNTD lists tau's candidates as "{0.1, 0.5, 1, 0}": 1.0 is meant. FedGKD and FedSSD agree on mu for
  CIFAR-10 (5) and Tiny-ImageNet (1), not for CIFAR-100 (5 and 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedkeep.losses import masked_mean
from fedkeep.method import FedAvg, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class MOON(FedAvg):
    """MOON: draw a client's features towards the global model's, and away from those of its own previous model."""

    name: ClassVar[str] = "moon"
    paper: ClassVar[str] = "Li et al., CVPR 2021"
    mu: float = hyper(1.0, "weight of the contrastive term", low=0, neutral=0.0, other=5.0)
    tau: float = hyper(0.5, "temperature of the similarities", above=0, other=0.1)

    def init_client(self, task: Task, params: Tree) -> Tree:
        """Take the global model for the previous one."""
        return {"previous": params}

    def prepare(self, task: Task, shared: Tree, client: Tree, facts: Tree) -> Tree:
        """Hand the previous model on."""
        return {"previous": client["previous"]}

    def annotate(self, task: Task, shared: Tree, local: Tree, x: Any, y: Tensor) -> Tree:
        """Note the features of the global and of the previous model, h_g and h_p."""
        return {"h_g": task.outputs(shared["params"], x)[0], "h_p": task.outputs(local["previous"], x)[0]}

    def loss(self, task: Task, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tensor:
        """Return the mean of CE + mu * -log(e^{s_g/tau} / (e^{s_g/tau} + e^{s_p/tau})), s the cosines."""
        h, z = task.outputs(params, batch["x"], train=True)
        s_g, s_p = (F.cosine_similarity(h, batch["note"][key], dim=-1) for key in ("h_g", "h_p"))
        contrast = -F.logsigmoid((s_g - s_p) / self.tau)
        return masked_mean(task.criterion(z, batch["y"]) + self.mu * contrast, batch["mask"])

    def finish(
        self, shared: Tree, params: Tree, local: Tree, client: Tree, facts: Tree, measured: Tree
    ) -> tuple[Tree, Tree]:
        """Keep the local model for the next visit."""
        return {"params": params, "n": facts["n"]}, {"previous": params}
