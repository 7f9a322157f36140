"""FedKeep's floor: by hand, at its ends, with Adam, and for models without a last linear layer."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from support.errors import raises
from support.problems import Problem, gap
from torch import nn

import fedkeep as fk
from fedkeep.errors import ModelError
from fedkeep.methods import FedAvg, FedKeep

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


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_with_adam_push_has_no_effect_and_the_engines_agree(problem: Problem, engine: str) -> None:
    adam = dataclasses.replace(problem, settings={**problem.settings, "optimizer": "adam", "momentum": 0.0})
    one, other = adam.run(FedKeep(push=0.01), engine=engine), adam.run(FedKeep(push=1e6), engine="loop")
    assert gap(one.params, other.params) < 1e-10


def test_without_a_last_linear_layer_it_needs_adam(problem: Problem) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh())
    odd = dataclasses.replace(problem, model=model.double())
    with raises(ModelError, key="model", mentions=["Sequential", "linear layer", "unchanged"]):
        odd.run(FedKeep(rows=False))
    settings = {**problem.settings, "optimizer": "adam", "momentum": 0.0}
    history = dataclasses.replace(odd, settings=settings).run(fk.methods.FedKeep(rows=False)).history
    assert history.records[-1]["round"] == problem.settings["rounds"]
