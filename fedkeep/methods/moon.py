"""MOON. Li et al., "Model-Contrastive Federated Learning", CVPR 2021 (arXiv:2103.16257), eq. 3-5 and algorithm 1.

Choices and deviations: docs/methods/moon.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedkeep.losses import masked_mean
from fedkeep.method import Batch, ClientState, FedAvg, Local, Note, Params, Upload, Visit, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class MOON(FedAvg):
    """MOON: pull a client's features towards the global model's, and away from those of its own previous model."""

    name: ClassVar[str] = "moon"
    paper: ClassVar[str] = "Li et al., CVPR 2021"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    mu: float = hyper(1.0, "weight of the contrastive term", search=(0.1, 10.0), low=0, fedavg_at=0.0, test_value=5.0)
    tau: float = hyper(0.5, "temperature of the similarities", search=(0.2, 1.0), above=0, test_value=0.1)

    def init_client(self, task: Task, params: Params) -> ClientState:
        """Use the global model as the previous one."""
        return {"previous": params}

    def prepare(self, visit: Visit) -> Local:
        """Pass on the previous model."""
        return {"previous": visit.client["previous"]}

    def annotate(self, visit: Visit, x: Any, y: Tensor) -> Note:
        """Note the features of the global and of the previous model, h_g and h_p."""
        features = visit.task.outputs
        return {"h_g": features(visit.shared["params"], x)[0], "h_p": features(visit.local["previous"], x)[0]}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of CE + mu * -log(e^{s_g/tau} / (e^{s_g/tau} + e^{s_p/tau})), s the cosines."""
        h, z = visit.task.outputs(params, batch["x"], train=True)
        s_g, s_p = (F.cosine_similarity(h, batch["note"][key], dim=-1) for key in ("h_g", "h_p"))
        contrast = -F.logsigmoid((s_g - s_p) / self.tau)
        return masked_mean(visit.task.criterion(z, batch["y"]) + self.mu * contrast, batch["mask"])

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Keep the local model for the next visit."""
        return {"params": params, "n": visit.facts["n"]}, {"previous": params}
