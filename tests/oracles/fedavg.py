"""FedAvg in plain torch, with the places where methods differ left open."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from support.problems import Problem

from fedkeep.data import make_plan, sample_cohort


class Oracle:
    """A federated run in plain torch, with the places where methods differ left open."""

    hold_out = 0.0  # share of a client's examples that are not trained on

    def __init__(self, problem: Problem, **hyper: float) -> None:
        self.data, self.clients, self.s = problem.data, problem.clients, problem.settings
        self.h = hyper
        self.model = copy.deepcopy(problem.model).double()
        self.begin()

    def begin(self) -> None: ...

    def loss(self, model, teacher, x, y) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    def adjust(self, model, k) -> None: ...

    def after(self, model, k, steps, lr) -> None: ...

    def merge(self, locals_, ids) -> None:
        sizes = [len(self.clients[k]) for k in ids]
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(
                    sum(n / sum(sizes) * dict(m.named_parameters())[name] for n, m in zip(sizes, locals_, strict=True))
                )

    def train(self, k: int, number: int) -> torch.nn.Module:
        s, own = self.s, self.clients[k]
        lr = s["lr"] * s["lr_decay"] ** (number - 1)
        model, teacher = copy.deepcopy(self.model).train(), copy.deepcopy(self.model).eval()
        sgd = torch.optim.SGD(model.parameters(), lr, momentum=s["momentum"], weight_decay=s["weight_decay"])
        plan = self.plan(k, number)
        for row, size in zip(plan.index, plan.size, strict=True):
            at = own[row[:size]]
            sgd.zero_grad()
            self.loss(model, teacher, self.data.x_train[at], self.data.y_train[at]).backward()
            self.adjust(model, k)
            sgd.step()
        self.after(model, k, plan.steps, lr)
        return model

    def plan(self, k: int, number: int):
        s, n = self.s, len(self.clients[k])
        return make_plan(s["seed"], number, k, n, s["epochs"], s["batch_size"], hold_out=self.hold_out)

    def run(self, rounds: int) -> dict[str, torch.Tensor]:
        for number in range(1, rounds + 1):
            ids = sample_cohort(self.s["seed"], number, len(self.clients), self.s["participation"]).tolist()
            self.merge([self.train(k, number) for k in ids], ids)
        return {name: p.detach() for name, p in self.model.named_parameters()}


ORACLE, CASES = Oracle, [{}]
