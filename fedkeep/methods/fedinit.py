"""FedInit. Sun et al., "Understanding How Consistency Works in Federated Learning via Stage-wise Relaxed
Initialization", NeurIPS 2023 (arXiv:2306.05706).

Choices and deviations: docs/methods/fedinit.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeep import tree
from fedkeep.method import ClientState, FedAvg, Params, Upload, Visit, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedInit(FedAvg):
    """FedInit: a client starts beyond the global weights, on the side away from where it ended last time."""

    name: ClassVar[str] = "fedinit"
    paper: ClassVar[str] = "Sun et al., NeurIPS 2023"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    beta: float = hyper(0.1, "how far from the global weights training starts",
                        search=(0.03, 0.3), low=0, fedavg_at=0.0, test_value=0.3)  # fmt: skip
    average: str = hyper("models", "what the server averages: the clients' models, or their updates since the start",
                         choices=("models", "updates"), test_value="updates")  # fmt: skip

    def init_client(self, task: Task, params: Params) -> ClientState:
        """Use the global weights as the last local ones: a first visit starts there."""
        return {"last": params}

    def start(self, visit: Visit) -> Params:
        """Return w_g + beta (w_g - w_k), w_k being this client's last local weights."""
        return tree.map(lambda w, last: w + self.beta * (w - last), visit.shared["params"], visit.client["last"])

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Keep the local weights. Upload them, or w_g plus the distance from the start."""
        sent = params if self.average == "models" else tree.sub(params, self.relaxation(visit))
        return {"params": sent, "n": visit.facts["n"]}, {"last": params}

    def relaxation(self, visit: Visit) -> Tree:
        """Return beta (w_g - w_k): where training started, seen from w_g."""
        return tree.scale(tree.sub(visit.shared["params"], visit.client["last"]), self.beta)
