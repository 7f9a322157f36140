"""FedDecorr: `torch.var_mean` over the real examples of a batch, and each feature's correlations with the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from oracles.fedavg import Oracle


class FedDecorrOracle(Oracle):
    def loss(self, model, teacher, x, y):
        h, n = model.features(x), len(y)
        loss = F.cross_entropy(model.head(h), y)
        if n == 1:
            return loss  # one example has no correlations
        variance, mean = torch.var_mean(h, dim=0)
        standard, d, total = (h - mean) / torch.sqrt(variance + 1e-8), h.shape[1], 0.0
        for i in range(d):
            correlation = standard.T @ standard[:, i] / (n - 1)
            others = torch.cat([correlation[:i], correlation[i + 1 :]])
            if self.h["form"] == "printed":
                total = total + others.norm() ** 2 / d**2
            else:
                total = total + (n - 1) ** 2 / n * torch.mean(others**2) / d
        return loss + self.h["beta"] * total


ORACLE, CASES = FedDecorrOracle, [{"beta": 0.1, "form": "printed"}, {"beta": 0.1, "form": "released"}]
