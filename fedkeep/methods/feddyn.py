"""FedDyn. Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021 (arXiv:2111.04263), algorithm 1.

Choices and deviations: docs/methods/feddyn.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep import tree
from fedkeep.method import ClientState, Cohort, FedAvg, Grads, Local, Params, ServerTree, Upload, Visit, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedDyn(FedAvg):
    """FedDyn: add -<g_k, w> + alpha/2 ||w - w_g||^2 to every local objective, so that its minimum is the global one."""

    name: ClassVar[str] = "feddyn"
    paper: ClassVar[str] = "Acar et al., ICLR 2021"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    alpha: float = hyper(0.1, "weight of the dynamic regulariser", search=(0.003, 0.3), above=0, test_value=1.0)

    def init_client(self, task: Task, params: Params) -> ClientState:
        """Start with g_k = 0."""
        return {"g_k": tree.zeros_like(params)}

    def prepare(self, visit: Visit) -> Local:
        """Pass on g_k."""
        return {"g_k": visit.client["g_k"]}

    def correct(self, visit: Visit, params: Params, grads: Grads) -> Grads:
        """Return g - g_k + alpha (w - w_g)."""

        def corrected(g: Tensor, g_k: Tensor, w: Tensor, w_g: Tensor) -> Tensor:
            return g - g_k + self.alpha * (w - w_g)

        return tree.map(corrected, grads, visit.local["g_k"], params, visit.shared["params"])

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Keep g_k - alpha (w_k - w_g)."""
        moved = tree.sub(params, visit.shared["params"])
        g_k = tree.sub(visit.client["g_k"], tree.scale(moved, self.alpha))
        return {"params": params, "n": visit.facts["n"]}, {"g_k": g_k}

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with h = 0."""
        return {"params": params, "h": tree.zeros_like(params)}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Move h by -alpha/N times the sum of (w_k - w_g); the next weights are the uniform mean - h/alpha."""
        average, share = tree.mean(uploads["params"]), len(cohort.ids) / task.n_clients
        moved = tree.sub(average, server["params"])  # the sum over the cohort of K clients is K times this
        h = tree.sub(server["h"], tree.scale(moved, self.alpha * share))
        return {"params": tree.sub(average, tree.scale(h, 1 / self.alpha)), "h": h}
