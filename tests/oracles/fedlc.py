"""FedLC: the calibrated softmax over the client's own classes written out, one example at a time."""

from __future__ import annotations

import torch

from oracles._label_counts import LabelCountOracle


class FedLCOracle(LabelCountOracle):
    def loss(self, model, teacher, x, y):
        total = 0.0
        for z, true in zip(model(x), y.tolist(), strict=True):
            lowered = {c: z[c] - self.h["tau"] / n**0.25 for c, n in enumerate(self.n) if n}
            total = total + sum(torch.exp(s) for s in lowered.values()).log() - lowered[true]
        return total / len(y)


ORACLE, CASES = FedLCOracle, [{"tau": 0.5}, {"tau": 4.0}]
