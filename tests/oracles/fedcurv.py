"""FedCurv: the penalty client by client, from the Fisher and the weights that each of them last had."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from fedkeep.data import make_plan
from oracles.fedavg import Oracle


class FedCurvOracle(Oracle):
    """Other than fedkeep's server this one remembers every client's F_j and w_j, and sums over those j != k."""

    def begin(self):
        self.seen, self.fresh = {}, {}

    def train(self, k, number):
        self.k, self.number = k, number
        return super().train(k, number)

    def loss(self, model, teacher, x, y):
        total = F.cross_entropy(model(x), y)
        for j, (fisher, other) in self.seen.items():
            if j != self.k:
                for f, p, q in zip(fisher, model.parameters(), other.parameters(), strict=True):
                    total = total + self.h["lam"] * (f * (p - q.detach()) ** 2).sum()
        return total

    def after(self, model, k, steps, lr):
        own, s = self.clients[k], self.s
        plan = make_plan(s["seed"], self.number, k, len(own), s["epochs"], s["batch_size"])
        order = plan.index.reshape(-1)[: len(own)][: self.h["s"]]
        size = 1 if self.h["fisher"] == "example" else s["batch_size"]
        squares = []
        for at in range(0, len(order), size):
            some = own[order[at : at + size]]
            value = F.cross_entropy(model(self.data.x_train[some]), self.data.y_train[some])
            squares.append([g**2 for g in torch.autograd.grad(value, list(model.parameters()))])
        self.fresh[k] = ([sum(parts) / len(squares) for parts in zip(*squares, strict=True)], copy.deepcopy(model))

    def merge(self, locals_, ids):
        super().merge(locals_, ids)
        self.seen.update(self.fresh)


ORACLE = FedCurvOracle
CASES = [
    {"lam": 1.0, "s": 500, "fisher": "example"},
    {"lam": 0.3, "s": 5, "fisher": "example"},
    {"lam": 2.0, "s": 5, "fisher": "batch"},
]
