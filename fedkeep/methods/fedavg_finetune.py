"""FedAvg with fine-tuning: the control of Aljahdali et al., "Flashback: Understanding and Mitigating Forgetting in
Federated Learning", 2024 (arXiv:2402.05558), section 5 and figure 6.

Choices and deviations: docs/methods/fedavg_finetune.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep import server_training, tree
from fedkeep.method import Cohort, FedAvg, Params, ServerTree, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedAvgFinetune(FedAvg):
    """FedAvg + fine-tuning: after averaging, the server trains on its labelled public examples."""

    name: ClassVar[str] = "fedavg_finetune"
    title: ClassVar[str] = "FedAvg + fine-tuning"
    paper: ClassVar[str] = "Aljahdali et al., arXiv 2024"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    E_s: int = hyper(20, "maximum server epochs per round", low=0, whole=True, fedavg_at=0, test_value=1)
    batch_size: int = hyper(50, "batch size on the server", low=1, whole=True, test_value=2)
    patience: int = hyper(2, "server epochs without improvement before training stops", low=1, whole=True,
                          test_value=5, test_with={"batch_size": 3})  # fmt: skip
    include_average: bool = hyper(False, "let the average itself be a candidate of the early stopping",
                                  choices=(True, False), test_value=True, test_with={"batch_size": 1})  # fmt: skip

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Raise without public data."""
        server_training.require_public(task, self.name, validation=True)
        return {"params": params}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average, then minimise the cross-entropy on the public set."""
        average = super().aggregate(task, server, uploads, cohort)["params"]
        public = server_training.require_public(task, self.name, validation=True)

        def loss(w: Params, at: Tensor) -> Tensor:
            z = task.apply(w, tree.take(public.x, at), train=True)
            return task.criterion(z, public.y[at]).mean()

        params = server_training.train_labelled(
            task,
            average,
            loss,
            cohort,
            epochs=self.E_s,
            batch_size=self.batch_size,
            patience=self.patience,
            include_start=self.include_average,
        )
        return {"params": params}
