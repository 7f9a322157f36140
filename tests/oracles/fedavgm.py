"""FedAvgM: `torch.optim.SGD` with momentum at the server, on the difference from the clients' average."""

from __future__ import annotations

import copy

import torch

from oracles.fedavg import Oracle


class FedAvgMOracle(Oracle):
    def begin(self):
        self.server = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=self.h["b"])

    def merge(self, locals_, ids):
        before = copy.deepcopy(self.model)
        super().merge(locals_, ids)
        with torch.no_grad():
            for p, old in zip(self.model.parameters(), before.parameters(), strict=True):
                p.grad = old - p
                p.copy_(old)
        self.server.step()


ORACLE, CASES = FedAvgMOracle, [{"b": 0.7}, {"b": 0.95}]
