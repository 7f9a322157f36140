"""FedALA: mixing weights as parameters of a loop over slices of the client's shuffled examples."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from oracles.fedavg import Oracle


class FedALAOracle(Oracle):
    def begin(self):
        self.kept = {}

    def train(self, k, number):
        received, own = self.model, self.kept.get(k)
        if own:
            self.model = self.mix(k, number, own)
        model = super().train(k, number)
        self.model = received
        weights = own.weights if own else [torch.ones_like(w) for w in self.top(model)]
        self.kept[k] = SimpleNamespace(model=copy.deepcopy(model), weights=weights, settled=bool(own))
        return model

    def top(self, model):
        return list(model.parameters())[-2 * self.h["p"] :]  # every layer of the MLP has a weight and a bias

    def mix(self, k, number, own):
        mixture, batch_size = copy.deepcopy(self.model), self.s["batch_size"]
        examples = self.clients[k]
        shuffled = examples[np.concatenate(self.plan(k, number).one_pass)]
        part = shuffled[: max(1, int(self.h["s"] * len(examples) + 1e-9))]
        triples = list(zip(self.top(mixture), self.top(own.model), self.top(self.model), strict=True))
        losses = []
        while True:
            for first in range(0, len(part), batch_size):
                at = part[first : first + batch_size]
                with torch.no_grad():
                    for (t, k_, g), w in zip(triples, own.weights, strict=True):
                        t.copy_(k_ + (g - k_) * w)
                mixture.zero_grad()
                loss = F.cross_entropy(mixture(self.data.x_train[at]), self.data.y_train[at])
                loss.backward()
                with torch.no_grad():
                    for i, (t, k_, g) in enumerate(triples):
                        own.weights[i] = torch.clamp(own.weights[i] - self.h["eta"] * t.grad * (g - k_), 0, 1)
            losses.append(loss.item())
            enough = len(losses) > 10 and np.std(losses[-10:]) < self.h["threshold"]
            if own.settled or enough or len(losses) == self.h["most"]:
                break
        with torch.no_grad():
            for (t, k_, g), w in zip(triples, own.weights, strict=True):
                t.copy_(k_ + (g - k_) * w)
        return mixture


_PRINTED = {"eta": 1.0, "s": 0.8, "p": 1, "threshold": 0.1, "most": 100}
ORACLE = FedALAOracle
CASES = [_PRINTED, {"eta": 5.0, "s": 0.5, "p": 2, "threshold": 1e-3, "most": 20}, {**_PRINTED, "most": 4}]
