"""FedNova: w - tau_eff sum_k p_k (w - w_k) / tau_k, one client after another."""

from __future__ import annotations

import copy

import torch

from oracles.fedavg import Oracle


class FedNovaOracle(Oracle):
    """tau_k is the displacement of a constant gradient under the clients' momentum, added up step by step."""

    def begin(self):
        self.tau = {}

    def after(self, model, k, steps, lr):
        velocity = self.tau[k] = 0.0
        for _ in range(steps):
            velocity = self.s["momentum"] * velocity + 1.0
            self.tau[k] += velocity

    def merge(self, locals_, ids):
        n = sum(len(self.clients[k]) for k in ids)
        p = {k: len(self.clients[k]) / n for k in ids}
        tau_eff = sum(p[k] * self.tau[k] for k in ids)
        before = copy.deepcopy(self.model)
        with torch.no_grad():
            for k, model in zip(ids, locals_, strict=True):
                for w, old, w_k in zip(self.model.parameters(), before.parameters(), model.parameters(), strict=True):
                    w -= tau_eff * p[k] * (old - w_k) / self.tau[k]


ORACLE, CASES = FedNovaOracle, [{}]
