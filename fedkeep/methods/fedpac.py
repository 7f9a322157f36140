"""FedPAC. Xu et al., "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR 2023
(arXiv:2306.11867).

Choices and deviations: docs/methods/fedpac.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.losses import masked_mean, mse
from fedkeep.method import (
    Batch,
    Bound,
    ClientState,
    Cohort,
    FedAvg,
    Local,
    Params,
    Sent,
    ServerTree,
    Shared,
    Upload,
    Visit,
    hyper,
)  # fmt: skip
from fedkeep.methods._classifier import classifier
from fedkeep.methods._per_class import LABEL_COUNTS, class_sums, mean_by_counts
from fedkeep.methods._simplex import simplex_minimum
from fedkeep.task import Task
from fedkeep.tree import Tree

SMALLEST = 1e-3  # smaller shares of other clients' heads are dropped


@dataclass(frozen=True)
class FedPAC(FedAvg):
    """FedPAC: align features with those of all clients, and give every client its own mixture of their heads."""

    name: ClassVar[str] = "fedpac"
    paper: ClassVar[str] = "Xu et al., ICLR 2023"
    averaged: ClassVar[tuple[str, ...]] = ()  # heads are mixed one client at a time
    needs: ClassVar[Mapping[str, str]] = {"classifier": ""}
    reveals: ClassVar[str] = "its share in a mixture of heads, large if the two have similar data"
    bounds: ClassVar[Mapping[str, Bound]] = {**FedAvg.bounds, "counts": LABEL_COUNTS, "V": Bound(low=0)}
    lam: float = hyper(1.0, "weight of the alignment (lambda)", search=(0.1, 10.0), low=0, test_value=5.0)
    eta: float = hyper(0.1, "learning rate of the head", search=(0.01, 0.3), above=0, test_value=0.01)
    epochs: int = hyper(1, "passes in which the head is trained, before the body", low=1, whole=True, test_value=2)
    mix: bool = hyper(True, "whether clients get a mixture of all heads, or keep their own", choices=(True, False),
                      test_value=False,
                      warning="clients upload their label counts and the mean features of their classes")  # fmt: skip

    # Server

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with the same head for every client, and no centroids."""
        C, width = task.n_classes, params[classifier(task, self.name)[0]].shape[1]
        zeros = torch.zeros(C, dtype=task.dtype, device=task.device)
        heads = {name: w.expand(task.n_clients, *w.shape).clone() for name, w in self.head(task, params).items()}
        return {"params": params, "heads": heads, "centroids": zeros.new_zeros(C, width), "known": zeros}

    def broadcast(self, server: ServerTree) -> Shared:
        """Send the weights, the centroids, and of which classes there are any."""
        return {key: server[key] for key in ("params", "centroids", "known")}

    def broadcast_to(self, server: ServerTree, client: int) -> Sent:
        """Send the client's own head."""
        return {"head": tree.take(server["heads"], client)}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average weights and centroids, and mix the heads for every client of the cohort."""
        ids, counts = torch.tensor(cohort.ids, device=uploads["n"].device), uploads["counts"]
        new = self.head(task, uploads["params"])
        if self.mix:
            shares = torch.from_numpy(mixtures(uploads["V"], uploads["h"])).to(ids.device)
            new = tree.map(lambda t: torch.tensordot(shares.to(t.dtype), t, dims=1), new)
        return {
            "params": tree.mean(uploads["params"], uploads["n"]),
            "heads": tree.map(lambda old, rows: old.index_copy(0, ids, rows), server["heads"], new),
            "centroids": mean_by_counts(uploads["centroids"], counts).to(server["centroids"].dtype),
            "known": (counts.sum(0) > 0).to(server["known"].dtype),
        }

    # Client

    def frozen(self, task: Task) -> Sequence[str]:
        """Train the body alone in local steps: the head is trained before."""
        return classifier(task, self.name)

    def head(self, task: Task, params: Params) -> Tree:
        """Return the head's weights."""
        return {name: params[name] for name in self.frozen(task)}

    def prepare(self, visit: Visit) -> Local:
        """Start with the head that was sent, and with sums of 0."""
        head, zeros = visit.sent["head"], torch.zeros_like(visit.shared["centroids"], dtype=visit.facts["n"].dtype)
        return {
            "head": head,
            "state": visit.task.optimizer.init(head),
            "sums": zeros,
            "squares": zeros[:, 0],
            "seen": zeros[:, 0],
        }

    def refine(self, visit: Visit, batch: Batch) -> Local:
        """Take a step of the head alone, and add up the features of each class and their squares."""
        task, local, body = visit.task, visit.local, visit.shared["params"]

        def loss(head: Tree) -> tuple[Tensor, Tensor]:
            features, z = task.outputs({**body, **head}, batch["x"])
            return masked_mean(task.criterion(z, batch["y"]), batch["mask"]), features

        grads, features = torch.func.grad(loss, has_aux=True)(local["head"])
        head, state = task.optimizer.update(grads, local["state"], local["head"], self.eta)
        features = _at_least_float32(features)
        sums, seen = class_sums(task, features, batch)
        squares = class_sums(task, features.square().sum(-1, keepdim=True), batch)[0][:, 0]
        added = tree.add({key: local[key] for key in ("sums", "squares", "seen")},
                         {"sums": sums, "squares": squares, "seen": seen})  # fmt: skip
        return {"head": head, "state": state, **added}

    def refined(self, visit: Visit, passes: int) -> bool:
        """Train the head for some passes."""
        return passes >= self.epochs

    def start(self, visit: Visit) -> Params:
        """Return the global body with the client's trained head."""
        return {**visit.shared["params"], **visit.local["head"]}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of CE(z, y) + lam mean((f(x) - c_y)^2), from the second round on."""
        features, z = visit.task.outputs(params, batch["x"], train=True)
        known, y = visit.shared["known"], batch["y"]
        own = _means(visit.local)[0].to(features.dtype)
        centroids = torch.where(known[:, None] > 0, visit.shared["centroids"], own)
        weight = self.lam * known.amax()
        return masked_mean(visit.task.criterion(z, y) + weight * mse(features, centroids[y]), batch["mask"])

    def measure(self, visit: Visit, params: Params, batch: Batch) -> Tree:
        """Add up the trained model's features of each class."""
        features = visit.task.outputs(params, batch["x"])[0]
        sums, seen = class_sums(visit.task, _at_least_float32(features), batch)
        return {"sums": sums, "seen": seen}

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Upload the model, the centroids after training, and V and h, which belong to the body that was sent."""
        counts, n = visit.facts["label_counts"], visit.facts["n"]
        means, squares = _means(visit.local)
        p = counts / n
        h = p[:, None] * means
        V = ((p * squares).sum() - h.square().sum()).clamp(min=0) / n
        upload = {"params": params, "n": n, "counts": counts, "centroids": _means(measured)[0], "h": h, "V": V}
        return upload, visit.client

    def personal_params(self, visit: Visit) -> Params:
        """Return the global body with the client's own head."""
        return {**visit.shared["params"], **visit.sent["head"]}


def _at_least_float32(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _means(sums: Tree) -> tuple[Tensor, Any]:
    """Return the means of the features of each class [C, d] and, if they were added up, of their squares [C]."""
    seen = sums["seen"].clamp(min=1)
    return sums["sums"] / seen[:, None], sums["squares"] / seen if "squares" in sums else None


def mixtures(V: Tensor, h: Tensor) -> np.ndarray:
    """Return every client's shares of all heads [K, K]: argmin over the simplex of its estimated error."""
    variances, flat = V.double().cpu().numpy(), h.double().cpu().flatten(1).numpy()
    rows = []
    for own in flat:
        gap = own - flat
        share = simplex_minimum(np.diag(variances) + gap @ gap.T)
        share = np.where(share > SMALLEST, share, 0.0)
        rows.append(share / share.sum())
    return np.stack(rows)
