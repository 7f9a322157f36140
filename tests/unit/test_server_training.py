"""The server's own training: deterministic, stopped in time, without traces; and the methods that use it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support.errors import raises
from support.problems import Problem, gap, make_problem, same

import fedkeep as fk
from fedkeep import optim, server_training, tree
from fedkeep.engine.footprint import footprint
from fedkeep.errors import MethodError
from fedkeep.task import Public, Task

NEED_PUBLIC = ["fedssd", "fedcad", "flashback", "feddf", "fedavg_finetune"]


def small(p_drop: float = 0.0) -> Task:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(10, 3, generator=rng), torch.arange(10) % 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Dropout(p_drop), torch.nn.Linear(3, 2))
    return Task(model, 2, 1, Public(x[:7], y[:7], x[7:], y[7:]), optimizer=optim.SGD(0.9, 0.1))


def train(task: Task, values: list[float] | None = None, seed: int = 0, **changes) -> tuple[tree.Tree, list]:
    """Train with a scripted validation loss, one value a pass; return the result and the weights after each pass."""
    seen: list[tree.Tree] = []

    def check(w: tree.Tree) -> torch.Tensor:
        seen.append(w)
        return torch.tensor(values[len(seen) - 1] if values else -float(len(seen)))

    def loss(w: tree.Tree, at: torch.Tensor) -> torch.Tensor:
        return task.criterion(task.apply(w, task.public.x[at], train=True), task.public.y[at]).mean()

    how = {"optimizer": optim.SGD(), "lr": lambda step: 0.1, "batch_size": 3, "steps": 12, "patience": 6, **changes}
    return server_training.train(task, task.init, loss, check, 7, seed, **how), seen


def test_it_keeps_the_best_and_stops_without_gain() -> None:
    """Seven examples by three: 3 steps a pass, so 12 steps are 4 passes and a patience of 6 is 2 passes."""
    best, seen = train(small(), [3.0, 1.0, 2.0, 0.5])
    assert len(seen) == 4
    assert same(best, seen[3])
    best, seen = train(small(), [3.0, 1.0, 2.0, 1.0 - 1e-5, 0.0], steps=15)  # a gain below 1e-4 is none
    assert len(seen) == 4
    assert same(best, seen[1])
    best, seen = train(small(), [1.0, 2.0, 3.0])  # the start is no candidate
    assert len(seen) == 3
    assert same(best, seen[0])
    assert gap(best, small().init) > 0


def test_it_ends_within_a_pass_when_the_steps_are_used_up() -> None:
    best, seen = train(small(), steps=4)
    assert len(seen) == 2
    assert same(best, seen[1])
    start, seen = train(small(), steps=0)
    assert same(start, small().init)
    assert not seen


def test_a_weight_that_is_not_a_number_is_not_hidden() -> None:
    best, _ = train(small(), [float("nan")] * 4, lr=lambda step: float("nan"))
    assert not any(bool(t.isfinite().all()) for t in tree.leaves(best))


@pytest.mark.parametrize("p_drop", [0.0, 0.5])
def test_it_depends_on_the_seed_alone_and_leaves_torch_alone(p_drop: float) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, _ = train(small(p_drop))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    with torch.no_grad():
        again, _ = train(small(p_drop))
    assert same(one, again)
    assert gap(one, train(small(p_drop), seed=1)[0]) > 1e-6


def test_every_pass_sees_every_example_once() -> None:
    passes = server_training.batches(seed=3, n=7, batch_size=3)
    first, second = next(passes), next(passes)
    for one in (first, second):
        assert sorted(np.concatenate(one).tolist()) == list(range(7))
    assert np.concatenate(first).tolist() != np.concatenate(second).tolist()


def test_the_server_trains_without_weight_decay() -> None:
    task, cohort = small(), fk.method.Cohort((0,), 1, 0)
    how = {"epochs": 1, "batch_size": 7, "patience": 1}
    done = server_training.train_labelled(task, task.init, lambda w, at: 0 * w["1.bias"].sum(), cohort, **how)
    assert same(done, task.init)


def test_credibility_of_an_absent_class_is_zero() -> None:
    task = small()
    public = dataclasses.replace(task.public, y=torch.zeros(7, dtype=torch.long))
    A = server_training.credibility(task, task.init, public)
    assert A[0].sum() == 1
    assert A[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", NEED_PUBLIC)
def test_without_public_data_it_raises(problem: Problem, name: str) -> None:
    without = dataclasses.replace(problem, data=dataclasses.replace(problem.data, public=None))
    with raises(MethodError, key="public", mentions=[name, "load(..., public=0.1)"]):
        without.simulation(fk.methods.get(name)())


@pytest.mark.parametrize("name", ["flashback", "feddf", "fedavg_finetune"])
def test_without_a_validation_part_it_raises(problem: Problem, name: str) -> None:
    public = problem.data.public
    empty = Public(public.x, public.y, public.x_val[:0], public.y_val[:0])
    without = dataclasses.replace(problem, data=dataclasses.replace(problem.data, public=empty))
    with raises(MethodError, key="validation", mentions=["validation=0.25"]):
        without.simulation(fk.methods.get(name)())


def test_feddf_never_reads_a_public_label(problem: Problem) -> None:
    sim = problem.simulation(fk.methods.FedDF())
    shared = sim.method.broadcast(sim.server)
    uploads = sim.engine.train(shared, [sim.job(k, 1) for k in (3, 5)], 0.1).upload
    cohort = fk.method.Cohort((3, 5), 1, 0)
    labelled = sim.method.aggregate(sim.task, sim.server, uploads, cohort)
    public = sim.task.public
    sim.task.public = Public(public.x, None, public.x_val, None)
    assert same(labelled, sim.method.aggregate(sim.task, sim.server, uploads, cohort))


def test_flashback_at_the_clients_alone_needs_no_public_data(problem: Problem) -> None:
    without = dataclasses.replace(problem, data=dataclasses.replace(problem.data, public=None))
    method = fk.methods.Flashback(side="client")
    assert same(without.run(method).params, problem.run(method).params)
    with raises(MethodError, key="public"):
        without.simulation(fk.methods.Flashback(side="client", knowledge="mean_probability"))


def test_flashback_begins_with_plain_cross_entropy(problem: Problem) -> None:
    """In round 1 pi = 0, so every local model is FedAvg's; in round 2 it is not."""
    methods = fk.methods.FedAvg(), fk.methods.Flashback(side="client")
    one, two = (problem.run(m, rounds=1).params for m in methods)
    assert gap(one, two) < 1e-12
    one, two = (problem.run(m, rounds=2).params for m in methods)
    assert gap(one, two) > 1e-6


def test_flashback_stops_counting_a_client_after_1_over_gamma_visits() -> None:
    """gamma = 0.1 and 12 visits of everyone: pi is all label counts once, not 1.2 times; 1/0.1 must not round to 9."""
    problem = make_problem(participation=1.0, rounds=12, epochs=1, batch_size=100, lr=0.01)
    counts = np.bincount(problem.data.y_train.numpy(), minlength=4)
    pi = problem.run(fk.methods.Flashback(gamma=0.1, side="client")).server["pi"]
    assert torch.allclose(pi, torch.from_numpy(counts).double())


@pytest.mark.parametrize(
    ("fields", "down", "up"),
    [
        ({}, {"params", "pi"}, {"params", "n", "r", "mu"}),
        ({"knowledge": "mean_probability"}, {"params", "pi"}, {"params", "n", "r"}),
        ({"client_loss": "ntd"}, {"params"}, {"params", "n", "r", "mu"}),
        ({"side": "server"}, {"params"}, {"params", "n", "r", "mu"}),
    ],
)
def test_flashback_discloses_label_counts_only_where_it_uses_them(fields: dict, down: set, up: set) -> None:
    size = footprint(fk.methods.Flashback(**fields))
    assert set(size.sends) == down
    assert set(size.uploads) == up
