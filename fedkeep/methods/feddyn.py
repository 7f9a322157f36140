"""FedDyn. Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, algorithm 1.

Where the paper leaves a choice:

- It minimises the local objective exactly; here, as in its own experiments, a few epochs of the clients' optimiser
  stand in. The terms enter the gradient before clipping and momentum. g_k is then an estimate of the local gradient.
- The weights are averaged uniformly, as printed: n_k is uploaded, as by every method here, and not used.
- m, the number of all devices, counts clients without examples too, which never take part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep import tree
from fedkeep.method import Cohort, FedAvg, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedDyn(FedAvg):
    """FedDyn: bend every local objective so that its minimum is the global one, by -<g_k, w> + alpha/2 ||w - w_g||^2.

    alpha is the best of 1, 0.1, 0.01 and 0.001 in FedKA's comparison.
    """

    name: ClassVar[str] = "feddyn"
    paper: ClassVar[str] = "Acar et al., ICLR 2021"
    alpha: float = hyper(0.1, "weight of the dynamic regulariser", above=0, other=1.0)

    def init_server(self, task: Task, params: Tree) -> Tree:
        """Start with h = 0."""
        return {"params": params, "h": tree.zeros_like(params)}

    def init_client(self, task: Task, params: Tree) -> Tree:
        """Start with g_k = 0."""
        return {"g_k": tree.zeros_like(params)}

    def prepare(self, task: Task, shared: Tree, client: Tree, facts: Tree) -> Tree:
        """Hand on g_k."""
        return {"g_k": client["g_k"]}

    def correct(self, grads: Tree, params: Tree, shared: Tree, local: Tree) -> Tree:
        """Return g - g_k + alpha (w - w_g)."""

        def bend(g: Tensor, g_k: Tensor, w: Tensor, w_g: Tensor) -> Tensor:
            return g - g_k + self.alpha * (w - w_g)

        return tree.map(bend, grads, local["g_k"], params, shared["params"])  # type: ignore[no-any-return]

    def finish(
        self, shared: Tree, params: Tree, local: Tree, client: Tree, facts: Tree, measured: Tree
    ) -> tuple[Tree, Tree]:
        """Keep g_k - alpha (w_k - w_g)."""
        moved = tree.sub(params, shared["params"])
        g_k = tree.sub(client["g_k"], tree.scale(moved, self.alpha))
        return {"params": params, "n": facts["n"]}, {"g_k": g_k}

    def aggregate(self, task: Task, server: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """Move h by -alpha/N times the sum of (w_k - w_g); the next weights are the uniform mean - h/alpha."""
        average, share = tree.mean(uploads["params"]), len(cohort.ids) / task.n_clients
        moved = tree.sub(average, server["params"])  # the sum over the cohort of K clients is K times this
        h = tree.sub(server["h"], tree.scale(moved, self.alpha * share))
        return {"params": tree.sub(average, tree.scale(h, 1 / self.alpha)), "h": h}
