"""FedKeep, one example, one class and one client at a time; the velocity as the recursion v <- m v + mean update."""

from __future__ import annotations

import copy

import torch

from oracles.fedavg import Oracle


class FedKeepOracle(Oracle):
    def begin(self):
        self.v = [torch.zeros_like(p) for p in self.model.parameters()]
        self.C = self.data.n_classes

    def ahead(self):
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for p, v in zip(model.parameters(), self.v, strict=True):
                p.add_(v, alpha=self.h["server_momentum"])
        return model

    def train(self, k, number):
        labels = self.data.y_train[self.clients[k]].tolist()
        self.share = [labels.count(c) / len(labels) for c in range(self.C)]
        velocity, self.reach = 0.0, 0.0  # how far a gradient of 1 moves a weight at the learning rate of round 1
        for _ in range(self.plan(k, number).steps):
            velocity = self.s["momentum"] * velocity + 1.0
            self.reach += self.s["lr"] * velocity
        own, self.model = self.model, self.ahead()
        try:
            return super().train(k, number)
        finally:
            self.model = own

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
        average, sent = self.ahead(), self.ahead()
        sizes = [len(self.clients[k]) for k in ids]
        lists = [list(model.parameters()) for model in locals_]
        with torch.no_grad():
            for i, p in enumerate(average.parameters()):
                p.copy_(sum(n * own[i] for n, own in zip(sizes, lists, strict=True)) / sum(sizes))
            if self.h["rows"]:
                self.merge_rows(average, sent, locals_, ids)
            pairs = zip(self.model.parameters(), average.parameters(), sent.parameters(), strict=True)
            for i, (p, a, s) in enumerate(pairs):
                self.v[i] = self.h["server_momentum"] * self.v[i] + (a - s)
                p.add_(self.v[i])

    def merge_rows(self, average, sent, locals_, ids):
        for name in ("weight", "bias"):
            rows, old = getattr(average.classifier, name), getattr(sent.classifier, name)
            for c in range(self.C):
                counts = [self.data.y_train[self.clients[k]].tolist().count(c) for k in ids]
                sums = [n * getattr(m.classifier, name)[c] for n, m in zip(counts, locals_, strict=True)]
                rows[c] = sum(sums) / sum(counts) if sum(counts) else old[c]


ORACLE = FedKeepOracle
CASES = [
    {"push": 0.3, "server_momentum": 0.85, "rows": True, "centre": True},
    {"push": 5.0, "server_momentum": 0.0, "rows": False, "centre": False},
]
