"""Losses over some of the classes, and what the methods that use label counts do at their edges."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from support.errors import raises
from support.problems import Problem, gap
from torch import nn

from fedkeep import data, losses, methods, models
from fedkeep.engine.simulate import simulate
from fedkeep.errors import MethodError


def test_masked_kl_by_hand() -> None:
    """The teacher has probability 1 on class 2; the student, over classes 1 and 2, softmax(0, log 3)[1] = 3/4."""
    z = torch.tensor([[9.0, 0.0, math.log(3)]], requires_grad=True)
    student, teacher = torch.tensor([False, True, True]), torch.tensor([False, False, True])
    value = losses.masked_kl(z, torch.tensor([[7.0, 8.0, -2.0]]), student, teacher)
    assert value.tolist() == pytest.approx([math.log(4 / 3)])
    (gradient,) = torch.autograd.grad(value.sum(), z)
    assert gradient[0].tolist() == pytest.approx([0.0, 0.25, -0.25])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_masked_classes_are_finite_and_have_no_gradient(dtype: torch.dtype) -> None:
    z = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]], dtype=dtype, requires_grad=True)
    nothing, one = torch.zeros(3).bool(), torch.tensor([False, True, False])
    for classes in (nothing, one):
        value = losses.masked_kl(z, z.detach(), classes, classes) + losses.keep_classes(z, one).logsumexp(-1)
        (gradient,) = torch.autograd.grad(value.sum(), z)
        assert value.isfinite().all()
        assert gradient.tolist() == [[0.0, 1.0, 0.0]] * 2


def balanced(problem: Problem) -> Problem:
    """Return the problem with three clients that have three examples of every class."""
    y = problem.data.y_train.numpy()
    rows = [np.flatnonzero(y == c) for c in range(4)]
    clients = [np.concatenate([own[3 * k : 3 * k + 3] for own in rows]) for k in range(3)]
    return dataclasses.replace(problem, clients=clients, settings={**problem.settings, "participation": 1.0})


def test_without_majority_classes_fedlmd_is_fedntd(problem: Problem) -> None:
    for other, expected in ((balanced(problem), True), (problem, False)):
        ours, ntd = (other.run(method(beta=0.7, tau=2.0)).params for method in (methods.FedLMD, methods.FedNTD))
        assert (gap(ntd, ours) < 1e-12) == expected


def test_with_equal_label_counts_calibration_changes_nothing(problem: Problem) -> None:
    """Every logit is moved by the same number, or by the factor 1."""
    plain = balanced(problem).run(methods.FedAvg()).params
    for method in (methods.FedRoD(), methods.FedLC(), methods.FedRS(), methods.FedRS(form="released")):
        assert gap(plain, balanced(problem).run(method).params) < 1e-10, method


def test_fedvls_without_its_terms_is_balanced_softmax(problem: Problem) -> None:
    ours = problem.run(methods.FedVLS(lam=0.0, mu=0.0, form="printed")).params
    assert gap(problem.run(methods.FedRoD()).params, ours) < 1e-10


def test_correlations_of_two_features_by_hand() -> None:
    """Features (1, 2, 3) and (1, 3, 2) have the correlation 1/2: as printed 2 * 1/4 / 4, as released 4/3 * 1/4."""
    h = torch.tensor([[1.0, 1.0], [2.0, 3.0], [3.0, 2.0], [50.0, -7.0]], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    assert float(methods.FedDecorr(form="printed").penalty(h, mask)) == pytest.approx(1 / 8, rel=1e-6)
    assert float(methods.FedDecorr(form="released").penalty(h, mask)) == pytest.approx(1 / 3, rel=1e-6)
    single = torch.tensor([True, False, False, False])
    assert float(methods.FedDecorr(form="released").penalty(h, single)) == 0


def test_gcfed_keeps_the_mean_of_every_units_weights(problem: Problem) -> None:
    """Without weight decay; the classifier's too, at the server."""
    for form in ("hybrid", "local", "global"):
        sim = problem.run(methods.GCFed(form=form), weight_decay=0.0)
        for name in ("body.1.weight", "classifier.weight"):
            assert gap({"m": sim.task.init[name].mean(1)}, {"m": sim.params[name].mean(1)}) < 1e-10, (form, name)
            assert gap({"w": sim.task.init[name]}, {"w": sim.params[name]}) > 1e-3


def test_gcfed_needs_a_classifier_for_its_hybrid_form(problem: Problem) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x).mean((2, 3))

    without = dataclasses.replace(problem, model=Pooled().double())
    with raises(MethodError, key="method.form", mentions=["form='local'"]):
        without.simulation(methods.GCFed())
    without.run(methods.GCFed(form="local"))


def test_two_classes_are_too_few_for_fedlmd() -> None:
    two = data.from_arrays(
        np.random.default_rng(0).normal(size=(20, 1, 4, 4)), np.arange(20) % 2, np.zeros((2, 1, 4, 4)), [0, 1]
    )
    with raises(MethodError, key="n_classes", value=2):
        simulate("fedlmd", models.build("mlp", (1, 4, 4), 2, seed=0), two, [np.arange(20)], participation=1)
