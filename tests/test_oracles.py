"""Every method against a plain torch loop of its paper's formulas, written without any of fedkeep's code.

The oracles take the plans (which examples, in which order) from fedkeep and nothing else: `torch.optim.SGD`, modules
copied per client, ordinary Python.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Problem, gap

import fedkeep as fk
from fedkeep.data import make_plan, sample_cohort


class Oracle:
    """A federated run in plain torch, with the places where methods differ left open."""

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
        plan = make_plan(s["seed"], number, k, len(own), s["epochs"], s["batch_size"])
        for row, size in zip(plan.index, plan.size, strict=True):
            at = own[row[:size]]
            sgd.zero_grad()
            self.loss(model, teacher, self.data.x_train[at], self.data.y_train[at]).backward()
            self.adjust(model, k)
            sgd.step()
        self.after(model, k, plan.steps, lr)
        return model

    def run(self, rounds: int) -> dict[str, torch.Tensor]:
        for number in range(1, rounds + 1):
            ids = sample_cohort(self.s["seed"], number, len(self.clients), self.s["participation"]).tolist()
            self.merge([self.train(k, number) for k in ids], ids)
        return {name: p.detach() for name, p in self.model.named_parameters()}


class FedProxOracle(Oracle):
    def loss(self, model, teacher, x, y):
        proximal = sum(
            ((p - q.detach()) ** 2).sum() for p, q in zip(model.parameters(), teacher.parameters(), strict=True)
        )
        return F.cross_entropy(model(x), y) + self.h["mu"] / 2 * proximal


class FedNTDOracle(Oracle):
    """Eq. 10-11 with boolean masks and `F.kl_div`, one example at a time."""

    def loss(self, model, teacher, x, y):
        tau, total = self.h["tau"], 0.0
        z, z_g = model(x), teacher(x).detach()
        for i in range(len(y)):
            others = torch.arange(z.shape[1]) != y[i]
            q_l = F.log_softmax(z[i][others] / tau, 0)
            q_g = F.softmax(z_g[i][others] / tau, 0)
            total = total + F.kl_div(q_l, q_g, reduction="sum") * tau**2
        return F.cross_entropy(z, y) + self.h["beta"] * total / len(y)


class ScaffoldOracle(Oracle):
    """Algorithm 1, option II. The denominator is what a constant gradient's displacement would be, step by step."""

    def begin(self):
        self.c = {n: torch.zeros_like(p) for n, p in self.model.named_parameters()}
        self.c_k = {k: {n: torch.zeros_like(p) for n, p in self.c.items()} for k in range(len(self.clients))}
        self.changes = []

    def adjust(self, model, k):
        for n, p in model.named_parameters():
            p.grad += self.c[n] - self.c_k[k][n]

    def after(self, model, k, steps, lr):
        velocity = moved = 0.0
        for _ in range(steps):
            velocity = self.s["momentum"] * velocity + 1.0
            moved += velocity
        before = dict(self.model.named_parameters())
        new = {
            n: self.c_k[k][n] - self.c[n] + (before[n].detach() - p.detach()) / (moved * lr)
            for n, p in model.named_parameters()
        }
        self.changes.append({n: new[n] - self.c_k[k][n] for n in new})
        self.c_k[k] = new

    def merge(self, locals_, ids):
        before = copy.deepcopy(self.model)
        super().merge(locals_, ids)
        with torch.no_grad():
            for (_, p), old in zip(self.model.named_parameters(), before.parameters(), strict=True):
                p.copy_(old + self.h["eta_g"] * (p - old))
        for n in self.c:
            mean = sum(change[n] for change in self.changes) / len(ids)
            self.c[n] = self.c[n] + len(ids) / len(self.clients) * mean
        self.changes = []


ORACLES = {
    "fedavg": (Oracle, [{}]),
    "fedprox": (FedProxOracle, [{"mu": 0.1}, {"mu": 1.3}]),
    "fedntd": (FedNTDOracle, [{"beta": 1.0, "tau": 1.0}, {"beta": 0.3, "tau": 2.5}]),
    "scaffold": (ScaffoldOracle, [{"eta_g": 1.0}, {"eta_g": 0.7}]),
}
CASES = [(name, hyper) for name, (_, hypers) in ORACLES.items() for hyper in hypers]


def test_every_method_has_an_oracle() -> None:
    assert ORACLES.keys() == fk.methods.REGISTRY.keys()


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=[f"{n} {h}" for n, h in CASES])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_three_rounds_equal_the_oracle(problem: Problem, name: str, hyper: dict, engine: str) -> None:
    oracle = ORACLES[name][0](problem, **hyper).run(3)
    assert gap(oracle, problem.run(fk.methods.get(name)(**hyper), engine=engine).params) < 1e-10


def test_one_local_training_of_fedntd_equals_plain_torch(problem: Problem) -> None:
    """The paper's formula and `torch.optim.SGD`, to 1e-12."""
    oracle = FedNTDOracle(problem, beta=1.0, tau=1.0).train(k=5, number=1)
    sim = problem.simulation(fk.methods.FedNTD(beta=1.0, tau=1.0))
    shared = sim.method.broadcast(sim.server)
    at = problem.clients[5]
    ours = sim.local.train_one(shared, {}, sim.x[at], sim.y[at], sim._job(5, 1, shared).plan, lr=0.1)
    assert gap({n: p.detach() for n, p in oracle.named_parameters()}, ours.params) < 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_optimisers_equal_torch(name: str, momentum: float) -> None:
    rng = torch.Generator().manual_seed(0)
    w = {
        "a": torch.randn(3, generator=rng, dtype=torch.float64),
        "b": torch.randn(2, 2, generator=rng, dtype=torch.float64),
    }
    theirs = [p.clone().requires_grad_() for p in w.values()]
    if name == "sgd":
        reference = torch.optim.SGD(theirs, 0.1, momentum=momentum, weight_decay=0.01)
    else:
        reference = torch.optim.Adam(theirs, 0.1, betas=(momentum, 0.999), weight_decay=0.01)
    ours = fk.optim.make(name, momentum, weight_decay=0.01)
    state = ours.init(w)
    for _ in range(5):
        grads = {k: torch.randn(v.shape, generator=rng, dtype=torch.float64) for k, v in w.items()}
        for p, g in zip(theirs, grads.values(), strict=True):
            p.grad = g
        reference.step()
        w, state = ours.update(grads, state, w, 0.1)
    assert gap(dict(zip(w, [p.detach() for p in theirs], strict=True)), w) < 1e-12


def test_effective_steps_are_the_displacement_of_a_constant_gradient() -> None:
    for momentum in (0.0, 0.5, 0.9):
        sgd = fk.optim.SGD(momentum)
        w, g = {"w": torch.zeros(1, dtype=torch.float64)}, {"w": torch.ones(1, dtype=torch.float64)}
        state = sgd.init(w)
        for t in range(1, 30):
            w, state = sgd.update(g, state, w, 0.5)
            assert sgd.effective_steps(t) == pytest.approx(-float(w["w"]) / 0.5, rel=1e-12)
    assert np.isclose(fk.optim.Adam().effective_steps(7), 7)
