"""FedSSD, eq. 2-6, one example, one class channel at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from oracles.fedavg import Oracle


class FedSSDOracle(Oracle):
    def begin(self):
        self.merge([self.model], [0])

    def merge(self, locals_, ids):
        super().merge(locals_, ids)
        public, C = self.data.public, self.data.n_classes
        self.A = torch.zeros(C, C, dtype=torch.float64)
        with torch.no_grad():
            for i in range(C):
                members = [x for x, y in zip(public.x, public.y, strict=True) if y == i]
                for x in members:
                    self.A[i, self.model(x[None])[0].argmax()] += 1 / len(members)

    def loss(self, model, teacher, x, y):
        C, z, z_g, total = self.data.n_classes, model(x), teacher(x).detach(), 0.0
        for b in range(len(y)):
            p = F.softmax(z_g[b], 0)[y[b]]
            for k in range(C):
                m_class = self.A[k, k] * (1 - max(self.A[i, k] for i in range(C) if i != k))
                m = self.h["M_max"] * max(float(m_class * (1 - (1 - p) ** 0.5) - 0.1), 0.0)
                if self.h["form"] == "inside":
                    total = total + (m * z_g[b, k] - m * z[b, k]) ** 2
                else:
                    total = total + m * (z_g[b, k] - z[b, k]) ** 2
        if self.h["reduce"] == "mean":
            total = total / C
        return F.cross_entropy(z, y) + total / len(y)


ORACLE = FedSSDOracle
CASES = [
    {"M_max": 0.3, "form": "inside", "reduce": "sum"},
    {"M_max": 3.0, "form": "inside", "reduce": "sum"},
    {"M_max": 0.3, "form": "outside", "reduce": "sum"},
    {"M_max": 3.0, "form": "inside", "reduce": "mean"},
    {"M_max": 0.3, "form": "outside", "reduce": "mean"},
]
