"""FedReg: the step as its code takes it, weights changed in place, with pseudo data made batch by batch."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F

from fedkeep.data import make_plan
from fedkeep.data.seeds import REHEARSAL, generator
from oracles.fedavg import Oracle


class FedRegOracle(Oracle):
    def train(self, k, number):
        """Momentum and weight decay are those of SGD, along the way from theta to where FedReg's step ends."""
        s, own = self.s, self.clients[k]
        lr = s["lr"] * s["lr_decay"] ** (number - 1)
        model, received = copy.deepcopy(self.model).train(), copy.deepcopy(self.model)
        velocity = [torch.zeros_like(p) for p in model.parameters()]
        plan = make_plan(s["seed"], number, k, len(own), s["epochs"], s["batch_size"])
        order = own[generator(REHEARSAL, s["seed"], number, k).permutation(len(own))]
        pseudo = [
            self.fake(received, at) for at in np.split(order, range(s["batch_size"], len(order), s["batch_size"]))
        ]
        for step, (row, size) in enumerate(zip(plan.index, plan.size, strict=True)):
            at = own[row[:size]]
            end = self.step(model, received, at, pseudo[step % len(pseudo)], lr)
            with torch.no_grad():
                for p, e, v in zip(model.parameters(), end, velocity, strict=True):
                    v.mul_(s["momentum"]).add_((p - e) / lr + s["weight_decay"] * p)
                    p.sub_(lr * v)
        return model

    def fake(self, received, at):
        x, y = self.data.x_train[at], self.data.y_train[at]
        made = []
        for eta in (self.h["eta_s"], self.h["eta_p"]):
            new = x.clone()
            for _ in range(self.h["iterations"]):
                new.requires_grad_()
                new = new.detach() + eta * torch.autograd.grad(F.cross_entropy(received(new), y), new)[0].sign()
            made.append(new)
        with torch.no_grad():
            return made[0], F.softmax(received(made[0]), 1), made[1], y

    def step(self, model, received, at, pseudo, lr):
        """Return the weights at which the step ends."""
        x, y = self.data.x_train[at], self.data.y_train[at]
        start = [p.detach() for p in received.parameters()]
        theta = [p.detach() for p in model.parameters()]

        def gradient(share, weights, x, target):
            at = copy.deepcopy(model)
            with torch.no_grad():
                for p, w, w_0 in zip(at.parameters(), weights, start, strict=True):
                    p.copy_(share * w + (1 - share) * w_0)
            return torch.autograd.grad(F.cross_entropy(at(x), target), list(at.parameters()))

        theta = [w - lr * g for w, g in zip(theta, gradient(self.h["gamma"], theta, x, y), strict=True)]
        x_s, y_s, x_p, y_p = pseudo
        g2 = gradient(self.h["beta"], theta, x_s, y_s)
        g3 = gradient(self.h["beta"], theta, x_p, y_p)
        d, flat2, flat3 = (torch.cat([t.flatten() for t in ts]) for ts in (sub(theta, start), g2, g3))
        w = max(0.0, float(d @ flat2 / (flat2 @ flat2)))
        w1 = max(0.0, float((d - w * flat2) @ flat3 / (flat3 @ flat3)))
        return [t - w * a - w1 * b for t, a, b in zip(theta, g2, g3, strict=True)]

    def merge(self, locals_, ids):
        if self.h["average"] == "examples":
            super().merge(locals_, ids)
            return
        with torch.no_grad():
            for mine, *theirs in zip(self.model.parameters(), *(m.parameters() for m in locals_), strict=True):
                mine.copy_(sum(theirs) / len(theirs))


def sub(a, b):
    return [x - y for x, y in zip(a, b, strict=True)]


ORACLE = FedRegOracle
CASES = [
    {"gamma": 0.5, "beta": 0.5, "eta_s": 0.1, "eta_p": 0.001, "iterations": 10, "average": "clients"},
    {"gamma": 0.25, "beta": 1.0, "eta_s": 0.3, "eta_p": 0.05, "iterations": 2, "average": "examples"},
]
