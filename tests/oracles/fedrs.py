"""FedRS: the restricted softmax written out, one example at a time."""

from __future__ import annotations

import torch

from oracles._label_counts import LabelCountOracle


class FedRSOracle(LabelCountOracle):
    def loss(self, model, teacher, x, y):
        alpha, total = self.h["alpha"], 0.0
        for z, true in zip(model(x), y.tolist(), strict=True):
            weight = [self.factor(n, alpha) for n in self.n]
            scaled = [weight[c] * z[c] for c in range(len(self.n))]
            total = total + sum(torch.exp(s) for s in scaled).log() - scaled[true]
        return total / len(y)

    def factor(self, n, alpha):
        if self.h["form"] == "released":
            return alpha + (1 - alpha) * n / max(self.n)
        return 1.0 if n else alpha


ORACLE, CASES = FedRSOracle, [{"alpha": 0.5, "form": "printed"}, {"alpha": 0.8, "form": "released"}]
