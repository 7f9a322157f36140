"""FedFOMO. Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021
(arXiv:2012.08565).

Choices and deviations: docs/methods/fedfomo.md.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.losses import masked_mean
from fedkeep.method import (
    Batch,
    ClientState,
    Cohort,
    FedAvg,
    Local,
    Params,
    Sent,
    ServerTree,
    Upload,
    Visit,
    hyper,
)  # fmt: skip
from fedkeep.task import Task
from fedkeep.tree import Tree

LARGE = 4 << 30  # bytes of all clients' models from which on a run warns

log = logging.getLogger("fedkeep")


@dataclass(frozen=True)
class FedFOMO(FedAvg):
    """FedFOMO: start from a mixture of clients' models, each weighted by how much it helps on held-out examples."""

    name: ClassVar[str] = "fedfomo"
    paper: ClassVar[str] = "Zhang et al., ICLR 2021"
    averaged: ClassVar[tuple[str, ...]] = ()  # each client's own model is kept
    reveals: ClassVar[str] = "the client's whole model, and with it what weights disclose of its examples"
    M: int = hyper(4, "how many other clients' models a client gets", low=1, whole=True, test_value=1,
                   warning="clients get other clients' models: use it only where they may see them")  # fmt: skip
    validation: float = hyper(0.2, "share of a client's examples that weigh models and are not trained on", low=0,
                              high=0.9, test_value=0.5)  # fmt: skip
    epsilon: float = hyper(0.0, "probability that a random model is sent in place of a promising one", low=0, high=1,
                           test_value=1.0)  # fmt: skip
    decay: float = hyper(0.05, "by how much epsilon falls in each round", low=0, test_value=1.0,
                         test_with={"epsilon": 1.0})  # fmt: skip

    # Server

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with no models and no preferences P; `noise` decides where models are chosen at random."""
        N = task.n_clients
        if (size := N * tree.nbytes(params)) > LARGE:
            log.warning("fedfomo keeps a model for each of %d clients: %.1f GiB", N, size / 2**30)
        zeros = torch.zeros(N, dtype=torch.promote_types(task.dtype, torch.float32), device=task.device)
        return {
            "params": params,
            "models": tree.map(lambda w: w.expand(N, *w.shape).clone(), params),
            "known": zeros,
            "P": zeros.new_zeros(N, N),
            "noise": zeros.new_ones(N, 2, N),
            "round": zeros.new_zeros(()),
        }

    def broadcast_to(self, server: ServerTree, client: int) -> Sent:
        """Send the M known models of other clients that this one prefers; a missing one is valid = 0."""
        known, row = server["known"], server["P"][client]
        size = max(1, min(self.M, len(known) - 1))
        chosen = self.choose(server, client, size)
        ids = torch.tensor([*chosen, *[client] * (size - len(chosen))], device=known.device)
        valid = (torch.arange(size, device=known.device) < len(chosen)).to(row.dtype)
        return {"models": tree.take(server["models"], ids), "ids": ids, "valid": valid}

    def choose(self, server: ServerTree, client: int, size: int) -> list[int]:
        """Return the clients whose models are sent: at most so many, of those that are known."""
        known, preference = server["known"].tolist(), server["P"][client].tolist()
        draws, noise = server["noise"][client].tolist()
        others = [k for k in range(len(known)) if known[k] and k != client]
        best, random = sorted(others, key=lambda k: -preference[k]), sorted(others, key=lambda k: noise[k])
        epsilon = self.epsilon - self.decay * float(server["round"])
        order: list[int] = []
        for draw in draws[: min(size, len(others))]:
            order.append(next(k for k in (random if draw < epsilon else best) if k not in order))
        return order

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Keep the models, and add the weights w to the preferences; the global model is the average."""
        ids = torch.tensor(cohort.ids, device=uploads["n"].device)
        noise = torch.rand(server["noise"].shape, generator=torch.Generator().manual_seed(cohort.seed))
        return {
            "params": tree.mean(uploads["params"], uploads["n"]),
            "models": tree.map(lambda old, new: old.index_copy(0, ids, new), server["models"], uploads["params"]),
            "known": server["known"].index_fill(0, ids, 1.0),
            "P": server["P"].index_add(0, ids, uploads["w"]),
            "noise": noise.to(server["noise"]),
            "round": torch.full_like(server["round"], cohort.round),
        }

    # Client

    def hold_out(self) -> float:
        """Hold out the examples on which models are weighed."""
        return self.validation

    def init_client(self, task: Task, params: Params) -> ClientState:
        """Use the global model as the client's own, before and after its last training."""
        return {"last": params, "before": params}

    def prepare(self, visit: Visit) -> Local:
        """Start the sums of the losses: of the model before the last training, the one after it, and those sent."""
        return {"losses": visit.facts["n"].new_zeros(2 + len(visit.sent["ids"])), "count": visit.facts["n"] * 0}

    def refine(self, visit: Visit, batch: Batch) -> Local:
        """Add up the losses of all models."""
        task, size = visit.task, batch["mask"].sum()
        losses = [
            masked_mean(task.criterion(task.apply(model, batch["x"]), batch["y"]), batch["mask"])
            for model in (visit.client["before"], *_rows(visit))
        ]
        total = visit.local["losses"] + size * torch.stack(losses).to(visit.local["losses"].dtype)
        return {"losses": total, "count": visit.local["count"] + size}

    def refined(self, visit: Visit, passes: int) -> Tensor:
        """Weigh models in one pass; without any there is nothing to weigh."""
        nothing: Tensor = visit.sent["valid"].sum() == 0
        return nothing | (passes >= 1)

    def weights(self, visit: Visit) -> Tensor:
        """Return w_n = (L(theta_k) - L(theta_n)) / (|theta_n - theta_k| + 1e-5) of the own model and those sent."""
        mean: Tensor = visit.local["losses"] / visit.local["count"].clamp(min=1)
        before = visit.client["before"]
        distances = torch.stack([tree.squared_distance(model, before).sqrt() for model in _rows(visit)])
        valid = torch.cat([visit.sent["valid"].new_ones(1), visit.sent["valid"]])
        gain = mean[0] - mean[1:]
        return gain * valid / (distances.to(mean.dtype) + 1e-5)

    def start(self, visit: Visit) -> Params:
        """Return sum_n max(0, w_n) theta_n / sum_n max(0, w_n); the own model if no w_n is positive."""
        positive = self.weights(visit).clamp(min=0)
        own = (torch.arange(len(positive), device=positive.device) == 0).to(positive.dtype)
        share = torch.where(positive.sum() > 0, positive / positive.sum().clamp(min=1e-30), own)

        def mix(last: Tensor, others: Tensor) -> Any:
            return torch.tensordot(share.to(last.dtype), torch.cat([last[None], others]), dims=1)

        return tree.map(mix, visit.client["last"], visit.sent["models"])

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Upload the model and the weights of other clients' models; keep the model before and after training."""
        columns = torch.arange(visit.task.n_clients, device=visit.sent["ids"].device)
        w = ((visit.sent["ids"][:, None] == columns) * self.weights(visit)[1:, None]).sum(0)
        upload = {"params": params, "n": visit.facts["n"], "w": w}
        return upload, {"last": params, "before": self.start(visit)}

    def personal_params(self, visit: Visit) -> Params:
        """Return the local model of the last visit."""
        return visit.client["last"]  # type: ignore[no-any-return]


def _rows(visit: Visit) -> list[Tree]:
    """Return the models that are weighed: the client's own, and those sent to it."""
    return [visit.client["last"], *(tree.take(visit.sent["models"], m) for m in range(len(visit.sent["ids"])))]
