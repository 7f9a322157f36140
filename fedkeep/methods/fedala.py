"""FedALA. Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023
(arXiv:2212.01197).

Choices and deviations: docs/methods/fedala.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.losses import masked_mean
from fedkeep.method import Batch, ClientState, FedAvg, Local, Params, Upload, Visit, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree

WINDOW = 10  # passes whose losses must have settled


@dataclass(frozen=True)
class FedALA(FedAvg):
    """FedALA: before training, learn for every weight of the last layers how much of the global model to take."""

    name: ClassVar[str] = "fedala"
    paper: ClassVar[str] = "Zhang et al., AAAI 2023"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    eta: float = hyper(1.0, "learning rate of the mixing weights", search=(0.1, 10.0), low=0, fedavg_at=0.0,
                       test_value=3.0)  # fmt: skip
    s: float = hyper(0.8, "share of the client's examples from which they are learned", above=0, high=1,
                     test_value=0.4)  # fmt: skip
    p: int = hyper(1, "how many of the last layers are mixed; all others are the global model's", low=1, whole=True,
                   test_value=2)  # fmt: skip
    threshold: float = hyper(0.1, "deviation of the last ten losses below which a first learning ends", above=0,
                             test_value=1e-3)  # fmt: skip
    most: int = hyper(100, "passes after which a first learning ends anyway", low=1, whole=True, test_value=2)

    def init_client(self, task: Task, params: Params) -> ClientState:
        """Use the global model as the client's own: a first visit mixes nothing. All mixing weights are 1."""
        weights = {name: torch.ones_like(params[name]) for name in last_layers(task, self.p)}
        return {"last": params, "W": weights, "visits": torch.zeros((), dtype=task.dtype, device=task.device)}

    def prepare(self, visit: Visit) -> Local:
        """Start with the mixing weights of the last visit."""
        return {"W": visit.client["W"], "losses": visit.facts["n"].new_zeros(WINDOW)}

    def refine(self, visit: Visit, batch: Batch) -> Local:
        """W <- clip(W - eta grad CE(theta_hat) (theta_g - theta_k), 0, 1), on a random part of the examples."""
        task, n, local = visit.task, visit.facts["n"], visit.local
        used = batch["mask"] & (batch["position"] < (self.s * n + 1e-6 * n).floor().clamp(min=1))

        def loss(weights: Tree) -> Tensor:
            z = task.apply(self.mixed(visit, weights), batch["x"])
            return masked_mean(task.criterion(z, batch["y"]), used)

        grads, value = torch.func.grad_and_value(loss)(local["W"])
        earlier, newest = local["losses"], torch.where(used.any(), value, local["losses"][-1]).to(n.dtype)
        earlier = torch.where(batch["position"][0] == 0, earlier.roll(-1), earlier)
        return {
            "W": tree.map(lambda w, g: (w - self.eta * g).clamp(0, 1), local["W"], grads),
            "losses": torch.cat([earlier[:-1], newest[None]]),
        }

    def refined(self, visit: Visit, passes: int) -> Tensor:
        """Learn nothing at the first visit, until the losses have settled at the second, and in one pass later."""
        visits, losses = visit.client["visits"], visit.local["losses"]
        settled = (losses.std(correction=0) < self.threshold) & (passes > WINDOW)
        return torch.where(visits == 1, settled | (passes >= self.most), (visits == 0) | (passes >= 1))

    def start(self, visit: Visit) -> Params:
        """Return theta_hat."""
        return self.mixed(visit, visit.local["W"])

    def mixed(self, visit: Visit, weights: Tree) -> Params:
        """Return theta_hat: theta_k + (theta_g - theta_k) W in the last layers, theta_g below."""
        own, shared = visit.client["last"], visit.shared["params"]
        return {**shared, **{name: own[name] + (shared[name] - own[name]) * w for name, w in weights.items()}}

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Keep the local model and the mixing weights."""
        state = {"last": params, "W": visit.local["W"], "visits": visit.client["visits"] + 1}
        return {"params": params, "n": visit.facts["n"]}, state

    def personal_params(self, visit: Visit) -> Params:
        """Return the local model of the last visit."""
        return visit.client["last"]  # type: ignore[no-any-return]


def last_layers(task: Task, p: int) -> list[str]:
    """Return the names of the weights in the last p layers; a layer is a module that has weights of its own."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in task.init))[-p:]
    return [name for name in task.init if name.rpartition(".")[0] in layers]
