"""FedInit: a client of an earlier round starts at (1 + beta) w_g - beta w_k."""

from __future__ import annotations

import copy

import torch

from oracles.fedavg import Oracle


class FedInitOracle(Oracle):
    def begin(self):
        self.last = {}

    def train(self, k, number):
        own, started = self.model, copy.deepcopy(self.model)
        with torch.no_grad():
            for p, last in zip(started.parameters(), self.last.get(k, own).parameters(), strict=True):
                p.copy_((1 + self.h["beta"]) * p - self.h["beta"] * last)
        self.model = started
        trained = super().train(k, number)
        self.model, self.last[k] = own, copy.deepcopy(trained)
        if self.h["average"] == "updates":
            with torch.no_grad():
                for p, start, w in zip(trained.parameters(), started.parameters(), own.parameters(), strict=True):
                    p.copy_(w + (p - start))
        return trained


CASES = [{"beta": 0.1, "average": "models"}, {"beta": 0.4, "average": "models"}, {"beta": 0.4, "average": "updates"}]
ORACLE = FedInitOracle
