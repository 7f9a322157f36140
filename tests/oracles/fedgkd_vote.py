"""FedGKD-VOTE, eq. 5: every past model a teacher, its weight by its validation loss."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F

from oracles.fedavg import Oracle


class FedGKDVoteOracle(Oracle):
    def begin(self):
        self.past = []

    def loss(self, model, teacher, x, y):
        z, M = model(x), self.h["M"]
        b, last = self.h["b"] or 1 / M, self.past[-M:]
        weights = [math.exp(-loss / b) for _, loss in last]
        total = F.cross_entropy(z, y)
        for (old, _), weight in zip(last, weights, strict=True):
            with torch.no_grad():
                p = F.softmax(old(x), 1)
            far = (p * (p.log() - F.log_softmax(z, 1))).sum() / len(y)
            total = total + self.h["lam"] * weight / sum(weights) * far
        return total

    def merge(self, locals_, ids):
        super().merge(locals_, ids)
        public = self.data.public
        with torch.no_grad():
            loss = F.cross_entropy(self.model(public.x_val), public.y_val).item()
        self.past.append((copy.deepcopy(self.model), loss))


ORACLE = FedGKDVoteOracle
CASES = [{"lam": 0.1, "M": 5, "b": 0.0}, {"lam": 0.8, "M": 2, "b": 0.7}, {"lam": 0.8, "M": 1, "b": 0.0}]
