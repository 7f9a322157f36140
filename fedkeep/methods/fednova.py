"""FedNova. Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, section 5: normalised averaging.

Where the paper leaves a choice:

- tau_k is the number of *effective* steps (see `fedkeep.optim`), the paper's ||a_k||_1: with a momentum of r,
  (t - r (1 - r^t)/(1 - r))/(1 - r) after t steps. Weight decay is not counted in; Adam counts its steps.
- p_k = n_k / n over the clients of the round, not over all of them; tau_eff = sum_k p_k tau_k.
- No proximal term, no momentum at the server, no control variates. FedNTD's released code has control variates
  switched on and never calls one of its updates, so its row in that paper's tables need not come out of this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeep import tree
from fedkeep.method import Cohort, FedAvg
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedNova(FedAvg):
    """FedNova: average the clients' *directions*, each divided by its number of steps, then go as far as the mean.

    Where all clients of a round take the same number of steps, it is FedAvg.
    """

    name: ClassVar[str] = "fednova"
    paper: ClassVar[str] = "Wang et al., NeurIPS 2020"

    def finish(
        self, shared: Tree, params: Tree, local: Tree, client: Tree, facts: Tree, measured: Tree
    ) -> tuple[Tree, Tree]:
        """Upload tau_k too."""
        return {"params": params, "n": facts["n"], "tau": facts["effective_steps"]}, client

    def aggregate(self, task: Task, server: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """w_g <- w_g - tau_eff sum_k p_k d_k, with d_k = (w_g - w_k) / tau_k.

        Written as a weighted mean: sum_k p_k/tau_k (w_g - w_k) = s (w_g - mean w), s = sum_k p_k/tau_k.
        """
        p, tau = uploads["n"] / uploads["n"].sum(), uploads["tau"]
        average, step = tree.mean(uploads["params"], p / tau), (p * tau).sum() * (p / tau).sum()
        return {"params": tree.map(lambda w, a: w - step * (w - a), server["params"], average)}
