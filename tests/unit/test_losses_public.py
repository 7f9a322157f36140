"""Numbers by hand for the losses of FedSSD and Flashback."""

from __future__ import annotations

import math

import pytest
import torch

from fedkeep import losses


def test_credibility_weights_by_hand() -> None:
    """FedSSD eq. 4 for three classes, the third never recognised.

    A = [[.8, .2, 0], [.1, .9, 0], [.5, .5, 0]]
    M_class[0] = .8 (1 - max(.1, .5)) = .40
    M_class[1] = .9 (1 - max(.2, .5)) = .45
    M_class[2] = 0 (1 - max(0, 0)) = 0
    M_sample = 1 - sqrt(1 - p): p = .75 -> .5, p = .36 -> .2, p = 1 -> 1
    M = 2 max(M_class M_sample - .1, 0):
      p = .75: 2 (.200 - .1) = .20, 2 (.225 - .1) = .25, 0
      p = .36: .08 and .09 are below .1: 0, 0, 0
      p = 1:   2 (.400 - .1) = .60, 2 (.450 - .1) = .70, 0
    """
    A = torch.tensor([[0.8, 0.2, 0.0], [0.1, 0.9, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    p_true = torch.tensor([0.75, 0.36, 1.0], dtype=torch.float64)
    expected = torch.tensor([[0.2, 0.25, 0.0], [0.0, 0.0, 0.0], [0.6, 0.7, 0.0]], dtype=torch.float64)
    assert torch.allclose(losses.credibility_weights(A, p_true, 2.0), expected, atol=1e-14)


def test_credibility_weights_stay_finite_where_a_probability_rounds_above_one() -> None:
    weights = losses.credibility_weights(torch.eye(3), torch.tensor([1.0 + 1e-6]), 1.0)
    assert torch.allclose(weights, torch.full((1, 3), 0.9))


def test_dynamic_alpha_by_hand() -> None:
    """Flashback section 4.1: a student and two teachers, the third class known to nobody.

    nu = [6, 0, 0, 2], mu_1 = [2, 4, 0, 1], mu_2 = [0, 12, 0, 1]; sums: [8, 16, 0, 4]
    alpha_s = [6/8, 0, 0/0, 2/4] = [.75, 0, 0, .5]
    alpha_1 = [2/8, 4/16, 0/0, 1/4] = [.25, .25, 0, .25], alpha_2 = [0, 12/16, 0/0, 1/4] = [0, .75, 0, .25]
    """
    nu = torch.tensor([6.0, 0.0, 0.0, 2.0])
    mu = torch.tensor([[2.0, 4.0, 0.0, 1.0], [0.0, 12.0, 0.0, 1.0]])
    alpha_s, alpha = losses.dynamic_alpha(nu, mu)
    assert alpha_s.tolist() == [0.75, 0.0, 0.0, 0.5]
    assert alpha.tolist() == [[0.25, 0.25, 0.0, 0.25], [0.0, 0.75, 0.0, 0.25]]
    assert (alpha_s + alpha.sum(0)).tolist() == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_dynamic_kl_by_hand(tau: float) -> None:
    """Two classes, student logits (0, 0), teacher logits tau (ln 3, 0): q = (1/2, 1/2), p = (3/4, 1/4) at any tau.

    With alpha = (.4, .8): .4 * 3/4 * ln(3/2) + .8 * 1/4 * ln(1/2) = .3 ln 1.5 - .2 ln 2 = -.01699, which is negative
    although a KL divergence is not, and without a factor tau^2 the same at every tau.
    """
    student = torch.zeros(1, 2, dtype=torch.float64)
    teacher = torch.tensor([[tau * math.log(3), 0.0]], dtype=torch.float64)
    value = losses.dynamic_kl(student, teacher, torch.tensor([0.4, 0.8], dtype=torch.float64), tau)
    assert value.item() == pytest.approx(0.3 * math.log(1.5) - 0.2 * math.log(2), rel=1e-12)
    assert value.item() == pytest.approx(-0.01699, abs=1e-5)


def test_dynamic_kl_with_full_weights_is_kl_without_its_factor() -> None:
    rng = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 4, generator=rng, dtype=torch.float64)
    full = losses.dynamic_kl(student, teacher, torch.ones(4, dtype=torch.float64), 2.0)
    assert torch.allclose(full, losses.kl(student, teacher, 2.0) / 4)


def test_dynamic_kl_of_several_teachers_is_each_ones() -> None:
    rng = torch.Generator().manual_seed(0)
    student, teachers = torch.randn(5, 4, generator=rng), torch.randn(3, 5, 4, generator=rng)
    alpha = torch.rand(3, 4, generator=rng)
    together = losses.dynamic_kl(student, teachers, alpha[:, None], 3.0)
    for i in range(3):
        assert torch.allclose(together[i], losses.dynamic_kl(student, teachers[i], alpha[i], 3.0))
