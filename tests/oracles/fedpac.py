"""FedPAC with lists of features, torch's own optimiser for the head, and mixtures found by trying every support."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from oracles.fedavg import Oracle


class FedPACOracle(Oracle):
    def begin(self):
        self.heads, self.sent, self.centroids = {}, {}, {}

    def features_by_class(self, model, k):
        lists = {}
        for i in self.clients[k]:
            with torch.no_grad():
                lists.setdefault(int(self.data.y_train[i]), []).append(model.features(self.data.x_train[i][None])[0])
        return {c: torch.stack(one) for c, one in lists.items()}

    def train(self, k, number):
        received, s = self.model, self.s
        own, examples = copy.deepcopy(received), self.clients[k]
        own.classifier.load_state_dict(self.heads.get(k, self.first_head))
        before = self.features_by_class(own, k)
        optimizer = torch.optim.SGD(
            own.classifier.parameters(), self.h["eta"], momentum=s["momentum"], weight_decay=s["weight_decay"]
        )
        for _ in range(self.h["epochs"]):
            for batch in self.plan(k, number).one_pass:
                at = examples[batch]
                optimizer.zero_grad()
                F.cross_entropy(own(self.data.x_train[at]), self.data.y_train[at]).backward()
                optimizer.step()
        own.classifier.requires_grad_(False)  # torch leaves out what has no gradient, weight decay included
        own.zero_grad()
        self.model, self.before = own, before
        model = super().train(k, number)
        self.model = received
        n, v, h = len(examples), 0.0, {}
        for c, rows in before.items():
            share, mean = len(rows) / n, rows.mean(0)
            v += float(share * rows.square().sum(1).mean() - share**2 * mean.square().sum()) / n
            h[c] = share * mean
        after = self.features_by_class(model, k)
        self.sent[k] = SimpleNamespace(v=v, h=h, after=after, head=copy.deepcopy(model.classifier.state_dict()))
        model.requires_grad_(True)
        return model

    def loss(self, model, teacher, x, y):
        features = model.features(x)
        total = F.cross_entropy(model.classifier(features), y)
        if self.centroids:
            goals = [self.centroids.get(c, self.before[c].mean(0) if c in self.before else None) for c in y.tolist()]
            total = total + self.h["lam"] * F.mse_loss(features, torch.stack(goals))
        return total

    def run(self, rounds):
        self.first_head = copy.deepcopy(self.model.classifier.state_dict())
        return super().run(rounds)

    def merge(self, locals_, ids):
        super().merge(locals_, ids)
        every = {k: self.sent[k] for k in ids}
        self.centroids = {}
        for c in range(self.data.n_classes):
            rows = [one.after[c] for one in every.values() if c in one.after]
            if rows:
                self.centroids[c] = torch.cat(rows).mean(0)
        for k in ids:
            shares = self.mixture(k, every) if self.h["mix"] else {k: 1.0}
            self.heads[k] = {
                name: sum(share * every[j].head[name] for j, share in shares.items()) for name in every[k].head
            }

    def mixture(self, k, every):
        def gap(j, c):
            return every[k].h.get(c, 0) - every[j].h.get(c, 0)

        def product(i, j):
            classes = every[i].h.keys() | every[j].h.keys() | every[k].h.keys()
            return sum(float((gap(i, c) * gap(j, c)).sum()) for c in classes) + (every[i].v if i == j else 0.0)

        best = None
        for size in range(1, len(every) + 1):
            for chosen in itertools.combinations(every, size):
                Q = torch.tensor([[product(i, j) for j in chosen] for i in chosen], dtype=torch.float64)
                x = torch.linalg.solve(Q, torch.ones(size, dtype=torch.float64))
                x = x / x.sum()
                if bool((x >= 0).all()) and (best is None or float(x @ Q @ x) < best[0]):
                    best = float(x @ Q @ x), dict(zip(chosen, x.tolist(), strict=True))
        large = {j: share for j, share in best[1].items() if share > 1e-3}
        return {j: share / sum(large.values()) for j, share in large.items()}


_PRINTED = {"lam": 1.0, "eta": 0.1, "epochs": 1, "mix": True}
ORACLE = FedPACOracle
CASES = [_PRINTED, {**_PRINTED, "lam": 3.0, "eta": 0.03, "epochs": 2}, {**_PRINTED, "mix": False}]
