"""FedProx, eq. 2."""

from __future__ import annotations

import torch.nn.functional as F

from oracles.fedavg import Oracle


class FedProxOracle(Oracle):
    def loss(self, model, teacher, x, y):
        proximal = sum(
            ((p - q.detach()) ** 2).sum() for p, q in zip(model.parameters(), teacher.parameters(), strict=True)
        )
        return F.cross_entropy(model(x), y) + self.h["mu"] / 2 * proximal


ORACLE, CASES = FedProxOracle, [{"mu": 0.1}, {"mu": 1.3}]
