"""FedNTD, eq. 10-11, with boolean masks and `F.kl_div`, one example at a time; ablations: eq. 17-18, appendix L."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from oracles.fedavg import Oracle


class FedNTDOracle(Oracle):
    def loss(self, model, teacher, x, y):
        lam, total = self.h.get("lam", 1.0), 0.0
        z, z_g = model(x), teacher(x).detach()
        for i in range(len(y)):
            others = torch.arange(z.shape[1]) != y[i]
            total = total + lam * self.distance(z[i][others], z_g[i][others])
            total = total + (1 - lam) * self.distance(z[i], z_g[i])
        return F.cross_entropy(z, y) + self.h["beta"] * total / len(y)

    def distance(self, z, z_g):
        if self.h.get("distance") == "mse":
            return F.mse_loss(z, z_g)
        tau = self.h["tau"]
        return F.kl_div(F.log_softmax(z / tau, 0), F.softmax(z_g / tau, 0), reduction="sum") * tau**2


ORACLE = FedNTDOracle
CASES = [
    {"beta": 1.0, "tau": 1.0},
    {"beta": 0.3, "tau": 2.5},
    {"beta": 0.8, "tau": 2.0, "lam": 0.0},
    {"beta": 1.0, "tau": 1.5, "lam": 0.3},
    {"beta": 0.2, "tau": 1.0, "distance": "mse"},
]
