"""FedKeep's floor: by hand, at its ends, with Adam; its rows and gradients; models that it does not fit."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.errors import raises
from support.problems import Problem, gap
from torch import nn

import fedkeep as fk
from fedkeep import losses, optim
from fedkeep._util.centring import subtract_mean
from fedkeep.errors import MethodError, ModelError
from fedkeep.methods import FedAvg, FedKeep
from fedkeep.methods._per_class import mean_by_counts
from fedkeep.task import Task
from fedkeep.visit import Cohort

PLAIN = {"server_momentum": 0.0, "rows": False, "centre": False}  # without its other parts


def test_the_floor_by_hand() -> None:
    """Examples of |h|^2 = 9 and 1, and one that is padding: 1 + 5 = 6. S = 0.5: 0.3 / (0.5 * 6) = 0.1."""
    visit = SimpleNamespace(local={"S": torch.tensor(0.5), "share": torch.ones(2)})
    h, mask = torch.tensor([[3.0, 0.0], [0.0, 1.0], [7.0, 7.0]]), torch.tensor([True, True, False])
    assert float(FedKeep(push=0.3).floor(visit, h, mask)) == pytest.approx(0.1)
    assert float(FedKeep(push=30.0).floor(visit, h, mask)) == 1


def test_the_floor_of_large_features_in_half_precision_is_not_zero() -> None:
    """9 features of 200: |h|^2 is 360,000, more than float16 can hold."""
    visit = SimpleNamespace(local={"S": torch.tensor(1.0), "share": torch.ones(2)})
    h = torch.full((1, 9), 200.0, dtype=torch.float16)
    assert float(FedKeep(push=0.3).floor(visit, h, torch.tensor([True]))) == pytest.approx(0.3 / 360_001)


def test_a_very_large_push_without_the_other_parts_is_fedavg(problem: Problem) -> None:
    assert gap(problem.run(FedKeep(push=1e6, **PLAIN)).params, problem.run(FedAvg()).params) < 1e-12


def test_it_takes_the_learning_rate_before_decay_and_after_the_warm_up(problem: Problem) -> None:
    settings = {**problem.settings, "lr": 0.2, "lr_decay": 0.5, "lr_warmup": 1, "rounds": 3}
    server = dataclasses.replace(problem, settings=settings).run(FedKeep()).server
    assert float(server["lr"]) == pytest.approx(0.2)


def test_with_adam_the_floor_is_a_hundredth() -> None:
    """Of two classes with logits of 0 the client has one: the other counts as 0.01, so the loss is log(1 + 0.01)."""

    def z(params: Any, x: Any, train: bool) -> torch.Tensor:
        return torch.zeros(1, 2)

    task = SimpleNamespace(optimizer=optim.make("adam", 0.9, 0.0), apply=z, criterion=losses.cross_entropy)
    visit = SimpleNamespace(task=task, local={"share": torch.tensor([1.0, 0.0])})
    batch = {"x": torch.zeros(1, 1), "y": torch.tensor([0]), "mask": torch.tensor([True])}
    assert float(FedKeep().loss(visit, {}, batch)) == pytest.approx(math.log(1.01))


def test_the_row_of_a_class_that_nobody_has_is_the_one_that_was_sent() -> None:
    """w = 0 and v = 2, so 0.5 * 2 = 1 is sent. Weights of 3 and 6 come back, of clients with 1 and 3 examples: row 0 is
    (3 + 6) / 2, row 1 is 6, row 2 is 1. The features' weights are (3 + 3 * 6) / 4. All of it is the velocity, as w = 0.
    """
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    task, method = Task(net, 3, 1), FedKeep(server_momentum=0.5)
    zero = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    server = {**method.init_server(task, zero), "v": {name: w + 2 for name, w in zero.items()}}
    params = {name: torch.stack([w + 3, w + 6]) for name, w in zero.items()}
    mu = torch.tensor([[1.0, 0.0, 0.0], [1.0, 2.0, 0.0]])
    new = method.aggregate(task, server, {"params": params, "n": mu.sum(1), "mu": mu}, Cohort((0, 1), 1, 0))
    for weights in (new["params"], new["v"]):
        assert weights["1.bias"].tolist() == [4.5, 6.0, 1.0]
        assert weights["1.weight"].tolist() == [[4.5] * 2, [6.0] * 2, [1.0] * 2]
        assert weights["0.bias"].tolist() == [5.25] * 2


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_with_adam_push_has_no_effect_and_the_engines_agree(problem: Problem, engine: str) -> None:
    adam = dataclasses.replace(problem, settings={**problem.settings, "optimizer": "adam", "momentum": 0.0})
    one, other = adam.run(FedKeep(push=0.01), engine=engine), adam.run(FedKeep(push=1e6), engine="loop")
    assert gap(one.params, other.params) < 1e-10


def test_a_push_without_effect_is_warned_about_once(problem: Problem, caplog: pytest.LogCaptureFixture) -> None:
    problem.simulation(FedKeep(push=1.0), optimizer="sgd")
    problem.simulation(FedKeep(), optimizer="adam", lr=0.001)
    assert not caplog.messages
    problem.simulation(FedKeep(push=1.0), optimizer="adam", lr=0.001)
    assert len(caplog.messages) == 1
    assert "push = 1.0" in caplog.text


@pytest.mark.parametrize("settings", [{"aggregation": "median"}, {"dp_clip": 1.0, "dp_noise": 1.0}])
def test_what_needs_means_alone_says_how_to_upload_no_counts(problem: Problem, settings: dict[str, Any]) -> None:
    with raises(MethodError, mentions=["rows=False"]):
        problem.simulation(FedKeep(), participation=1.0, **settings)


def test_rows_of_many_examples_in_half_precision_are_finite() -> None:
    """10 clients of 5,000 examples and weights of 2: their sum is 100,000, more than float16 can hold."""
    rows, counts = torch.full((10, 3, 2), 2.0, dtype=torch.float16), torch.full((10, 3), 5000.0)
    assert mean_by_counts(rows, counts).sub(2).abs().max() < 0.01


def test_a_weight_that_is_alone_in_its_row_keeps_its_gradient() -> None:
    for shape in ((4, 1), (4, 1, 1), (4,)):
        assert torch.equal(subtract_mean(torch.ones(shape)), torch.ones(shape))
    assert torch.equal(subtract_mean(torch.ones(4, 2)), torch.zeros(4, 2))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_without_a_last_linear_layer_it_needs_adam(problem: Problem, engine: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh())
    odd = dataclasses.replace(problem, model=model.double())
    parts = odd.model, odd.data, odd.clients
    with raises(ModelError, key="model", mentions=["Sequential", "nn.Linear", "another method"]):
        fk.simulate(FedKeep(rows=False), *parts, **{**odd.settings, "engine": engine}, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    settings = {**problem.settings, "optimizer": "adam", "momentum": 0.0}
    history = dataclasses.replace(odd, settings=settings).run(fk.methods.FedKeep(rows=False)).history
    assert history.records[-1]["round"] == problem.settings["rounds"]
