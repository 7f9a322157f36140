"""FedKeep, one example, one class and one client at a time; the velocity by `torch.optim.SGD` at the server."""

from __future__ import annotations

import copy

import torch

from oracles.fedavg import Oracle


class FedKeepOracle(Oracle):
    def begin(self):
        self.server = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=self.h["server_momentum"])
        self.C = self.data.n_classes

    def train(self, k, number):
        labels = self.data.y_train[self.clients[k]].tolist()
        self.share = [labels.count(c) / len(labels) for c in range(self.C)]
        velocity, self.reach = 0.0, 0.0  # how far a gradient of 1 moves a weight at the learning rate of round 1
        for _ in range(self.plan(k, number).steps):
            velocity = self.s["momentum"] * velocity + 1.0
            self.reach += self.s["lr"] * velocity
        return super().train(k, number)

    def loss(self, model, teacher, x, y):
        z, total = model(x), 0.0
        with torch.no_grad():
            features = model.features(x)
            size = sum(1 + float((h * h).sum()) for h in features) / len(features)
        floor = min(1.0, self.h["push"] / (self.reach * size))
        p = torch.tensor([max(share, floor) for share in self.share], dtype=z.dtype)
        for i, label in enumerate(y.tolist()):
            shifted = z[i] + torch.log(p)
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
    {"push": 0.3, "server_momentum": 0.7, "rows": True, "centre": True},
    {"push": 5.0, "server_momentum": 0.0, "rows": False, "centre": False},
]
