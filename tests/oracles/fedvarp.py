"""FedVARP, with a dict of the updates that the server has seen."""

from __future__ import annotations

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from oracles.fedavg import Oracle


class FedVARPOracle(Oracle):
    def begin(self):
        self.seen = {}

    def merge(self, locals_, ids):
        w = parameters_to_vector(self.model.parameters()).detach()
        delta = {k: parameters_to_vector(m.parameters()).detach() - w for k, m in zip(ids, locals_, strict=True)}
        step = sum(self.seen.values(), torch.zeros_like(w)) / len(self.clients)
        for k in ids:
            step = step + (delta[k] - self.seen.get(k, 0)) / len(ids)
        self.seen.update(delta)
        vector_to_parameters(w + self.h["eta_s"] * step, self.model.parameters())


ORACLE, CASES = FedVARPOracle, [{"eta_s": 1.0}, {"eta_s": 0.6}]
