"""SCAFFOLD, algorithm 1 with option II."""

from __future__ import annotations

import copy

import torch

from oracles.fedavg import Oracle


class ScaffoldOracle(Oracle):
    """The denominator is what a constant gradient's displacement would be, step by step."""

    def begin(self):
        self.c = {n: torch.zeros_like(p) for n, p in self.model.named_parameters()}
        self.c_k = {k: {n: torch.zeros_like(p) for n, p in self.c.items()} for k in range(len(self.clients))}
        self.changes = []

    def adjust(self, model, k):
        for n, p in model.named_parameters():
            p.grad += self.c[n] - self.c_k[k][n]

    def after(self, model, k, steps, lr):
        velocity = moved = 0.0
        for _ in range(steps):
            velocity = self.s["momentum"] * velocity + 1.0
            moved += velocity
        before = dict(self.model.named_parameters())
        new = {
            n: self.c_k[k][n] - self.c[n] + (before[n].detach() - p.detach()) / (moved * lr)
            for n, p in model.named_parameters()
        }
        self.changes.append({n: new[n] - self.c_k[k][n] for n in new})
        self.c_k[k] = new

    def merge(self, locals_, ids):
        before = copy.deepcopy(self.model)
        super().merge(locals_, ids)
        with torch.no_grad():
            for (_, p), old in zip(self.model.named_parameters(), before.parameters(), strict=True):
                p.copy_(old + self.h["eta_g"] * (p - old))
        for n in self.c:
            mean = sum(change[n] for change in self.changes) / len(ids)
            self.c[n] = self.c[n] + len(ids) / len(self.clients) * mean
        self.changes = []


ORACLE, CASES = ScaffoldOracle, [{"eta_g": 1.0}, {"eta_g": 0.7}]
