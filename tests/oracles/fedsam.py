"""FedSAM and FedASAM: the loss as a function of w + e, e constant, called through `torch.func.functional_call`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.func import functional_call

from oracles.fedavg import Oracle


class FedSAMOracle(Oracle):
    def loss(self, model, teacher, x, y):
        weights = dict(model.named_parameters())
        moved = self.perturbation(weights, F.cross_entropy(model(x), y))
        return F.cross_entropy(functional_call(model, {n: w + moved[n] for n, w in weights.items()}, (x,)), y)

    def perturbation(self, weights, loss):
        """ASAM's e = rho T^2 g / ||T g||; SAM's is that of T = 1."""
        g = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        T = {n: torch.ones_like(w) for n, w in weights.items()}
        if self.h["adaptive"]:
            T.update({n: w.detach().abs() + self.h["eta"] for n, w in weights.items() if n.endswith("weight")})
        norm = torch.cat([(T[n] * g[n]).flatten() for n in g]).norm()
        return {n: self.h["rho"] * T[n] ** 2 * g[n] / norm for n in g}


CASES = [{"rho": 0.1, "adaptive": False, "eta": 0.2}, {"rho": 0.7, "adaptive": True, "eta": 0.2}]
ORACLE = FedSAMOracle
