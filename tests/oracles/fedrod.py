"""FedRoD's balanced softmax, written out as products of counts and exponentials, one example at a time.

The personal heads are linear layers of their own, with an optimiser of their own, on features and logits that have no
gradient.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from oracles._label_counts import LabelCountOracle


class FedRoDOracle(LabelCountOracle):
    def begin(self):
        self.heads = {}

    def train(self, k, number):
        if self.h["personal_head"]:
            if k not in self.heads:
                self.heads[k] = copy.deepcopy(self.model.classifier)
                for w in self.heads[k].parameters():
                    torch.nn.init.zeros_(w)
            self.head, lr = self.heads[k], self.s["lr"] * self.s["lr_decay"] ** (number - 1)
            options = {"momentum": self.s["momentum"], "weight_decay": self.s["weight_decay"]}
            self.sgd = torch.optim.SGD(self.head.parameters(), lr, **options)
        return super().train(k, number)

    def loss(self, model, teacher, x, y):
        if self.h["personal_head"]:
            with torch.no_grad():
                features = model.features(x)
                generic = model.head(features)
            self.sgd.zero_grad()
            F.cross_entropy(generic + self.head(features), y).backward()
            self.sgd.step()
        total = 0.0
        for z, true in zip(model(x), y.tolist(), strict=True):
            terms = [n ** self.h["gamma"] * torch.exp(z[c]) for c, n in enumerate(self.n)]
            total = total - torch.log(terms[true] / sum(terms))
        return total / len(y)

    def personal_logits(self, k, x):
        """Return the sum of both heads' logits."""
        with torch.no_grad():
            return self.model(x) + self.heads[k](self.model.features(x))


ORACLE = FedRoDOracle
CASES = [{"gamma": 1.0, "personal_head": False}, {"gamma": 0.4, "personal_head": True}]
