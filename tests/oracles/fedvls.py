"""FedVLS, as printed and as released: classes and examples in Python loops."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from oracles._label_counts import LabelCountOracle


class FedVLSOracle(LabelCountOracle):
    def loss(self, model, teacher, x, y):
        z, z_g = model(x), teacher(x).detach()
        p = [n / sum(self.n) for n in self.n]
        vacant = [c for c, n in enumerate(self.n) if n == 0]
        distilled = 0.0
        if vacant:
            student, taught = F.log_softmax(z[:, vacant], 1), F.softmax(z_g[:, vacant], 1)
            distilled = F.kl_div(student, taught, reduction="batchmean")
        if self.h["form"] == "released":
            parts = self.calibrated(z, y, [q + 1e-9 for q in p]), self.suppressed(z, y, p, 1e-9)
        else:
            parts = self.calibrated(z, y, p), self.suppressed(z, y, p, None)
        return parts[0] + self.h["lam"] * distilled + self.h["mu"] * parts[1]

    def calibrated(self, z, y, p):
        total = 0.0
        for i, true in enumerate(y.tolist()):
            terms = [p[c] * torch.exp(z[i, c]) for c in range(len(p))]
            total = total - torch.log(terms[true] / sum(terms))
        return total / len(y)

    def suppressed(self, z, y, p, floor):
        total = 0.0
        for c, share in enumerate(p):
            shift = 0.0 if floor is None else -math.log(share + floor) + math.log(1 / len(p))
            terms = [torch.exp(z[i, c] + shift) if true != c else 1.0 for i, true in enumerate(y.tolist())]
            total = total + share * torch.log(torch.as_tensor(sum(terms), dtype=z.dtype) / len(terms))
        return total


ORACLE = FedVLSOracle
CASES = [{"lam": 0.1, "mu": 0.3, "form": "printed"}, {"lam": 0.7, "mu": 0.1, "form": "released"}]
