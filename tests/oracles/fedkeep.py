"""FedKeep, one example, one class and one client at a time; the velocity by `torch.optim.SGD` at the server."""

from __future__ import annotations

import copy
import math

import torch

from oracles.fedavg import Oracle


class FedKeepOracle(Oracle):
    def begin(self):
        self.server = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=self.h["server_momentum"])
        self.C = self.data.n_classes

    def train(self, k, number):
        labels = self.data.y_train[self.clients[k]].tolist()
        self.log_p = [math.log(max(labels.count(c) / len(labels), self.h["floor"])) for c in range(self.C)]
        return super().train(k, number)

    def loss(self, model, teacher, x, y):
        z, total = model(x), 0.0
        for i, label in enumerate(y.tolist()):
            shifted = z[i] + torch.tensor(self.log_p, dtype=z.dtype)
            total = total + torch.logsumexp(shifted, 0) - shifted[label]
        return total / len(y)

    def adjust(self, model, k):
        if self.h["centre"]:
            for p in model.parameters():
                if p.dim() > 1:
                    for row in p.grad:
                        row -= row.sum() / row.numel()

    def merge(self, locals_, ids):
        before = copy.deepcopy(self.model)
        super().merge(locals_, ids)
        with torch.no_grad():
            if self.h["rows"]:
                self.merge_rows(before, locals_, ids)
            for p, old in zip(self.model.parameters(), before.parameters(), strict=True):
                p.grad = old - p
                p.copy_(old)
        self.server.step()

    def merge_rows(self, before, locals_, ids):
        for name in ("weight", "bias"):
            rows, old = getattr(self.model.classifier, name), getattr(before.classifier, name)
            for c in range(self.C):
                counts = [self.data.y_train[self.clients[k]].tolist().count(c) for k in ids]
                sums = [n * getattr(m.classifier, name)[c] for n, m in zip(counts, locals_, strict=True)]
                rows[c] = sum(sums) / sum(counts) if sum(counts) else old[c]


ORACLE = FedKeepOracle
CASES = [
    {"floor": 1e-3, "server_momentum": 0.7, "rows": True, "centre": True},
    {"floor": 0.1, "server_momentum": 0.0, "rows": False, "centre": False},
]
