"""All registered methods, one more that uses every hook, and one with two gradients per step."""

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
    passes: ClassVar[tuple[str, ...]] = ("distance", "loss")
    reveals: ClassVar[str] = "nothing"
    a: float = hyper(0.02, "weight of the selected examples", low=0, test_value=0.06)
    b: float = hyper(0.05, "weight of the memory", low=0, test_value=0.2)

    @property
    def needs(self):
        return {"whole_batches": ""}

    @property
    def noise_size(self):
        return 2

    def init_server(self, task, params):
        assert task.public is not None
        seen = torch.zeros(task.n_classes, dtype=task.dtype, device=task.device)
        return {"params": params, "seen": seen, "bias": seen.new_zeros(task.n_clients, task.n_classes)}

    def broadcast(self, server):
        return {"params": server["params"], "seen": server["seen"], "nothing": {}}

    def broadcast_to(self, server, client):
        return {"bias": server["bias"][client], "nothing": {}}

    def hold_out(self):
        return 0.2

    def frozen(self, task):
        return ["classifier.bias"] if "classifier.bias" in task.init else ["out.bias"]

    def centred_weights(self, task):
        return [name for name in task.init if name != "classifier.weight"]  # among them one that is frozen

    def init_client(self, task, params):
        return {
            "last": tree.zeros_like(params),
            "visits": torch.zeros((), dtype=task.dtype, device=task.device),
        }

    def prepare(self, visit):
        return {
            "last": visit.client["last"],
            "share": visit.facts["label_counts"] / visit.facts["n"],
            "visits": visit.client["visits"],
            "tracked": {"loss": visit.client["visits"], "z": visit.facts["label_counts"]},
            "bias": visit.sent["bias"],
        }

    def refine(self, visit, batch):
        """Descend the loss of the last layer's bias alone, on some of the examples."""
        task, bias, n = visit.task, visit.local["bias"], visit.facts["n"]
        z = task.apply(visit.shared["params"], batch["x"])
        used = batch["mask"] & (batch["position"] < 0.5 * n)

        def mean_loss(b):
            return masked_mean(cross_entropy(z + b, batch["y"]), used)

        step = torch.func.grad(mean_loss)(bias) + 0.01 * bias
        return {**visit.local, "bias": bias - 0.1 * (1 + visit.client["visits"]) * step + 0.01 * visit.sent["bias"]}

    def refined(self, visit, passes):
        return (visit.local["bias"] - visit.sent["bias"]).norm() > 0.2 if passes < 3 else passes >= 3

    def start(self, visit):
        moved = tree.map(lambda w, last: w + 0.01 * last, visit.shared["params"], visit.client["last"])
        (name,) = self.frozen(visit.task)
        return {**moved, name: moved[name] + visit.local["bias"]}

    def annotate(self, visit, x, y):
        features, z = visit.task.outputs(visit.shared["params"], x)
        return {"z": z + visit.local["visits"], "norm": features.norm(dim=-1)}

    def select_examples(self, visit, y, valid, noise, note):
        classes = torch.arange(visit.task.n_classes, device=y.device)
        own = (y[None] == classes[:, None]) & valid[None]
        score = torch.where(own, noise[None] + note["norm"][None] + visit.local["visits"], -1.0)
        return score.argmax(1), (visit.facts["label_counts"] > 0).to(score.dtype)

    def rehearse(self, visit, x, y):
        return {"x": x + 0.1, "z": visit.task.apply(visit.shared["params"], x) + visit.local["visits"], "y": y}

    def distance(self, visit, params, batch):
        gap, rehearsed = tree.sub(params, visit.shared["params"]), batch["rehearsed"]
        z, kept = (visit.task.apply(params, x, train=True) for x in (batch["x"], rehearsed["x"]))
        values = ((z - batch["note"]["z"]) ** 2).sum(-1) + ((kept - rehearsed["z"]) ** 2).sum(-1)
        values = values + cross_entropy(kept, rehearsed["y"])
        return 0.1 * tree.dot(gap, gap) + 0.01 * masked_mean(values, batch["mask"])

    def gradient_point(self, visit, params, grads):
        scale = visit.facts["lr"] / visit.facts["steps"]
        return {**params, **{name: params[name] + scale * g for name, g in grads["distance"].items()}}

    def loss(self, visit, params, batch):
        selected, task = batch["selected"], visit.task
        z = task.apply(params, batch["x"], train=True)
        base = cross_entropy(z, batch["y"]) + 0.01 * ((z - batch["note"]["z"]) ** 2).sum(-1)
        base = base + 0.1 * cross_entropy(
            task.head(params, batch["noise"][:, :1].expand(-1, task.n_features)), batch["y"]
        )
        anchor = ((task.apply(params, selected["x"], train=True) - selected["note"]["z"]) ** 2).sum(-1)
        weighted = (anchor * selected["weight"]).sum() / selected["weight"].sum()
        loss = masked_mean(base, batch["mask"]) + self.a * weighted
        return loss, {"loss": loss, "z": torch.where(batch["mask"][:, None], z, 0).sum(0)}

    def combine_gradients(self, visit, params, grads):
        share = visit.local["share"].max()
        return tree.map(lambda g, d: g + 0.01 * share * d, grads["loss"], grads["distance"])

    def correct(self, visit, params, grads):
        scale = self.b / visit.facts["effective_steps"] * visit.facts["steps"]
        return {name: g + scale * visit.local["last"][name] for name, g in grads.items()}

    def measure(self, visit, params, batch):
        task = visit.task
        hit = (task.apply(params, batch["x"]).argmax(-1) == batch["y"]) & batch["mask"] & (batch["position"] < 6)
        classes = torch.arange(task.n_classes, device=hit.device)
        hits = (hit[:, None] & (batch["y"][:, None] == classes)).sum(0).to(task.dtype)
        return {"hits": hits * (visit.facts["label_counts"] > 0)}

    def finish(self, visit, params, measured):
        visits = visit.client["visits"]
        upload = {"params": params, "n": visit.facts["n"], "hits": measured["hits"], "visits": visits}
        upload["tracked"] = visit.local["tracked"]
        upload["bias"] = visit.local["bias"] - 0.5 * visit.sent["bias"]
        return upload, {"last": tree.sub(params, visit.shared["params"]), "visits": visits + 1}

    def personal_params(self, visit):
        own = tree.add(visit.shared["params"], visit.client["last"])
        (name,) = self.frozen(visit.task)
        return {**own, name: own[name] + visit.sent["bias"]}

    def aggregate(self, task, server, uploads, cohort):
        rng = torch.Generator().manual_seed(cohort.seed)
        shift = 1e-3 * float(torch.rand(1, generator=rng)) * cohort.round
        params = tree.map(lambda w: w + shift, tree.mean(uploads["params"], uploads["n"]))
        tracked = uploads["tracked"]["loss"].sum() + uploads["tracked"]["z"].sum(0)
        seen = server["seen"] + uploads["hits"].sum(0) + uploads["visits"].sum() + tracked
        ids = torch.tensor(cohort.ids, device=seen.device)
        return {"params": params, "seen": seen, "bias": server["bias"].index_copy(0, ids, uploads["bias"])}


@dataclass(frozen=True)
class SAM(FedAvg):
    """Sharpness-aware minimisation at the clients: the gradient of the loss at the worst point within rho.

    Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization", ICLR 2021, eq. 2-3.
    """

    name: ClassVar[str] = "sam"
    passes: ClassVar[tuple[str, ...]] = ("ascent", "loss")
    rho: float = hyper(0.05, "radius of the neighbourhood", low=0, fedavg_at=0.0, test_value=0.5)

    def ascent(self, visit, params, batch):
        return self.loss(visit, params, batch)

    def gradient_point(self, visit, params, grads):
        scale = self.rho / (tree.dot(grads["ascent"], grads["ascent"]).sqrt() + 1e-12)
        return tree.map(lambda w, g: w + scale * g, params, grads["ascent"])


@dataclass(frozen=True)
class FedRoDWithHeads(fk.methods.FedRoD):
    """FedRoD as in its paper, with personal heads."""

    name: ClassVar[str] = "fedrod_with_heads"
    personal_head: bool = hyper(True, "train a head of each client's own", choices=(True, False), test_value=False)


# settings with which a method is as quick as the others, for tests that train it many times
QUICK = {"fedgen": {"hidden": 24, "noise": 4, "steps": 5, "batch_size": 6}, "fedreg": {"iterations": 3}}
METHODS = {**fk.methods.REGISTRY, **{cls.name: cls for cls in (EveryHook, SAM, FedRoDWithHeads)}}


def quick(name: str) -> FedAvg:
    """Return the method of this name."""
    return METHODS[name](**QUICK.get(name, {}))
