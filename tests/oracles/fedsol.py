"""FedSOL: the perturbation along the gradient of `F.kl_div`, layer by layer and column by column."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.func import functional_call

from oracles.fedavg import Oracle


class FedSOLOracle(Oracle):
    def loss(self, model, teacher, x, y):
        weights, start = dict(model.named_parameters()), dict(teacher.named_parameters())
        if all(torch.equal(w, start[n]) for n, w in weights.items()):  # the first step: there is no direction
            return F.cross_entropy(model(x), y)
        q, p = (F.log_softmax(m(x) / self.h["tau"], 1) for m in (model, teacher))
        far = F.kl_div(q, p.detach(), reduction="batchmean", log_target=True)
        g = torch.autograd.grad(far, list(weights.values()))
        norm = torch.cat([t.flatten() for t in g]).norm()
        moved = {}
        for (n, w), g_p in zip(weights.items(), g, strict=True):
            moved[n] = self.h["rho"] * g_p / norm
            if self.h["adaptive"]:
                columns = (w - start[n]).detach().abs().flatten(1) if w.ndim > 1 else (w - start[n]).detach().abs()
                length = columns.pow(2).sum(0).sqrt().clamp(min=1e-12)
                moved[n] = moved[n] * (columns / length).reshape(w.shape)
        return F.cross_entropy(functional_call(model, {n: w + moved[n] for n, w in weights.items()}, (x,)), y)


CASES = [{"rho": 1.0, "tau": 3.0, "adaptive": True}, {"rho": 0.5, "tau": 1.0, "adaptive": False}]
ORACLE = FedSOLOracle
