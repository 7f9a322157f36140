"""Criteria: one value per example, of nn's own loss modules too; and how two criteria are told apart."""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.errors import raises
from support.problems import Problem, gap, same, three_clients
from torch import Tensor, nn

import fedkeep as fk
from fedkeep.engine import provenance
from fedkeep.engine.settings import Settings
from fedkeep.engine.setup import make_task
from fedkeep.errors import ModelError, RunError
from fedkeep.runs.reading import read_experiment
from fedkeep.task import Task, describe_criterion


def run(problem: Problem, criterion: Any, **settings: Any) -> fk.History:
    given = {**problem.settings, **settings}
    return fk.simulate("fedavg", problem.model, problem.data, problem.clients, **given, criterion=criterion)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_module_is_taken_with_one_value_per_example(engine: str, reduction: str) -> None:
    """Clients of unequal size, so that the stacked engine pads batches."""
    problem = three_clients()
    module = nn.CrossEntropyLoss(reduction=reduction)
    own, default = (run(problem, criterion, engine=engine) for criterion in (module, fk.losses.cross_entropy))
    assert gap(own.params, default.params) < 1e-12
    assert own.records[-1]["test_loss"] == pytest.approx(default.records[-1]["test_loss"])
    assert module.reduction == reduction, "the user's module is copied"


def test_class_weights_are_kept_and_the_mean_is_over_examples(caplog: pytest.LogCaptureFixture) -> None:
    problem = three_clients()
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0])

    def weighted(z: Tensor, y: Tensor) -> Tensor:
        return weight.to(z)[y] * fk.losses.cross_entropy(z, y)

    with caplog.at_level(logging.WARNING, "fedkeep"):
        own = run(problem, nn.CrossEntropyLoss(weight=weight))
    assert "CrossEntropyLoss" in caplog.text
    assert gap(own.params, run(problem, weighted).params) < 1e-12


class Tempered(nn.Module):
    """A loss of a user's own, without `reduction`."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z / 2, y)


@pytest.mark.parametrize(
    ("criterion", "shape"),
    [
        (F.cross_entropy, ()),
        (lambda z, y: F.cross_entropy(z, y).item(), "float"),
        (lambda z, y: z, (4, 4)),
        (lambda z, y: z.argmax(-1), (4,)),
        (functools.partial(F.cross_entropy, reduction="sum"), ()),
        (Tempered(), ()),
    ],
)
def test_a_criterion_without_one_value_per_example_is_refused(
    problem: Problem, criterion: Any, shape: tuple[int, ...]
) -> None:
    with raises(ModelError, key="criterion", value=shape):
        run(problem, criterion)


@pytest.mark.parametrize(
    "criterion",
    [
        lambda z, y: F.cross_entropy(z, y, reduction="none") / len(y),
        lambda z, y: F.cross_entropy(z, y).expand(len(y)),
        lambda z, y: F.cross_entropy(z - z.mean(0), y, reduction="none"),
        lambda z, y: F.cross_entropy(z, y, reduction="none") * torch.bincount(y, minlength=4)[y],
        lambda z, y: z.sum(0)[: len(y)],
    ],
)
def test_a_criterion_that_mixes_the_examples_of_a_batch_is_refused(problem: Problem, criterion: Any) -> None:
    with raises(ModelError, key="criterion"):
        run(problem, criterion)


@pytest.mark.parametrize("criterion", [3, None, "cross_entropy", nn.CrossEntropyLoss, nn.Linear(4, 4)])
def test_what_is_no_criterion_is_refused(problem: Problem, criterion: Any) -> None:
    with raises(ModelError, key="criterion"):
        run(problem, criterion)


def test_every_runtime_refuses_it() -> None:
    """The simulation, a federation's server and its nodes make their task with the same function."""
    with raises(ModelError, key="criterion"):
        make_task(nn.Linear(2, 2), Settings(), 2, 1, None, F.cross_entropy, torch.device("cpu"))


def test_trying_a_criterion_draws_no_random_numbers() -> None:
    model, before = nn.Linear(2, 2), torch.get_rng_state()

    def noisy(z: Tensor, y: Tensor) -> Tensor:
        return fk.losses.cross_entropy(z + torch.randn_like(z), y)

    assert Task(model, 2, 1, criterion=noisy).criterion is noisy
    assert torch.equal(torch.get_rng_state(), before)


# Telling criteria apart


class Scaled:
    """A criterion that is an object."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return self.factor * fk.losses.cross_entropy(z, y)


def smoothed(amount: float) -> Any:
    return lambda z, y: F.cross_entropy(z, y, reduction="none", label_smoothing=amount)


DIFFERENT = [
    fk.losses.cross_entropy,
    nn.CrossEntropyLoss(),
    nn.CrossEntropyLoss(label_smoothing=0.1),
    nn.CrossEntropyLoss(ignore_index=1),
    nn.CrossEntropyLoss(weight=torch.ones(4)),
    nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1, 1, 2])),
    nn.MultiMarginLoss(),
    nn.MultiMarginLoss(margin=2.0),
    Tempered(),
    Scaled(1.0),
    Scaled(2.0),
    smoothed(0.1),
    smoothed(0.2),
    lambda z, y: F.cross_entropy(z, y, reduction="none"),
    lambda z, y: 2 * F.cross_entropy(z, y, reduction="none"),
    lambda z, y: math.pi * F.cross_entropy(z, y, reduction="none"),
    lambda z, y, k=1: k * F.cross_entropy(z, y, reduction="none"),
    lambda z, y, k=2: k * F.cross_entropy(z, y, reduction="none"),
    functools.partial(F.cross_entropy, reduction="none"),
    functools.partial(F.cross_entropy, reduction="none", label_smoothing=0.1),
]


def test_different_criteria_have_different_descriptions() -> None:
    assert len({describe_criterion(criterion) for criterion in DIFFERENT}) == len(DIFFERENT)


def test_a_description_is_the_same_in_every_process() -> None:
    again = [Scaled(1.0), smoothed(0.1), nn.CrossEntropyLoss(weight=torch.ones(4))]
    for one, other in zip([DIFFERENT[9], DIFFERENT[11], DIFFERENT[4]], again, strict=True):
        assert describe_criterion(one) == describe_criterion(other)
        assert "0x" not in describe_criterion(one)


def test_a_run_is_resumed_with_its_own_criterion_only(tmp_path: Path, problem: Problem) -> None:
    def interrupt(simulation: fk.Simulation, record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    args = {"model": problem.model, "data": problem.data, "clients": problem.clients}
    where: dict[str, Any] = {"run_dir": tmp_path / "r", "checkpoint_every": 1, "callbacks": interrupt}
    with pytest.raises(KeyboardInterrupt):
        fk.simulate("fedavg", *args.values(), **problem.settings, **where, criterion=smoothed(0.1))
    for other in (smoothed(0.2), nn.CrossEntropyLoss(label_smoothing=0.1), fk.losses.cross_entropy):
        with raises(RunError, key="criterion"):
            fk.resume(tmp_path / "r", **args, criterion=other)
    history = fk.resume(tmp_path / "r", **args, criterion=smoothed(0.1))
    assert same(history.params, run(problem, smoothed(0.1)).params)


@pytest.mark.parametrize(
    ("recorded", "python", "same"),
    [
        ("smoothed.<locals>.<lambda>", None, True),  # recorded by name alone
        ("smoothed.<locals>.<lambda>#000000000000", None, False),
        ("smoothed.<locals>.<lambda>#000000000000", "2.7.18", True),  # compiled code of another version
        ("other", "2.7.18", False),
        ("cross_entropy", "2.7.18", False),
    ],
)
def test_checksums_are_compared_where_they_can_be(
    tmp_path: Path, problem: Problem, recorded: str, python: str | None, same: bool
) -> None:
    fk.simulate("fedavg", problem.model, problem.data, problem.clients, **problem.settings, run_dir=tmp_path / "r")
    made_by = {**read_experiment(tmp_path / "r")["made_by"], "criterion": recorded}
    made_by |= {"python": python} if python else {}
    assert provenance.same_fingerprint("criterion", describe_criterion(smoothed(0.1)), made_by) is same
