"""All registered methods, and one more that uses every hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import fedkeep as fk
from fedkeep import tree
from fedkeep.losses import cross_entropy, masked_mean
from fedkeep.method import FedAvg, hyper


@dataclass(frozen=True)
class EveryHook(FedAvg):
    """No paper's method: it uses every hook of the contract, so that no engine can forget one."""

    name: ClassVar[str] = "every_hook"
    a: float = hyper(0.02, "weight of the drawn examples", low=0, other=0.06)
    b: float = hyper(0.05, "weight of the memory", low=0, other=0.2)

    def init_server(self, task, params):
        assert task.public is not None
        return {"params": params, "seen": torch.zeros(task.n_classes, dtype=task.dtype, device=task.device)}

    def broadcast(self, server):
        return {"params": server["params"], "seen": server["seen"], "nothing": {}}

    def init_client(self, task, params):
        return {
            "last": tree.zeros_like(params),
            "visits": torch.zeros((), dtype=task.dtype, device=task.device),
        }

    def start(self, shared, client):
        return tree.map(lambda w, last: w + 0.01 * last, shared["params"], client["last"])

    def prepare(self, task, shared, client, facts):
        return {
            "last": client["last"],
            "share": facts["label_counts"] / facts["n"],
            "visits": client["visits"],
        }

    def annotate(self, task, shared, local, x, y):
        features, z = task.outputs(shared["params"], x)
        return {"z": z + local["visits"], "norm": features.norm(dim=-1)}

    def draw(self, task, shared, facts, y, valid, noise, note):
        classes = torch.arange(task.n_classes, device=y.device)
        mine = (y[None] == classes[:, None]) & valid[None]
        score = torch.where(mine, noise[None] + note["norm"][None], -1.0)
        return score.argmax(1), (facts["label_counts"] > 0).to(score.dtype)

    def loss(self, task, params, batch, shared, local):
        drawn = batch["drawn"]
        z = task.apply(params, batch["x"], train=True)
        base = cross_entropy(z, batch["y"]) + 0.01 * ((z - batch["note"]["z"]) ** 2).sum(-1)
        anchor = ((task.apply(params, drawn["x"], train=True) - drawn["note"]["z"]) ** 2).sum(-1)
        weighted = (anchor * drawn["weight"]).sum() / drawn["weight"].sum()
        return masked_mean(base, batch["mask"]) + self.a * weighted

    def correct(self, grads, params, shared, local):
        return tree.map(lambda g, last: g + self.b * last, grads, local["last"])

    def measure(self, task, params, batch, shared, local):
        hit = (task.apply(params, batch["x"]).argmax(-1) == batch["y"]) & batch["mask"] & (batch["place"] < 6)
        classes = torch.arange(task.n_classes, device=hit.device)
        return {"hits": (hit[:, None] & (batch["y"][:, None] == classes)).sum(0).to(task.dtype)}

    def finish(self, shared, params, local, client, facts, measured):
        upload = {"params": params, "n": facts["n"], "hits": measured["hits"], "visits": client["visits"]}
        return upload, {"last": tree.sub(params, shared["params"]), "visits": client["visits"] + 1}

    def personal(self, shared, client):
        return tree.add(shared["params"], client["last"])

    def aggregate(self, task, server, uploads, cohort):
        rng = torch.Generator().manual_seed(cohort.seed)
        shift = 1e-3 * float(torch.rand(1, generator=rng)) * cohort.round
        params = tree.map(lambda w: w + shift, tree.mean(uploads["params"], uploads["n"]))
        return {"params": params, "seen": server["seen"] + uploads["hits"].sum(0) + uploads["visits"].sum()}


METHODS = {**fk.methods.REGISTRY, EveryHook.name: EveryHook}
