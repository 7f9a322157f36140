"""FedGen. Zhu et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021
(arXiv:2105.10056), as FedGKD's tables 3 to 6 run it (Yao et al., 2021, arXiv:2107.00051).

The server trains a generator G(y, e) of features for which the clients' heads h_k predict y:
    L_G = sum_k mean( a_k[y] CE(h_k(G(y, e)), y) ) + diversity * exp( -mean over i, j of |e_i - e_j|^2 |G_i - G_j| )
with means of squares and of absolute values, a_k[c] = n_k[c] / sum_j n_j[c], y and e uniform. Clients add to their loss
alpha mean( CE(h(G(y', e)), y') ), and in Zhu et al. beta mean( KL(softmax h(G(y, e)) || softmax z) ).
Choices and deviations: docs/methods/fedgen.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedkeep import server_training
from fedkeep.losses import kl, masked_mean
from fedkeep.method import (
    Batch,
    Bound,
    ClientState,
    Cohort,
    FedAvg,
    Params,
    ServerTree,
    Shared,
    Upload,
    Visit,
    hyper,
)  # fmt: skip
from fedkeep.methods._generator import generate, generate_in_training, new_generator
from fedkeep.methods._per_class import LABEL_COUNTS, class_shares
from fedkeep.optim import Adam
from fedkeep.task import Task
from fedkeep.tree import Tree

_FLOOR = 1e-4  # below which alpha and beta do not decay
_ADAM = Adam(weight_decay=1e-2)


@dataclass(frozen=True)
class FedGen(FedAvg):
    """FedGen: clients train their heads on features of a generator that the server trains on the clients' heads."""

    name: ClassVar[str] = "fedgen"
    paper: ClassVar[str] = "Zhu et al., ICML 2021"
    averaged: ClassVar[tuple[str, ...]] = ()  # each client's head teaches the generator
    bounds: ClassVar[Mapping[str, Bound]] = {**FedAvg.bounds, "mu": LABEL_COUNTS}
    alpha: float = hyper(0.1, "weight of the generated examples", search=(0.01, 10.0), low=0, fedavg_at=0.0,
                         test_value=1.0)  # fmt: skip
    beta: float = hyper(0.0, "weight of the distance to the generated examples of the same labels", low=0,
                        test_value=1.0)  # fmt: skip
    decay: float = hyper(0.98, "factor per round of alpha, beta and the generator's learning rate", above=0, high=1,
                         test_value=0.5)  # fmt: skip
    weighting: str = hyper("counts", "weigh the clients' heads by label counts, or alike (what FedGKD's code runs)",
                           choices=("counts", "uniform"), test_value="uniform")  # fmt: skip
    lr: float = hyper(1e-4, "Adam's learning rate for the generator", above=0, test_value=1e-2)
    steps: int = hyper(50, "generator steps per round", low=0, whole=True, test_value=3)
    batch_size: int = hyper(64, "batch size of the generator", low=2, whole=True, test_value=8)
    diversity: float = hyper(1.0, "weight of the diversity of generated features", low=0, test_value=10.0)
    hidden: int = hyper(512, "width of the generator's hidden layer", low=1, whole=True, test_value=16)
    noise: int = hyper(64, "number of random inputs of the generator", low=1, whole=True, test_value=8)

    @property
    def noise_size(self) -> int:
        """A label and the noise of a generated example, and noise for the real label if beta is used."""
        return 1 + self.noise * (2 if self.beta else 1)

    # Clients

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of CE + alpha CE(h(G(y', e)), y') + beta KL(softmax h(G(y, e)) || softmax z)."""
        task, shared, mask, noise = visit.task, visit.shared, batch["mask"], batch["noise"]
        z, C = task.apply(params, batch["x"], train=True), task.n_classes
        y = (noise[:, 0] * C).long().clamp(max=C - 1)
        generated = generate(shared["generator"], y, noise[:, 1 : 1 + self.noise])
        values = task.criterion(z, batch["y"])
        values = values + shared["alpha"] * task.criterion(task.head(params, generated, train=True), y)
        if self.beta:
            same = generate(shared["generator"], batch["y"], noise[:, 1 + self.noise :])
            values = values + shared["beta"] * kl(z, task.head(params, same, train=True).detach())
        return masked_mean(values, mask)

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Upload the label counts too, if they weigh the clients."""
        counts = {"mu": visit.facts["label_counts"]} if self.weighting == "counts" else {}
        return {"params": params, "n": visit.facts["n"], **counts}, visit.client

    # Server

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with a random generator, which clients do not use in round 1."""
        generator = new_generator(task, self.noise, self.hidden)
        weights = {key: torch.zeros((), dtype=task.dtype, device=task.device) for key in ("alpha", "beta")}
        return {"params": params, "generator": generator, "adam": _ADAM.init(generator["params"]), **weights}

    def broadcast(self, server: ServerTree) -> Shared:
        """Send the weights, the generator, and the weights of its examples (0 in round 1)."""
        return {key: server[key] for key in ("params", "generator", "alpha", "beta")}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average the weights, train the generator on the clients' heads, decay alpha and beta."""
        new = super().aggregate(task, server, uploads, cohort)
        new["generator"], new["adam"] = self._train_generator(task, server, uploads, cohort)
        for key, start in (("alpha", self.alpha), ("beta", self.beta)):
            weight = max(start * self.decay ** (cohort.round + 1), min(start, _FLOOR))
            new[key] = torch.full_like(server[key], weight)
        return new

    def _train_generator(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> tuple[Tree, Tree]:
        share, heads = self._shares(task, uploads), torch.vmap(task.head, in_dims=(0, None))

        def loss(generator: Tree, draw: Tree) -> tuple[Tensor, Tree]:
            y, e = draw["y"], draw["e"]
            features, buffers = generate_in_training(generator, y, e)
            logits = heads(uploads["params"], features)
            values = task.criterion(logits.flatten(0, 1), y.repeat(len(share))).reshape(len(share), -1)
            return (share[:, y] * values).mean(1).sum() + self.diversity * _alikeness(e, features), buffers

        rng, shape = np.random.default_rng(cohort.seed), (self.steps, self.batch_size)
        y = torch.from_numpy(rng.integers(task.n_classes, size=shape)).to(task.device)
        e = torch.from_numpy(rng.random((*shape, self.noise))).to(task.device, task.dtype)
        lr = self.lr * self.decay ** (cohort.round - 1)
        draws = {"y": y, "e": e}
        return server_training.train_network(task, server["generator"], loss, draws, _ADAM, server["adam"], lr)

    def _shares(self, task: Task, uploads: Tree) -> Tensor:
        """Return a_k[c], [K, C]: each client's share of the cohort's examples of a class, or the same for all."""
        clients = len(uploads["n"])
        if self.weighting == "uniform":
            return torch.full((clients, task.n_classes), 1 / clients, dtype=task.dtype, device=task.device)
        return class_shares(uploads["mu"]).to(task.dtype)


def _alikeness(e: Tensor, features: Tensor) -> Tensor:
    """Return exp(-mean of the products of distances of noise and of features, over all pairs)."""
    e, features = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (e, features))
    of_noise = torch.cdist(e, e).square() / e.shape[-1]
    of_features = torch.cdist(features, features, p=1) / features.shape[-1]
    return torch.exp(-(of_noise * of_features).mean())
