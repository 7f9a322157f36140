"""FedACG, with the momentum as the recursion that the paper prints."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from oracles.fedavg import Oracle


class FedACGOracle(Oracle):
    def begin(self):
        self.m = [torch.zeros_like(p) for p in self.model.parameters()]

    def ahead(self):
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for p, m in zip(model.parameters(), self.m, strict=True):
                p.add_(m, alpha=self.h["lam"])
        return model

    def train(self, k, number):
        own, self.model = self.model, self.ahead()
        try:
            return super().train(k, number)
        finally:
            self.model = own

    def loss(self, model, teacher, x, y):
        weights, sent = (torch.nn.utils.parameters_to_vector(m.parameters()) for m in (model, teacher))
        return F.cross_entropy(model(x), y) + self.h["beta"] / 2 * (weights - sent.detach()).pow(2).sum()

    def merge(self, locals_, ids):
        sizes = [len(self.clients[k]) for k in ids]
        sent, lists = list(self.ahead().parameters()), [list(model.parameters()) for model in locals_]
        with torch.no_grad():
            for i, p in enumerate(self.model.parameters()):
                delta = sum(n * (own[i] - sent[i]) for n, own in zip(sizes, lists, strict=True)) / sum(sizes)
                self.m[i] = self.h["lam"] * self.m[i] + delta
                p.add_(self.m[i])


ORACLE, CASES = FedACGOracle, [{"lam": 0.85, "beta": 0.002}, {"lam": 0.4, "beta": 0.5}]
