"""FedKA. Chen, Zhu and Zheng, "Towards Fast and Stable Federated Learning: Confronting Heterogeneity via Knowledge
Anchor", ACM MM 2023, definitions 1-2, eq. 2-3 and algorithm 1.

Not in the paper: `recentre = True` (recentre=False follows the paper exactly).
Choices and deviations: docs/methods/fedka.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.errors import MethodError
from fedkeep.losses import anchor_gap, masked_mean
from fedkeep.method import (
    Batch,
    Cohort,
    Facts,
    FedAvg,
    Local,
    Note,
    Params,
    ServerTree,
    Shared,
    Visit,
    hyper,
)  # fmt: skip
from fedkeep.methods._recentre import recentred, require_recentrable
from fedkeep.server_training import require_public
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedKA(FedAvg):
    """FedKA: in every step, keep the logits of a few anchor examples of missing classes close to the global model's."""

    name: ClassVar[str] = "fedka"
    paper: ClassVar[str] = "Chen et al., ACM MM 2023"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    beta: float = hyper(0.001, "weight of the anchor", search=(1e-05, 0.01), low=0, test_value=0.1,
                        warning='0.01 diverges in the paper\'s own CIFAR-10 setting with reduce="sum"; 0.001 does not'
                        )  # fmt: skip
    gamma: float = hyper(
        0.05, "share of examples below which a class is non-dominant", search=(0.02, 0.1), low=0, high=1, test_value=0.5
    )
    mu: int = hyper(10, "maximum number of examples in the anchor", low=1, whole=True, test_value=1)
    sampling: str = hyper("random", "a client's example of a non-dominant class: at random, of the largest loss "
                          "(hard), or of the smallest (proficient)",
                          choices=("random", "hard", "proficient"), test_value="hard",
                          test_with={"gamma": 0.5})  # fmt: skip
    parts: str = hyper("both", "the classes in the anchor", choices=("both", "non_dominant", "missing"),
                       test_value="missing", test_with={"gamma": 0.5})  # fmt: skip
    reduce: str = hyper("sum", "over the kept channels: their sum, as printed, or their mean", choices=("sum", "mean"),
                        test_value="mean", test_with={"beta": 0.1})  # fmt: skip
    recentre: bool = hyper(True, "subtract the classifier's mean over classes after averaging", choices=(True, False),
                           test_value=False)  # fmt: skip

    @property
    def needs(self) -> Mapping[str, str]:
        """A classifier to recentre."""
        return {"classifier": "set recentre=False"} if self.recentre else {}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return mean CE + beta / |T| * the sum over the anchor T of ||z_g - z||^2 over the kept channels."""
        task, local, selected, y = visit.task, visit.local, batch["selected"], batch["y"]
        slot = selected["weight"].argsort(descending=True, stable=True)[: self.mu]  # the same order on every device
        weight = selected["weight"][slot]
        missing = local["missing"][slot]

        def choose(shared: Tensor, own: Tensor) -> Tensor:
            return torch.where(missing.reshape(-1, *[1] * (own.ndim - 1)), shared[slot], own[slot])

        x, S, own = tree.align(batch["x"], visit.shared["S"], selected["x"])
        z = task.apply(params, tree.cat([x, tree.map(choose, S, own)]), train=True, batch=len(y))
        gaps = anchor_gap(z[len(y) :], choose(local["z_g"], selected["note"]["z_g"]), local["channels"], self.reduce)
        penalty: Tensor = (weight * gaps).sum() / weight.sum().clamp(min=1)
        return masked_mean(task.criterion(z[: len(y)], y), batch["mask"]) + self.beta * penalty

    def prepare(self, visit: Visit) -> Local:
        """Find the client's missing and non-dominant classes; compute the global model's logits of the shared set."""
        missing, scarce = self._classes(visit.facts)
        z_g = visit.task.apply(visit.shared["params"], visit.shared["S"])
        return {"missing": missing, "channels": missing | scarce, "z_g": z_g}

    def annotate(self, visit: Visit, x: Any, y: Tensor) -> Note:
        """Note the global model's logits z_g."""
        return {"z_g": visit.task.apply(visit.shared["params"], x)}

    def select_examples(
        self, visit: Visit, y: Tensor, valid: Tensor, noise: Tensor, note: Note
    ) -> tuple[Tensor, Tensor]:
        """Select one own example of each class; weight 1 for at most mu classes in the anchor, else 0.

        A missing class can have weight 1 too; the loss then uses the shared example instead.
        """
        C = visit.task.n_classes
        missing, scarce = self._classes(visit.facts)
        wanted = {"both": missing | scarce, "non_dominant": scarce, "missing": missing}[self.parts]
        order = torch.where(wanted, shuffled(noise[0], C), -1)
        kept = wanted & (order >= order.topk(min(self.mu, C)).values[-1])
        if self.sampling == "random":
            score = noise
        else:
            score = visit.task.criterion(note["z_g"], y) * (1 if self.sampling == "hard" else -1)
        own = valid & (y == torch.arange(C, device=y.device)[:, None])
        return torch.where(own, score, -torch.inf).argmax(1), kept.to(noise.dtype)

    def _classes(self, facts: Facts) -> tuple[Tensor, Tensor]:
        """Definition 1: the missing and the non-dominant classes, [C] each."""
        counts = facts["label_counts"]
        return counts == 0, (counts > 0) & (counts / facts["n"] < self.gamma)

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Keep the shared set S: row c is one example of class c."""
        public = require_public(task, self.name)
        first = [(public.y == c).nonzero()[:1, 0] for c in range(task.n_classes)]
        absent = [c for c, place in enumerate(first) if not len(place)]
        if absent:
            raise MethodError(
                f"{self.name} needs one public training example of each class, and there is none of class "
                f"{', '.join(map(str, absent))}: load(..., public=1, validation=0) takes one of each",
                key="public",
                value=absent,
            )
        if self.recentre:
            require_recentrable(task, self.name, params, public)
        return {"params": params, "S": tree.take(public.x, torch.cat(first))}

    def broadcast(self, server: ServerTree) -> Shared:
        """Send the weights and the shared set."""
        return {"params": server["params"], "S": server["S"]}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average, and recentre the classifier."""
        params = tree.mean(uploads["params"], uploads["n"])
        return {"params": recentred(task, self.name, params) if self.recentre else params, "S": server["S"]}


def shuffled(u: Tensor, size: int) -> Tensor:
    """Return a random order of `size` items, as integers, from one uniform random number.

    The number seeds Park and Miller's generator: x <- 48271 x modulo 2^31 - 1.
    """
    prime = 2**31 - 1
    powers = torch.tensor([pow(48271, i + 1, prime) for i in range(size)], device=u.device)
    return (u * prime).long() % prime * powers % prime
