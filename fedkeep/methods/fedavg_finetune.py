"""FedAvg with fine-tuning: the control of Aljahdali et al., "Flashback: Understanding and Mitigating Forgetting in
Federated Learning", arXiv 2024, section 5 and figure 6.

Where the paper leaves a choice: it says that the global model is fine-tuned on the labelled public data after every
aggregation, and nothing of how. So everything is as in this package's `flashback` except the loss: the clients'
optimiser with fresh momentum and the round's learning rate, no weight decay, no augmentation, batch 50, stopped by
the validation part's cross-entropy, at most 20 epochs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep import server_training, tree
from fedkeep.method import Cohort, FedAvg, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedAvgFinetune(FedAvg):
    """FedAvg + fine-tuning: after averaging, the server trains on its labelled public examples."""

    name: ClassVar[str] = "fedavg_finetune"
    paper: ClassVar[str] = "Aljahdali et al., arXiv 2024"
    E_s: int = hyper(20, "most epochs on the server a round", low=0, whole=True, neutral=0, other=1)
    batch_size: int = hyper(50, "examples a step on the server", low=1, whole=True, other=2)
    patience: int = hyper(2, "epochs without gain that end it", low=1, whole=True, other=5, within={"batch_size": 3})

    def init_server(self, task: Task, params: Tree) -> Tree:
        """Refuse to start without public data."""
        server_training.require_public(task, self.name, validation=True)
        return {"params": params}

    def aggregate(self, task: Task, server: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """Average, then descend the cross-entropy on the public set."""
        average = super().aggregate(task, server, uploads, cohort)["params"]
        public = server_training.require_public(task, self.name, validation=True)

        def loss(w: Tree, at: Tensor) -> Tensor:
            z = task.apply(w, tree.take(public.x, at), train=True)
            return task.criterion(z, public.y[at]).mean()

        how = {"epochs": self.E_s, "batch_size": self.batch_size, "patience": self.patience}
        return {"params": server_training.train_labelled(task, average, loss, cohort, **how)}
