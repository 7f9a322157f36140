"""FedDistill+. Seo et al., "Federated Knowledge Distillation", 2020 (arXiv:2011.02367), with shared weights as in
section 5.1 of FedGKD (Yao et al., 2021, arXiv:2107.00051).

m_k[c]: the mean logits of client k's examples of class c, taken while it trained. Z_k[c]: their mean over the other
clients. The local loss is CE(z, y) + lam T^2 KL(softmax(Z_k[y] / T) || softmax(z / T)).
Choices and deviations: docs/methods/feddistill.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedkeep.losses import kl, masked_mean
from fedkeep.method import (
    Batch,
    Bound,
    ClientState,
    Cohort,
    FedAvg,
    Local,
    Params,
    ServerTree,
    Shared,
    Upload,
    Visit,
    hyper,
)  # fmt: skip
from fedkeep.methods._per_class import class_sums
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedDistill(FedAvg):
    """FedDistill+: distil the other clients' mean logits of each class, besides averaging the weights."""

    name: ClassVar[str] = "feddistill"
    title: ClassVar[str] = "FedDistill+"
    paper: ClassVar[str] = "Seo et al., arXiv 2020"
    averaged: ClassVar[tuple[str, ...]] = ("params", "dm", "dh")
    bounds: ClassVar[Mapping[str, Bound]] = {**FedAvg.bounds, "dh": Bound(whole=True, low=-1, high=1)}
    lam: float = hyper(0.1, "weight of distillation", search=(0.01, 1.0), low=0, fedavg_at=0.0, test_value=1.0)
    T: float = hyper(1.0, "temperature of both softmaxes", search=(1.0, 4.0), above=0, test_value=3.0)
    teacher: str = hyper("logits", "the other clients' logits, or equal probabilities (what FedGKD's code runs)",
                         choices=("logits", "uniform"), test_value="uniform")  # fmt: skip
    memory: str = hyper("run", "the visits over which a client's logits are averaged: all of the run, or the last",
                        choices=("run", "visit"), test_value="visit")  # fmt: skip
    divide_by: str = hyper("clients", "divide the sum of logits by all other clients, or by those with that class",
                           choices=("clients", "holders"), test_value="holders")  # fmt: skip

    @property
    def needs(self) -> Mapping[str, str]:
        """Whole batches, over which logits are added up."""
        return {"whole_batches": "set teacher='uniform'"} if self.teacher == "logits" else {}

    # Clients

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor | tuple[Tensor, Tree]:  # type: ignore[override]
        """Return the mean of CE + lam T^2 KL(Z[y] || z), and the sums of logits and examples of each class."""
        z, y, lam = visit.task.apply(params, batch["x"], train=True), batch["y"], visit.shared["lam"]
        if self.teacher == "uniform":
            return masked_mean(visit.task.criterion(z, y) + lam * kl(z, torch.zeros_like(z), self.T), batch["mask"])
        weight = lam * visit.local["taught"][y]
        value = visit.task.criterion(z, y) + weight * kl(z, visit.local["Z"][y], self.T)
        sums, count = class_sums(visit.task, z.detach(), batch)
        return masked_mean(value, batch["mask"]), {"z": sums, "count": count}

    def init_client(self, task: Task, params: Params) -> ClientState:
        """Start without logits."""
        return {} if self.teacher == "uniform" else {"m": _zeros(task, 2), "count": _zeros(task, 1)}

    def prepare(self, visit: Visit) -> Local:
        """Compute the mean logits of the other clients; start the sums of this visit."""
        if self.teacher == "uniform":
            return {}
        shared, client = visit.shared, visit.client
        total, holders = shared["m"] - client["m"], shared["h"] - _has(client["count"])
        if self.divide_by == "holders":
            Z, taught = total / holders.clamp(min=1)[:, None], _has(holders - 0.5)
        else:
            Z, taught = total / max(visit.task.n_clients - 1, 1), torch.ones_like(holders)
        tracked = {"z": torch.zeros_like(client["m"]), "count": torch.zeros_like(client["count"])}
        return {"Z": Z, "taught": taught, "tracked": tracked}

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Upload the changes of the mean logits, and of which classes the client has."""
        upload, before = {"params": params, "n": visit.facts["n"]}, visit.client
        if self.teacher == "uniform":
            return upload, before
        z, count = (visit.local["tracked"][key] for key in ("z", "count"))
        m = z / count.clamp(min=1)[:, None]
        if self.memory == "run":
            new, count = count, before["count"] + count
            m = before["m"] + (new / count.clamp(min=1))[:, None] * (m - before["m"])
        state = {"m": m, "count": count}
        return {**upload, "dm": m - before["m"], "dh": _has(count) - _has(before["count"])}, state

    # Server

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with sums of 0, and without distillation in round 1."""
        return {"params": params, "m": _zeros(task, 2), "h": _zeros(task, 1), "lam": _zeros(task, 0)}

    def broadcast(self, server: ServerTree) -> Shared:
        """Send the weights, lam (0 in round 1), and the sums over all clients."""
        shared = {"params": server["params"], "lam": server["lam"]}
        return shared if self.teacher == "uniform" else {**shared, "m": server["m"], "h": server["h"]}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average the weights, and add the changes to the sums."""
        new = {**super().aggregate(task, server, uploads, cohort), "lam": torch.full_like(server["lam"], self.lam)}
        if self.teacher == "uniform":
            return new
        return {**new, "m": server["m"] + uploads["dm"].sum(0), "h": server["h"] + uploads["dh"].sum(0)}


def _zeros(task: Task, axes: int) -> Tensor:
    return torch.zeros([task.n_classes] * axes, dtype=task.dtype, device=task.device)


def _has(count: Tensor) -> Tensor:
    return (count > 0).to(count.dtype)
