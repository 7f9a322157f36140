"""Flashback, algorithm 1 and eq. 3, class by class."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from oracles.fedavg_finetune import TunedOracle


def divide(a, b):
    """0/0 = 0, number by number."""
    return [float(x / y) if y else 0.0 for x, y in zip(a, b, strict=True)]


class FlashbackOracle(TunedOracle):
    def begin(self):
        self.pi = torch.zeros(self.data.n_classes, dtype=torch.float64)
        self.visits = dict.fromkeys(range(len(self.clients)), 0)

    def counts(self, k):
        return torch.bincount(self.data.y_train[self.clients[k]], minlength=self.data.n_classes).double()

    def train(self, k, number):
        nu = self.counts(k)
        if self.h["knowledge"] != "label_count":
            nu = nu / nu.sum()
        self.alpha_s, self.alpha = divide(nu, nu + self.pi), divide(self.pi, nu + self.pi)
        return super().train(k, number)

    def dynamic(self, z, y, teachers, alpha_s, alphas):
        """Eq. 3, averaged over a batch; `teachers` are logits."""
        T, total = self.h["T"], 0.0
        q = F.softmax(z / T, 1)
        for b in range(len(y)):
            total = total + alpha_s[int(y[b])] * F.cross_entropy(z[b], y[b])
            for z_i, alpha_i in zip(teachers, alphas, strict=True):
                p = F.softmax(z_i[b] / T, 0)
                for c in range(len(p)):
                    total = total + alpha_i[c] * p[c] * torch.log(p[c] / q[b, c])
        return total / len(y)

    def loss(self, model, teacher, x, y):
        z, z_g = model(x), teacher(x).detach()
        if self.h["side"] == "server":
            return F.cross_entropy(z, y)
        if self.h["client_loss"] == "dynamic":
            return self.dynamic(z, y, [z_g], self.alpha_s, [self.alpha])
        others = torch.stack([torch.tensor([c for c in range(z.shape[1]) if c != y[b]]) for b in range(len(y))])
        q, p = (F.log_softmax(t.gather(1, others), 1) for t in (z, z_g))
        return F.cross_entropy(z, y) + F.kl_div(q, p, reduction="batchmean", log_target=True)

    def merge(self, locals_, ids):
        previous, h = copy.deepcopy(self.model), self.h
        self.teachers = [*locals_, previous]
        if h["knowledge"] == "label_count":
            mu = [self.counts(k) for k in ids]
        elif h["knowledge"] == "label_share":
            mu = [self.counts(k) / len(self.clients[k]) for k in ids]
        else:
            mu = [F.softmax(model(self.data.public.x), 1).mean(0).detach() for model in locals_]
        total = self.pi + sum(mu) + self.pi
        self.server_alpha_s = divide(self.pi, total)
        self.server_alpha = [divide(m, total) for m in [*mu, self.pi]]
        self.average(locals_, ids)
        if h["side"] != "client":
            self.tune()
        for k, m in zip(ids, mu, strict=True):
            self.visits[k] += 1
            if h["gamma"] * self.visits[k] <= 1 + 1e-9:
                self.pi = self.pi + h["gamma"] * m

    def average(self, locals_, ids):
        super(TunedOracle, self).merge(locals_, ids)

    def server_loss(self, z, at):
        with torch.no_grad():
            teachers = [model(self.data.public.x[at]) for model in self.teachers]
        return self.dynamic(z, self.data.public.y[at], teachers, self.server_alpha_s, self.server_alpha)


PAPER = {
    "gamma": 0.025,
    "T": 3.0,
    "E_s": 3,
    "batch_size": 50,
    "patience": 2,
    "include_average": False,
    "knowledge": "label_count",
    "side": "both",
    "client_loss": "dynamic",
}
ORACLE = FlashbackOracle
CASES = [
    PAPER,
    {**PAPER, "gamma": 0.5, "T": 1.0, "E_s": 5, "batch_size": 4, "patience": 1},
    {**PAPER, "T": 1.0, "batch_size": 2, "include_average": True},
    {**PAPER, "gamma": 0.3, "knowledge": "label_share"},
    {**PAPER, "gamma": 1.0, "knowledge": "mean_probability"},
    {**PAPER, "gamma": 0.3, "side": "client"},
    {**PAPER, "gamma": 0.3, "side": "client", "knowledge": "mean_probability"},
    {**PAPER, "gamma": 0.3, "side": "server"},
    {**PAPER, "client_loss": "ntd"},
]
