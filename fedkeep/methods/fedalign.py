"""FedAlign. Mendieta et al., "Local Learning Matters: Rethinking Data Heterogeneity in Federated Learning", CVPR 2022
(arXiv:2111.14213).

Choices and deviations: docs/methods/fedalign.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeep.errors import MethodError
from fedkeep.losses import masked_mean
from fedkeep.method import Batch, FedAvg, Params, ServerTree, Visit, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree

ITERATIONS = 10  # of the power method


@dataclass(frozen=True)
class FedAlign(FedAvg):
    """FedAlign: give a narrow part of the last stage the same Lipschitz constant as the whole stage."""

    name: ClassVar[str] = "fedalign"
    paper: ClassVar[str] = "Mendieta et al., CVPR 2022"
    mu: float = hyper(0.45, "weight of the alignment", search=(0.1, 1.0), low=0, fedavg_at=0.0, test_value=2.0)
    width: float = hyper(0.25, "share of the last stage's channels in the narrow part", above=0, high=1, test_value=0.5)

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Raise if the last stage cannot be narrowed."""
        modules = dict(task.train_module.named_modules())
        for name in dict.fromkeys(weight.rpartition(".")[0] for weight in task.last_stage_weights):
            layer = modules[name]
            grouped = isinstance(layer, nn.modules.conv._ConvNd) and layer.groups > 1
            uneven = isinstance(layer, nn.GroupNorm) and self.narrow(layer.num_channels) % layer.num_groups
            if grouped or uneven:
                raise MethodError(
                    f"fedalign cannot narrow {name} ({type(layer).__name__}) to {self.width:g} of its channels: they "
                    "could not be divided among its groups",
                    key="method.width",
                    value=self.width,
                )
        return super().init_server(task, params)

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return CE + mu sg(CE / A) A, A the mean of (s of the narrow part - sg(s of the whole stage))^2."""
        task = visit.task
        before, after, z = task.stages(params, batch["x"], train=True)
        _require_maps(before, after)
        narrow_in = before.detach()[:, : self.narrow(before.shape[1])]
        narrow_out = task.last_stage(self.narrow_weights(task, params), narrow_in, train=True)
        whole = lipschitz(before.detach(), after.detach())
        ce = masked_mean(task.criterion(z, batch["y"]), batch["mask"])
        gap = masked_mean((lipschitz(narrow_in, narrow_out) - whole).square(), batch["mask"])
        scale = (ce / gap.clamp(min=torch.finfo(gap.dtype).tiny)).detach()
        return ce + self.mu * torch.where(scale.isfinite(), scale, 0) * gap

    def narrow(self, channels: int) -> int:
        """Return how many channels the narrow part has."""
        return max(1, round(self.width * channels))

    def narrow_weights(self, task: Task, params: Params) -> Tree:
        """Return the first channels, inputs and outputs, of every weight in the last stage."""

        def first(w: Tensor) -> Any:
            w = w[: self.narrow(w.shape[0])]
            return w[:, : self.narrow(w.shape[1])] if w.ndim > 1 else w

        return {name: first(params[name]) for name in task.last_stage_weights}


def _require_maps(*maps: Tensor) -> None:
    """Raise unless a stage takes and returns vectors [B, C] or images [B, C, h, w]."""
    for one in maps:
        if one.ndim not in (2, 4):
            raise MethodError(
                f"fedalign needs a last stage that maps [examples, channels] or [examples, channels, height, width], "
                f"not {one.ndim} axes",
                key="model.last_stage",
                value=one.ndim,
            )


def lipschitz(before: Tensor, after: Tensor) -> Tensor:
    """Return an estimate of each example's Lipschitz constant: the spectral norm of X = P Q' / pixels, [B].

    P and Q are the feature maps before and after the stage, P averaged down to Q's size if it is larger.
    """
    if before.ndim == 4 and before.shape[-2] > after.shape[-2]:
        before = F.adaptive_avg_pool2d(before, (after.shape[-2], after.shape[-1]))
    P, Q = (maps.reshape(*maps.shape[:2], -1) for maps in (before, after))
    X = P @ Q.mT / P.shape[-1]
    v = torch.ones_like(X[..., :1])
    norm = v[:, 0, 0]
    tiny = torch.finfo(X.dtype).tiny
    for _ in range(ITERATIONS):
        v = X @ (X.mT @ v)
        norm = (v.square().sum((-2, -1)) + tiny).sqrt()  # maps of zeros have a gradient too
        v = v / norm[:, None, None]
    return norm.sqrt()
