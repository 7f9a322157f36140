"""MOON, eq. 3-5: two-way cross-entropy over the cosines of the features, one example at a time."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from oracles.fedavg import Oracle


class MOONOracle(Oracle):
    def begin(self):
        self.previous = {}

    def train(self, k, number):
        self.k = k
        return super().train(k, number)

    def loss(self, model, teacher, x, y):
        mu, tau, total = self.h["mu"], self.h["tau"], 0.0
        previous = self.previous.get(self.k, teacher)
        with torch.no_grad():
            h_g, h_p = teacher.features(x), previous.features(x)
        h = model.features(x)
        for i in range(len(y)):
            similar = [h[i] @ other[i] / (h[i].norm() * other[i].norm()) / tau for other in (h_g, h_p)]
            total = total + F.cross_entropy(torch.stack(similar)[None], torch.tensor([0]))
        return F.cross_entropy(model(x), y) + mu * total / len(y)

    def after(self, model, k, steps, lr):
        self.previous[k] = copy.deepcopy(model).eval()


ORACLE, CASES = MOONOracle, [{"mu": 1.0, "tau": 0.5}, {"mu": 5.0, "tau": 0.2}]
