"""FedExP, on flat vectors of weights."""

from __future__ import annotations

from torch.nn.utils import parameters_to_vector, vector_to_parameters

from oracles.fedavg import Oracle


class FedExPOracle(Oracle):
    def merge(self, locals_, ids):
        w = parameters_to_vector(self.model.parameters()).detach()
        shares = [len(self.clients[k]) / sum(len(self.clients[j]) for j in ids) for k in ids]
        deltas = [parameters_to_vector(m.parameters()).detach() - w for m in locals_]
        mean = sum(share * delta for share, delta in zip(shares, deltas, strict=True))
        norms = sum(share * float(delta @ delta) for share, delta in zip(shares, deltas, strict=True))
        eta_g = max(1.0, norms / (2 * (float(mean @ mean) + self.h["epsilon"])))
        vector_to_parameters(w + eta_g * mean, self.model.parameters())


ORACLE, CASES = FedExPOracle, [{"epsilon": 0.001}, {"epsilon": 0.05}]
