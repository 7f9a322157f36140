"""FedFOMO with a list of models at the server and a dict of weights per client, one model at a time."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedkeep.data.seeds import server_seed
from oracles.fedavg import Oracle


class FedFOMOOracle(Oracle):
    def begin(self):
        self.hold_out = self.h["validation"]
        self.newest, self.own, self.before = {}, {}, {}  # by client
        self.preference = {k: dict.fromkeys(range(len(self.clients)), 0.0) for k in range(len(self.clients))}
        self.draws = None
        self.number = 0

    def run(self, rounds):
        self.uploaded = {}
        return super().run(rounds)

    def vector(self, model):
        return parameters_to_vector(model.parameters()).detach()

    def loss_on(self, theta, at):
        model = copy.deepcopy(self.model)
        vector_to_parameters(theta, model.parameters())
        with torch.no_grad():
            return float(F.cross_entropy(model(self.data.x_train[at]), self.data.y_train[at]))

    def candidates(self, k):
        others = [j for j in sorted(self.newest) if j != k]
        chosen, epsilon = [], self.h["epsilon"] - self.h["decay"] * self.number
        for slot in range(min(self.h["M"], len(others))):
            left = [j for j in others if j not in chosen]
            explores = self.draws[k, 0, slot] < epsilon
            score = (lambda j: -self.draws[k, 1, j]) if explores else self.preference[k].get
            chosen.append(max(left, key=score))
        return chosen

    def train(self, k, number):
        average = self.model
        own, before = self.own.get(k, self.vector(average)), self.before.get(k, self.vector(average))
        plan = self.plan(k, number)
        at = self.clients[k][plan.held] if len(plan.held) else self.clients[k]
        others, weights = self.candidates(k), {}
        if others:
            for j, theta in [(k, own), *((j, self.newest[j]) for j in others)]:
                gain = self.loss_on(before, at) - self.loss_on(theta, at)
                weights[j] = gain / (float((theta - before).norm()) + 1e-5)
        good = {j: w for j, w in weights.items() if w > 0}
        theta = own
        if good:
            theta = sum(w / sum(good.values()) * (own if j == k else self.newest[j]) for j, w in good.items())
        self.model = copy.deepcopy(average)
        vector_to_parameters(theta.clone(), self.model.parameters())
        model = super().train(k, number)
        self.model = average
        self.uploaded[k] = {j: w for j, w in weights.items() if j != k}
        self.before[k], self.own[k] = theta, self.vector(model)
        return model

    def merge(self, locals_, ids):
        super().merge(locals_, ids)
        self.number += 1
        for k in ids:
            self.newest[k] = self.own[k]
            for j, w in self.uploaded.pop(k).items():
                self.preference[k][j] += w
        seed = int(server_seed(self.s["seed"], self.number))
        self.draws = torch.rand(len(self.clients), 2, len(self.clients), generator=torch.Generator().manual_seed(seed))


_PRINTED = {"M": 4, "validation": 0.2, "epsilon": 0.0, "decay": 0.05}
ORACLE = FedFOMOOracle
CASES = [
    _PRINTED,
    {**_PRINTED, "M": 1, "validation": 0.5},
    {**_PRINTED, "M": 2, "epsilon": 0.9, "decay": 0.2},
    {**_PRINTED, "M": 2, "validation": 0.0},
]
