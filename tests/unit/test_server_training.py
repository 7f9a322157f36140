"""The server's own training: deterministic, stopped in time, without traces; and the methods that use it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support.errors import raises
from support.problems import Problem, gap, make_problem, same
from support.recording import RecordingAccelerator

import fedkeep as fk
from fedkeep import optim, server_training, tree
from fedkeep.engine.footprint import footprint
from fedkeep.errors import MethodError
from fedkeep.task import Public, Task

NEED_PUBLIC = ["fedssd", "fedcad", "flashback", "feddf", "fedavg_finetune"]


def small(p_drop: float = 0.0, dtype: torch.dtype = torch.float32, first: torch.nn.Module | None = None) -> Task:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(10, 3, generator=rng).to(dtype), torch.arange(10) % 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(first or torch.nn.Dropout(p_drop), torch.nn.Linear(3, 2))
    return Task(model, 2, 1, Public(x[:7], y[:7], x[7:], y[7:]), optimizer=optim.SGD(0.9, 0.1), dtype=dtype)


def train(task: Task, values: list[float] | None = None, seed: int = 0, **changes) -> tuple[tree.Tree, list]:
    """Train with a scripted validation loss, one value a pass; return the result and the weights after each pass."""
    seen: list[tree.Tree] = []

    def scripted(w: tree.Tree) -> torch.Tensor:
        seen.append(tree.map(torch.clone, w))
        return torch.tensor(values[len(seen) - 1] if values else -float(len(seen)))

    def criterion(w: tree.Tree, at: torch.Tensor) -> torch.Tensor:
        return task.criterion(task.apply(w, task.public.x[at], train=True), task.public.y[at]).mean()

    loss, check = changes.pop("loss", criterion), changes.pop("check", scripted)
    how = {"optimizer": optim.SGD(), "lr": lambda step: 0.1, "batch_size": 3, "steps": 12, "patience": 6, **changes}
    return server_training.train(task, task.init, loss, check, 7, seed, server_training.Options(**how)), seen


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


def test_the_start_is_a_candidate_if_it_is_included() -> None:
    """The first check is of the start; an epoch that is better by less than 1e-4 does not replace it."""
    best, seen = train(small(), [1.0, 2.0, 1.0 - 1e-5, 0.0], include_start=True)
    assert len(seen) == 3
    assert same(seen[0], small().init)
    assert same(best, small().init)
    best, seen = train(small(), [1.0, 2.0, 0.5, 0.6, 0.7], include_start=True)
    assert len(seen) == 5
    assert same(best, seen[2])


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


# Replayed steps, with a recorder in place of CUDA graphs


def train_scripted(task: Task, values: list[float], **changes) -> tree.Tree:
    """Train with a scripted validation loss that is a function of the weights: the value of the epoch they are of."""
    falling = [-float(k) for k in range(len(values))]
    _, seen = train(small(dtype=task.dtype), falling, **{**changes, "steps": 3 * len(values), "patience": 99})

    def clock(w: tree.Tree) -> torch.Tensor:
        return torch.stack([t.double().square().sum() for t in tree.leaves(w)]).sum()

    times, script = torch.stack([clock(w) for w in seen]), torch.tensor(values)

    def check(w: tree.Tree) -> torch.Tensor:
        return script.index_select(0, (times - clock(w)).abs().argmin().reshape(1))[0]

    return train(task, check=check, **changes)[0]


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ([3.0, 1.0, 2.0, 0.5], 12),  # the last is the best
        ([3.0, 1.0, 2.0, 1.0 - 1e-5, 0.0, 0.0], 18),  # a gain below 1e-4 is none; what follows the stop is better
        ([1.0, 2.0, 3.0, 0.0, -1.0, -2.0, -3.0, -4.0], 24),  # it stops before the device is asked
        ([float(k) for k in range(12, 0, -1)], 34),  # it never stops, and ends within an epoch
        ([5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 0.0, 0.0], 27),  # it stops between the second and the third look
        ([float("nan")] * 4, 12),
    ],
)
@pytest.mark.parametrize("optimizer", [optim.SGD(), optim.SGD(0.9), optim.Adam()], ids=["sgd", "momentum", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replayed_steps_give_the_same_weights(
    values: list[float], steps: int, optimizer: optim.Optimizer, dtype: torch.dtype
) -> None:
    how = {"optimizer": optimizer, "lr": lambda step: 0.1 / (1 + step), "steps": steps}
    called = train_scripted(small(dtype=dtype), values, **how)
    task = small(dtype=dtype)
    task.accelerator = accelerator = RecordingAccelerator()
    assert same(called, train_scripted(task, values, **how))
    assert accelerator.recorded >= 3  # both sizes of batches, and the check
    assert accelerator.replayed >= 9


def pure_check(w: tree.Tree) -> torch.Tensor:
    return w["1.bias"].sum()


def test_replayed_steps_with_the_start_as_a_candidate_give_the_same_weights() -> None:
    """Rising and falling losses: the start is best in one, the last epoch in the other."""
    for sign in (1.0, -1.0):

        def check(w: tree.Tree, sign: float = sign) -> torch.Tensor:
            return sign * (w["1.weight"] - small().init["1.weight"]).abs().sum()

        task = small()
        task.accelerator = accelerator = RecordingAccelerator()
        how = {"check": check, "include_start": True, "patience": 99}
        called, replayed = train(small(), **how)[0], train(task, **how)[0]
        assert same(called, replayed)
        assert same(called, small().init) == (sign > 0)
        assert accelerator.replayed >= 3


def test_the_host_polls_less_often_on_a_device_with_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five epochs of 3 steps, then 16 epochs of one step, between two polls."""
    task = small()
    task.accelerator = RecordingAccelerator()
    polls: list[int] = []
    load = server_training._Training._load

    def count(training: server_training._Training, epochs: list, first_step: int) -> None:
        polls.append(len(epochs))
        load(training, epochs, first_step)

    monkeypatch.setattr(server_training._Training, "_load", count)
    train(task, steps=34, patience=99, check=pure_check)
    assert polls == [6, 6]
    polls.clear()
    train(task, steps=34, patience=99, batch_size=7, check=pure_check)
    assert polls == [16, 16, 2]


def test_a_step_that_draws_random_numbers_is_not_replayed() -> None:
    task = small(first=torch.nn.RReLU())
    task.accelerator = accelerator = RecordingAccelerator()
    check = pure_check
    assert same(train(small(first=torch.nn.RReLU()), check=check)[0], train(task, check=check)[0])
    assert accelerator.recorded == 1  # the check


def test_a_step_with_dropout_is_replayed_with_new_draws() -> None:
    """The key is computed from the number of the step, which is a tensor."""
    task = small(0.5)
    task.accelerator = accelerator = RecordingAccelerator()
    how = {"check": pure_check, "steps": 24, "patience": 99}
    assert same(train(small(0.5), **how)[0], train(task, **how)[0])
    assert accelerator.recorded == 3
    assert accelerator.replayed >= 12
    masks: list[torch.Tensor] = []
    big = torch.ones(64, 3)

    def look(w: tree.Tree, at: torch.Tensor) -> torch.Tensor:
        masks.append(task._call(True, w, big, lambda module: module[0](big)))
        return w["1.bias"].sum()

    train(small(0.5), loss=look, **how)
    assert len(masks) == 24
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 24, "every step has its own draws"


def test_a_step_that_cannot_be_captured_is_called() -> None:
    def loss(w: tree.Tree, at: torch.Tensor) -> torch.Tensor:
        return w["1.bias"].sum() * (2.0 if bool(w["1.bias"].sum() > 0) else 1.0)

    task = small()
    task.accelerator = accelerator = RecordingAccelerator()
    how = {"loss": loss, "check": pure_check, "batch_size": 7}
    assert same(train(small(), **how)[0], train(task, **how)[0])
    assert accelerator.recorded == 1  # the check


def test_all_models_at_once_have_the_logits_of_each() -> None:
    task = small()
    stacked = tree.stack([tree.scale(task.init, float(k)) for k in range(3)])
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    one_by_one = server_training.ensemble(task, stacked, x)
    assert one_by_one.shape == (3, 10, 2)
    for chunk in (1, 4, 10):
        assert torch.allclose(server_training._logits_of_all(task, stacked, x, chunk), one_by_one, atol=1e-6)


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


def test_shares_of_labels_do_not_depend_on_a_clients_size() -> None:
    """With shares, three visits of everyone at gamma = 0.1 make pi 0.3 times the sum of the clients' shares."""
    problem = make_problem(participation=1.0, rounds=3, epochs=1, batch_size=100, lr=0.01)
    y = problem.data.y_train.numpy()
    shares = sum(np.bincount(y[own], minlength=4) / len(own) for own in problem.clients)
    pi = problem.run(fk.methods.Flashback(gamma=0.1, knowledge="label_share", side="client")).server["pi"]
    assert torch.allclose(pi, 0.3 * torch.from_numpy(shares).double())


@pytest.mark.parametrize(
    ("fields", "down", "up"),
    [
        ({}, {"params", "pi"}, {"params", "n", "r", "mu"}),
        ({"knowledge": "label_share"}, {"params", "pi"}, {"params", "n", "r", "mu"}),
        ({"knowledge": "mean_probability"}, {"params", "pi"}, {"params", "n", "r"}),
        ({"client_loss": "ntd"}, {"params"}, {"params", "n", "r", "mu"}),
        ({"side": "server"}, {"params"}, {"params", "n", "r", "mu"}),
    ],
)
def test_flashback_discloses_label_counts_only_where_it_uses_them(fields: dict, down: set, up: set) -> None:
    size = footprint(fk.methods.Flashback(**fields))
    assert set(size.sends) == down
    assert set(size.uploads) == up
