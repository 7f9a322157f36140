"""FedKA, eq. 2-3 and algorithm 1, with sets of classes, lists of examples and boolean channels."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from fedkeep.data import make_plan
from oracles.fedavg import Oracle


class FedKAOracle(Oracle):
    def train(self, k, number):
        own, C = self.clients[k], self.data.n_classes
        labels = self.data.y_train[own]
        noise = make_plan(self.s["seed"], number, k, len(own), self.s["epochs"], self.s["batch_size"]).noise
        counts = np.bincount(labels, minlength=C)
        missing = [c for c in range(C) if counts[c] == 0]
        scarce = [c for c in range(C) if counts[c] > 0 and counts[c] / len(own) < self.h["gamma"]]
        self.kept = torch.tensor([c in missing + scarce for c in range(C)])
        classes = {"both": missing + scarce, "missing": missing, "non_dominant": scarce}[self.h["parts"]]
        while len(classes) > self.h["mu"]:  # the plan gives no noise per class: Park and Miller's generator, x_c
            classes = sorted(classes, key=lambda c: self.lehmer(noise[0], c + 1))[1:]
        self.anchor = [self.shared(c) if c in missing else self.own(c, own, labels, noise) for c in classes]
        return super().train(k, number)

    def lehmer(self, u, times):
        x = int(u * (2**31 - 1))
        for _ in range(times):
            x = 48271 * x % (2**31 - 1)
        return x

    def shared(self, c):
        return next(x for x, y in zip(self.data.public.x, self.data.public.y, strict=True) if y == c)

    def own(self, c, own, labels, noise):
        mine = [i for i in range(len(own)) if labels[i] == c]
        with torch.no_grad():
            loss = {
                i: float(F.cross_entropy(self.model(self.data.x_train[own[i]][None]), labels[i : i + 1])) for i in mine
            }
        key = {"random": noise.__getitem__, "hard": loss.get, "proficient": lambda i: -loss[i]}[self.h["sampling"]]
        return self.data.x_train[own[max(mine, key=key)]]

    def loss(self, model, teacher, x, y):
        total = F.cross_entropy(model(x), y)
        for example in self.anchor:
            gap = (teacher(example[None]).detach() - model(example[None]))[0][self.kept]
            distance = (gap * gap).sum() if self.h["reduce"] == "sum" else (gap * gap).mean()
            total = total + self.h["beta"] / len(self.anchor) * distance
        return total

    def merge(self, locals_, ids):
        super().merge(locals_, ids)
        if self.h["recentre"]:
            with torch.no_grad():
                for p in self.model.classifier.parameters():
                    p -= p.mean(0, keepdim=True)


_PRINTED = {
    "beta": 0.01,
    "gamma": 0.5,
    "mu": 10,
    "sampling": "random",
    "parts": "both",
    "reduce": "sum",
    "recentre": False,
}
ORACLE = FedKAOracle
CASES = [
    _PRINTED,
    {**_PRINTED, "gamma": 0.05, "recentre": True},
    {**_PRINTED, "beta": 0.03, "mu": 1, "recentre": True},
    {**_PRINTED, "mu": 2},
    {**_PRINTED, "beta": 0.1, "reduce": "mean"},
    {**_PRINTED, "sampling": "hard"},
    {**_PRINTED, "sampling": "proficient", "recentre": True},
    {**_PRINTED, "parts": "missing", "mu": 2},
    {**_PRINTED, "parts": "non_dominant"},
]
