"""FedDyn, algorithm 1: the gradient of L_k(w) - <g_k, w> + alpha/2 ||w - w_g||^2 by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from oracles.fedavg import Oracle


class FedDynOracle(Oracle):
    def begin(self):
        self.pull = {n: torch.zeros_like(p) for n, p in self.model.named_parameters()}  # the paper's h
        self.g = [{n: torch.zeros_like(p) for n, p in self.model.named_parameters()} for _ in self.clients]

    def train(self, k, number):
        self.k = k
        return super().train(k, number)

    def loss(self, model, teacher, x, y):
        total, start = F.cross_entropy(model(x), y), dict(teacher.named_parameters())
        for n, p in model.named_parameters():
            gap = p - start[n].detach()
            total = total - (self.g[self.k][n] * p).sum() + self.h["alpha"] / 2 * (gap * gap).sum()
        return total

    def after(self, model, k, steps, lr):
        for n, p in model.named_parameters():
            start = dict(self.model.named_parameters())[n]
            self.g[k][n] = self.g[k][n] - self.h["alpha"] * (p - start).detach()

    def merge(self, locals_, ids):
        alpha, everyone = self.h["alpha"], len(self.clients)
        with torch.no_grad():
            for n, p in self.model.named_parameters():
                ours = [dict(m.named_parameters())[n] for m in locals_]
                self.pull[n] = self.pull[n] - alpha / everyone * sum(w - p for w in ours)
                p.copy_(sum(ours) / len(ours) - self.pull[n] / alpha)


ORACLE, CASES = FedDynOracle, [{"alpha": 0.1}, {"alpha": 0.7}]
