"""FedDistill+: a list of logits for every client and class, the teacher's mean formed client by client."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from oracles.fedavg import Oracle


class FedDistillOracle(Oracle):
    """Other than fedkeep's server this one remembers the logits of every client, as long as their memory lasts."""

    def begin(self):
        self.logits = {}  # client -> class -> logits of its examples, one after another
        self.number = 0

    def train(self, k, number):
        self.k, self.number, self.fresh = k, number, {c: [] for c in range(4)}
        self.targets = {} if number == 1 else {c: self.target(c) for c in range(4)}
        model = super().train(k, number)
        self.uploaded[k] = self.fresh
        return model

    def run(self, rounds):
        self.uploaded = {}
        return super().run(rounds)

    def target(self, c):
        """Return the teacher's logits for a class, or None where nobody teaches it."""
        if self.h["teacher"] == "uniform":
            return torch.zeros(4, dtype=torch.float64)
        others = [self.logits[j][c] for j in self.logits if j != self.k and self.logits[j][c]]
        divisor = len(others) if self.h["divide_by"] == "holders" else len(self.clients) - 1
        if self.h["divide_by"] == "holders" and not others:
            return None
        return sum((torch.stack(mine).mean(0) for mine in others), torch.zeros(4, dtype=torch.float64)) / divisor

    def loss(self, model, teacher, x, y):
        z, T = model(x), self.h["T"]
        value = F.cross_entropy(z, y)
        for row, c in zip(z, y.tolist(), strict=True):
            self.fresh[c].append(row.detach())
            if self.targets.get(c) is not None:
                target = F.softmax(self.targets[c] / T, 0)
                far = F.kl_div(F.log_softmax(row / T, 0), target, reduction="sum")
                value = value + self.h["lam"] * T**2 * far / len(y)
        return value

    def merge(self, locals_, ids):
        super().merge(locals_, ids)
        for k in ids:
            kept = self.logits.get(k, {c: [] for c in range(4)}) if self.h["memory"] == "run" else None
            self.logits[k] = {c: (kept[c] if kept else []) + self.uploaded[k][c] for c in range(4)}


ORACLE = FedDistillOracle
CASES = [
    {"lam": 0.1, "T": 1.0, "teacher": "logits", "memory": "run", "divide_by": "clients"},
    {"lam": 1.0, "T": 2.0, "teacher": "logits", "memory": "visit", "divide_by": "holders"},
    {"lam": 0.5, "T": 3.0, "teacher": "uniform", "memory": "run", "divide_by": "clients"},
]
