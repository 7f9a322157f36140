"""Flashback. Aljahdali et al., "Flashback: Understanding and Mitigating Forgetting in Federated Learning", 2024
(arXiv:2402.05558), eq. 3 and algorithm 1; ablations: appendix B and E.

Choices and deviations: docs/methods/flashback.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep import server_training, tree
from fedkeep.losses import dynamic_alpha, dynamic_kl, masked_mean, not_true_kl
from fedkeep.method import (
    Batch,
    Bound,
    ClientState,
    Cohort,
    FedAvg,
    Local,
    Note,
    Params,
    ServerTree,
    Shared,
    Upload,
    Visit,
    hyper,
)  # fmt: skip
from fedkeep.methods._per_class import LABEL_COUNTS
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class Flashback(FedAvg):
    """Flashback: distil at the clients and on the server, each teacher weighted by the label counts it has seen."""

    name: ClassVar[str] = "flashback"
    paper: ClassVar[str] = "Aljahdali et al., arXiv 2024"
    averaged: ClassVar[tuple[str, ...]] = ()  # each client's model is a teacher
    bounds: ClassVar[Mapping[str, Bound]] = {
        **FedAvg.bounds,
        "mu": LABEL_COUNTS,
        "r": Bound(whole=True, low=1, high=lambda r: r.round),  # at most one visit per round
    }
    gamma: float = hyper(0.025, "share of its label counts that a client adds to the global ones at a visit",
                         search=(0.001, 0.1), above=0, high=1, test_value=0.5)  # fmt: skip
    T: float = hyper(3.0, "temperature of the distilled softmaxes", search=(1.0, 5.0), above=0, test_value=1.0)
    E_s: int = hyper(20, "maximum server epochs per round", low=1, whole=True, test_value=1)
    batch_size: int = hyper(50, "batch size on the server", low=1, whole=True, test_value=2)
    patience: int = hyper(2, "server epochs without improvement before training stops", low=1, whole=True,
                          test_value=5, test_with={"batch_size": 3})  # fmt: skip
    include_average: bool = hyper(False, "let the average itself be a candidate of the server's early stopping",
                                  choices=(True, False), test_value=True,
                                  test_with={"T": 1.0, "batch_size": 2})  # fmt: skip
    knowledge: str = hyper("label_count", "measure of what a model knows",
                           choices=("label_count", "label_share", "mean_probability"), test_value="label_share"
                           )  # fmt: skip
    side: str = hyper("both", "where to distil", choices=("both", "client", "server"), test_value="client")
    client_loss: str = hyper("dynamic", "the clients' distillation", choices=("dynamic", "ntd"), test_value="ntd")

    # Clients

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of alpha_s[y] CE(z, y) + sum_c alpha[c] p_g[c] log(p_g[c] / p[c]) (eq. 3)."""
        z, y, note = visit.task.apply(params, batch["x"], train=True), batch["y"], batch["note"]
        value, local = visit.task.criterion(z, y), visit.local
        if self._uses_dynamic_loss:
            value = local["alpha_s"][y] * value + dynamic_kl(z, note["z_g"], local["alpha"], self.T)
        elif self.side != "server":
            value = value + not_true_kl(z, note["z_g"], y)
        return masked_mean(value, batch["mask"])

    def init_client(self, task: Task, params: Params) -> ClientState:
        """Start with r = 0 visits."""
        return {"r": torch.zeros((), dtype=task.dtype, device=task.device)}

    def prepare(self, visit: Visit) -> Local:
        """Weigh the client's own knowledge against the global model's (line 6)."""
        if not self._uses_dynamic_loss:
            return {}
        counts = visit.facts["label_counts"]
        nu = counts if self.knowledge == "label_count" else counts / visit.facts["n"]
        alpha_s, alpha = dynamic_alpha(nu, visit.shared["pi"][None])
        return {"alpha_s": alpha_s, "alpha": alpha[0]}

    def annotate(self, visit: Visit, x: Any, y: Tensor) -> Note:
        """Note the global model's logits z_g."""
        return {} if self.side == "server" else {"z_g": visit.task.apply(visit.shared["params"], x)}

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Count the visit; upload it, and the label counts if they measure knowledge."""
        r, facts = visit.client["r"] + 1, visit.facts
        counts = {} if self.knowledge == "mean_probability" else {"mu": facts["label_counts"]}
        return {"params": params, "n": facts["n"], "r": r, **counts}, {"r": r}

    # Server

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with pi = 0: the global model knows nothing."""
        if self._needs_public_set:
            server_training.require_public(task, self.name, validation=self.side != "client")
        return {"params": params, "pi": torch.zeros(task.n_classes, dtype=task.dtype, device=task.device)}

    def broadcast(self, server: ServerTree) -> Shared:
        """Send the weights, and pi if the clients' loss uses it."""
        return {"params": server["params"], **({"pi": server["pi"]} if self._uses_dynamic_loss else {})}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average (line 10), distil from the clients' models and the last global one (11-13), update pi (14-19)."""
        params, pi = super().aggregate(task, server, uploads, cohort)["params"], server["pi"]
        x = server_training.require_public(task, self.name).x if self._needs_public_set else None
        teachers = server_training.ensemble(task, uploads["params"], x) if self._needs_public_set else pi.new_zeros(0)
        mu = teachers.softmax(-1).mean(1) if self.knowledge == "mean_probability" else self._knowledge(uploads)
        if self.side != "client":
            teachers = torch.cat([teachers, server_training.logits(task, server["params"], x)[None]])
            params = self._distil(task, params, pi, teachers, torch.cat([mu, pi[None]]), cohort)
        growing = (uploads["r"] <= math.floor(1 / self.gamma + 1e-9)).to(pi.dtype)
        return {"params": params, "pi": pi + self.gamma * (growing[:, None] * mu).sum(0)}

    def _distil(self, task: Task, params: Params, nu: Tensor, teachers: Tensor, mu: Tensor, cohort: Cohort) -> Params:
        """Minimise eq. 3 on the public set; teachers are logits [K, n, C], mu [K, C] their counts."""
        public = server_training.require_public(task, self.name)
        alpha_s, alpha = dynamic_alpha(nu, mu)

        def loss(w: Params, at: Tensor) -> Tensor:
            z, y = task.apply(w, tree.take(public.x, at), train=True), public.y[at]
            distilled = dynamic_kl(z, teachers[:, at], alpha[:, None], self.T).sum(0)
            return (alpha_s[y] * task.criterion(z, y) + distilled).mean()

        return server_training.train_labelled(
            task,
            params,
            loss,
            cohort,
            epochs=self.E_s,
            batch_size=self.batch_size,
            patience=self.patience,
            include_start=self.include_average,
        )

    def _knowledge(self, uploads: Tree) -> Tensor:
        """Return the clients' label counts, or their shares of each client's examples, [K, C]."""
        counts: Tensor = uploads["mu"]
        return counts if self.knowledge == "label_count" else counts / uploads["n"][:, None]

    @property
    def _uses_dynamic_loss(self) -> bool:
        """Whether clients distil by eq. 3, and so need pi."""
        return self.side != "server" and self.client_loss == "dynamic"

    @property
    def _needs_public_set(self) -> bool:
        return self.side != "client" or self.knowledge == "mean_probability"
