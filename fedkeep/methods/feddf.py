"""FedDF. Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020
(arXiv:2006.07242), algorithm 1.

Choices and deviations: docs/methods/feddf.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedkeep import optim, server_training, tree
from fedkeep.losses import kl
from fedkeep.method import Cohort, FedAvg, Params, ServerTree, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedDF(FedAvg):
    """FedDF: after averaging, distil the ensemble of the clients' models into the global one, on unlabelled data."""

    name: ClassVar[str] = "feddf"
    paper: ClassVar[str] = "Lin et al., NeurIPS 2020"
    averaged: ClassVar[tuple[str, ...]] = ()  # each client's model is a teacher
    lr: float = hyper(
        1e-3,
        "Adam's learning rate on the server, with cosine decay to 0",
        search=(0.0001, 0.01),
        above=0,
        test_value=1e-2,
    )
    batch_size: int = hyper(128, "batch size on the server", low=1, whole=True, test_value=2)
    max_steps: int = hyper(1000, "maximum server steps per round", low=0, whole=True, fedavg_at=0, test_value=3)
    patience: int = hyper(100, "server steps without improvement before training stops", low=1, whole=True,
                          test_value=1, test_with={"lr": 0.1, "batch_size": 2})  # fmt: skip
    include_average: bool = hyper(False, "let the average itself be a candidate of the early stopping",
                                  choices=(True, False), test_value=True,
                                  test_with={"lr": 0.1, "batch_size": 2})  # fmt: skip

    average_of: str = hyper("logits", "what of the clients' models the teacher averages",
                            search=("logits", "probabilities"), choices=("logits", "probabilities"),
                            test_value="probabilities")  # fmt: skip

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Raise without public data."""
        server_training.require_public(task, self.name, validation=True)
        return {"params": params}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average, then minimise KL(teacher || softmax(z)) on the public inputs; the teacher averages the clients."""
        average = super().aggregate(task, server, uploads, cohort)["params"]
        public = server_training.require_public(task, self.name, validation=True)
        teacher, teacher_val = (self._teacher(task, uploads["params"], x) for x in (public.x, public.x_val))

        def loss(w: Params, at: Tensor) -> Tensor:
            return kl(task.apply(w, tree.take(public.x, at), train=True), teacher[at]).mean()

        def check(w: Params) -> Tensor:
            return kl(server_training.logits(task, w, public.x_val), teacher_val).mean()

        options = server_training.Options(
            optimizer=optim.Adam(),
            lr=lambda step: self.lr / 2 * (1 + math.cos(math.pi * step / self.max_steps)),
            batch_size=self.batch_size,
            steps=self.max_steps,
            patience=self.patience,
            include_start=self.include_average,
        )
        params = server_training.train(task, average, loss, check, len(teacher), cohort.seed, options)
        return {"params": params}

    def _teacher(self, task: Task, clients: Tree, x: Any) -> Tensor:
        """Return the teacher's logits: the mean of the clients', or the logarithm of their mean probabilities."""
        logits = server_training.ensemble(task, clients, x)
        if self.average_of == "logits":
            return logits.mean(0)
        return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))
