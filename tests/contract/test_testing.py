"""The checks that users run on their own methods find what they should."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.methods import METHODS

from fedkeep import tree
from fedkeep.errors import MethodError
from fedkeep.method import FedAvg, hyper
from fedkeep.testing import check_method


@pytest.mark.parametrize("name", METHODS)
def test_the_methods_keep_the_contract(name: str) -> None:
    check_method(METHODS[name]())


class Unmasked(FedAvg):
    def loss(self, task, params, batch, shared, local):
        return task.criterion(task.apply(params, batch["x"], train=True), batch["y"]).mean()


class Writing(FedAvg):
    def prepare(self, task, shared, client, facts):
        shared["params"]["classifier.bias"].add_(0.1)
        return {}


class Random(FedAvg):
    def correct(self, grads, params, shared, local):
        return tree.map(lambda g: g + torch.tensor(float(torch.rand(1, generator=RNG))), grads)


RNG = torch.Generator().manual_seed(0)


class Growing(FedAvg):
    def aggregate(self, task, server, uploads, cohort):
        return {**super().aggregate(task, server, uploads, cohort), str(cohort.round): torch.zeros(1)}


@dataclass(frozen=True)
class Unused(FedAvg):
    mu: float = hyper(0.1, "nothing", other=1.0)


@dataclass(frozen=True)
class NotNeutral(FedAvg):
    mu: float = hyper(0.1, "a shift", neutral=0.0)

    def aggregate(self, task, server, uploads, cohort):
        averaged = super().aggregate(task, server, uploads, cohort)
        return {"params": tree.map(lambda w: w + 0.1 + self.mu, averaged["params"])}


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Unmasked(), "stacked gives other weights"),
        (Writing(), "other weights|wrote into"),
        (Random(), "other weights|cannot be stacked"),
        (Growing(), "changed its structure"),
        (Unused(), "mu = 1.0 changes nothing"),
        (NotNeutral(), "at mu = 0.0 it is not FedAvg"),
    ],
)
def test_a_broken_rule_is_found_and_named(method: FedAvg, said: str) -> None:
    with pytest.raises(MethodError, match=said):
        check_method(method)
