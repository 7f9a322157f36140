"""FedNova. Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020 (arXiv:2007.07481), section 5: normalised averaging.

Choices and deviations: docs/methods/fednova.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedkeep import tree
from fedkeep.bounds import Received
from fedkeep.method import Bound, ClientState, Cohort, FedAvg, Params, ServerTree, Upload, Visit
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedNova(FedAvg):
    """FedNova: average the clients' updates, each divided by its number of steps, then scale by the mean number.

    If all clients of a round take the same number of steps, it equals FedAvg.
    """

    name: ClassVar[str] = "fednova"
    paper: ClassVar[str] = "Wang et al., NeurIPS 2020"
    averaged: ClassVar[tuple[str, ...]] = ()  # each client's weights count by its own tau
    bounds: ClassVar[Mapping[str, Bound]] = {
        **FedAvg.bounds,
        "tau": Bound(low=lambda r: _tau(r, 1 - 1e-3), high=lambda r: _tau(r, 1 + 1e-3)),  # it follows from n
    }

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Upload tau_k too."""
        return {"params": params, "n": visit.facts["n"], "tau": visit.facts["effective_steps"]}, visit.client

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """w_g <- w_g - tau_eff sum_k p_k d_k, with d_k = (w_g - w_k) / tau_k.

        Written as a weighted mean: sum_k p_k/tau_k (w_g - w_k) = s (w_g - mean w), s = sum_k p_k/tau_k.
        """
        p, tau = uploads["n"] / uploads["n"].sum(), uploads["tau"]
        average, step = tree.mean(uploads["params"], p / tau), (p * tau).sum() * (p / tau).sum()
        return {"params": tree.map(lambda w, a: w - step * (w - a), server["params"], average)}


def _tau(received: Received, factor: float) -> float:
    return received.effective_steps * factor
