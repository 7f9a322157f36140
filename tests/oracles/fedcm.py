"""FedCM: the mean update of the last round, per step and unit of its learning rate, in every gradient."""

from __future__ import annotations

import math

import torch

from oracles.fedavg import Oracle


class FedCMOracle(Oracle):
    def begin(self):
        self.last, self.last_lr = {n: torch.zeros_like(p) for n, p in self.model.named_parameters()}, 1.0

    def train(self, k, number):
        steps = self.s["epochs"] * math.ceil(len(self.clients[k]) / self.s["batch_size"])
        velocity = self.moved = 0.0  # how far a constant gradient of 1 moves, in learning rates
        for _ in range(steps):
            velocity = self.s["momentum"] * velocity + 1.0
            self.moved += velocity
        self.lr = self.s["lr"] * self.s["lr_decay"] ** (number - 1)
        return super().train(k, number)

    def adjust(self, model, k):
        for n, p in model.named_parameters():
            p.grad = torch.lerp(-self.last[n] / (self.moved * self.last_lr), p.grad, self.h["alpha"])

    def merge(self, locals_, ids):
        before = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        super().merge(locals_, ids)
        with torch.no_grad():
            for n, p in self.model.named_parameters():
                self.last[n] = p - before[n]
                p.copy_(before[n] + self.h["eta_g"] * self.last[n])
        self.last_lr = self.lr


ORACLE, CASES = FedCMOracle, [{"alpha": 0.1, "eta_g": 1.0}, {"alpha": 0.6, "eta_g": 0.7}]
