"""SCAFFOLD. Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
algorithm 1 with option II.

Where the paper leaves a choice: with a momentum of r the displacement of a client is that of its *effective* steps
(see `fedkeep.optim`), so those stand in option II's denominator; without momentum they are the steps. The weights
are averaged by n_k, as for every method here; the control variates uniformly, as printed. Option II estimates a
gradient from a displacement, which means what it should under SGD; under Adam it is a normalised gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeep import tree
from fedkeep.method import Cohort, FedAvg, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """SCAFFOLD: correct every local gradient by c - c_k, the drift of the client away from the average."""

    name: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    eta_g: float = hyper(1.0, "global step size", above=0, other=0.5)

    def init_server(self, task: Task, params: Tree) -> Tree:
        """Start with c = 0."""
        return {"params": params, "c": tree.zeros_like(params)}

    def broadcast(self, server: Tree) -> Tree:
        """Send the weights and c."""
        return {"params": server["params"], "c": server["c"]}

    def init_client(self, task: Task, params: Tree) -> Tree:
        """Start with c_k = 0."""
        return {"c_k": tree.zeros_like(params)}

    def prepare(self, task: Task, shared: Tree, client: Tree, facts: Tree) -> Tree:
        """Make the correction c - c_k."""
        return {"correction": tree.sub(shared["c"], client["c_k"])}

    def correct(self, grads: Tree, params: Tree, shared: Tree, local: Tree) -> Tree:
        """Return g + c - c_k."""
        return tree.add(grads, local["correction"])

    def finish(
        self, shared: Tree, params: Tree, local: Tree, client: Tree, facts: Tree, measured: Tree
    ) -> tuple[Tree, Tree]:
        """Option II: c_k' = c_k - c + (w_g - w) / (effective steps * lr); upload the change of c_k."""
        gradient = tree.scale(tree.sub(shared["params"], params), 1 / (facts["effective_steps"] * facts["lr"]))
        dc = tree.sub(gradient, shared["c"])
        return {"params": params, "n": facts["n"], "dc": dc}, {"c_k": tree.add(client["c_k"], dc)}

    def aggregate(self, task: Task, server: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """Move by eta_g towards the average, and c by K/N of the mean change."""
        average = tree.mean(uploads["params"], uploads["n"])
        params = tree.map(lambda w, a: w + self.eta_g * (a - w), server["params"], average)
        share = len(cohort.ids) / task.n_clients
        c = tree.map(lambda c, dc: c + share * dc, server["c"], tree.mean(uploads["dc"]))
        return {"params": params, "c": c}
