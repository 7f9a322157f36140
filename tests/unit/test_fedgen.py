"""What FedGen needs of the contract: random numbers of a step, a head by itself, a network that the server trains."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from support.errors import raises
from support.methods import quick
from support.problems import Problem, gap, same
from support.recording import RecordingAccelerator
from torch import nn

import fedkeep as fk
from fedkeep import models, optim, server_training, tree
from fedkeep._util.counter_random import uniform
from fedkeep.engine.footprint import footprint
from fedkeep.errors import ModelError
from fedkeep.method import FedAvg
from fedkeep.methods._generator import generate
from fedkeep.task import Task

# Random numbers


def test_noise_is_uniform_and_independent() -> None:
    seeds = torch.arange(20)
    drawn = torch.stack([uniform(seeds, step, 50, 8, torch.float64) for step in range(10)])
    assert kstest(drawn.flatten().numpy(), "uniform").pvalue > 1e-3
    assert len(drawn.unique()) > 0.99 * drawn.numel()  # of 2^24 values, some of 80,000 are the same
    for axis in range(4):  # steps, clients, examples, numbers
        one, other = (drawn.narrow(axis, start, drawn.shape[axis] - 1).flatten() for start in (0, 1))
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.02


def test_noise_is_splitmix64() -> None:
    """The first outputs of the published generator with seed 0."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert (uniform(torch.tensor(0), 0, 1, 3, torch.float64)[0] * 2**24).tolist() == [z >> 40 for z in published]


def test_noise_does_not_depend_on_the_runtime() -> None:
    one = uniform(torch.tensor(-5), 3, 4, 6, torch.float32)
    several = uniform(torch.tensor([9, -5]), torch.tensor([3]), 7, 6, torch.float64)
    assert torch.equal(one.double(), several[1, :4])


def test_a_method_gets_the_noise_that_it_asks_for(problem: Problem) -> None:
    class Noisy(FedAvg):
        @property
        def noise_size(self):
            return 2

        def prepare(self, visit):
            return {"tracked": {"noise": torch.zeros(2).double()}}

        def loss(self, visit, params, batch):
            used = torch.where(batch["mask"][:, None], batch["noise"], 0)
            return super().loss(visit, params, batch), {"noise": used.sum(0)}

        def finish(self, visit, params, measured):
            return {"params": params, "n": visit.facts["n"], "sum": visit.local["tracked"]["noise"]}, {}

    sim = problem.simulation(Noisy())
    jobs = [sim.job(k, 1) for k in range(3)]
    sums = sim.engine.train(sim.method.broadcast(sim.server), jobs, 0.1).upload["sum"]
    for job, total in zip(jobs, sums, strict=True):
        seed = torch.tensor(job.plan.noise_seed)
        expected = sum(uniform(seed, s, n, 2, torch.float64).sum(0) for s, n in enumerate(job.plan.size.tolist()))
        assert torch.allclose(total, expected, rtol=1e-12)
    stacked = problem.simulation(Noisy(), engine="stacked")
    theirs = stacked.engine.train(sim.method.broadcast(sim.server), jobs, 0.1).upload["sum"]
    assert torch.allclose(sums, theirs, rtol=1e-12)


# The head


@pytest.mark.parametrize(("name", "options", "width"), [
    ("mlp", {}, 64), ("mlp", {"projection": 9}, 9), ("cnn_fedntd", {"head": "etf"}, 512), ("resnet8", {}, 64),
])  # fmt: skip
def test_features_of_the_head_are_counted(name: str, options: dict, width: int) -> None:
    task = Task(models.build(name, (3, 32, 32), 10, **options), 10, 1)
    assert task.n_features == width
    features, logits = task.outputs(task.init, torch.randn(2, 3, 32, 32))
    assert torch.equal(task.head(task.init, features), logits)


class Flat(nn.Linear):
    """Has features and a head, whose input has another form."""

    def features(self, x):
        return super().forward(x)[:, None]

    def head(self, h):
        return h[:, 0]


def test_a_model_without_a_head_for_features_is_refused(problem: Problem) -> None:
    with raises(ModelError, "model.features", mentions=["Sequential"]):
        dataclasses.replace(problem, model=nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh())).simulation(
            quick("fedgen")
        )
    with raises(ModelError, "model.head", mentions=["Flat"]):
        Task(Flat(4, 4), 4, 1).n_features  # noqa: B018


# Training a network of the server's own


def train(task: Task, steps: int = 6) -> tuple[tree.Tree, tree.Tree]:
    start = torch.zeros(2, dtype=task.dtype)
    network = {"params": {"w": start}, "buffers": {"last": start.clone()}}
    adam, draws = optim.Adam(), {"x": torch.arange(2.0 * steps, dtype=task.dtype).reshape(steps, 2)}

    def loss(network: tree.Tree, draw: tree.Tree) -> tuple[torch.Tensor, tree.Tree]:
        return ((network["params"]["w"] - draw["x"]) ** 2).sum(), {"last": draw["x"] + network["buffers"]["last"]}

    state = adam.init(network["params"])
    result = server_training.train_network(task, network, loss, draws, adam, state, 0.1)
    assert not network["params"]["w"].any()
    assert not state["t"]
    return result


def test_a_network_is_trained_on_the_servers_own_draws() -> None:
    task = Task(nn.Linear(2, 2), 2, 1, dtype=torch.float64)
    network, state = train(task)
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([w], 0.1)
    for x in torch.arange(12.0, dtype=torch.float64).reshape(6, 2):
        adam.zero_grad()
        ((w - x) ** 2).sum().backward()
        adam.step()
    assert torch.allclose(network["params"]["w"], w.detach(), rtol=1e-12)
    assert network["buffers"]["last"].tolist() == [30.0, 36.0]
    assert float(state["t"]) == 6
    task.accelerator = RecordingAccelerator()
    assert same(train(task)[0], network)


# FedGen


def test_the_generator_learns_what_the_heads_know(problem: Problem) -> None:
    method = fk.methods.FedGen(hidden=24, noise=4, steps=150, batch_size=16, lr=1e-2)
    sim = problem.run(method, participation=1.0)
    y = torch.arange(4).repeat(16)
    e = torch.from_numpy(np.random.default_rng(0).random((64, 4)))
    made = generate(sim.server["generator"], y, e)
    predicted = sim.task.head(sim.params, made).argmax(1)
    assert float((predicted == y).double().mean()) > 0.9
    assert gap(sim.server["generator"], problem.simulation(method).server["generator"]) > 0.1


def test_seeds_have_generators_of_their_own(problem: Problem) -> None:
    first, second = (problem.simulation(quick("fedgen"), seed=seed).server["generator"] for seed in (1, 2))
    assert gap(first["params"], second["params"]) > 0.1


def test_label_counts_are_disclosed_only_if_they_are_used() -> None:
    assert "mu" in footprint(quick("fedgen")).uploads
    assert "mu" not in footprint(dataclasses.replace(quick("fedgen"), weighting="uniform")).uploads
