"""The instruments and the losses, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep import forgetting as fg
from fedkeep import losses

PROFILE = settings(derandomize=True, deadline=None, max_examples=50)
NAN = float("nan")


def close(actual, expected) -> bool:
    return np.allclose(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


# instruments


def test_class_accuracy_is_the_diagonal_over_the_row():
    """8 of 10, 3 of 4; the third class was never tested."""
    confusion = [[8, 2, 0], [1, 3, 0], [0, 0, 0]]
    assert close(fg.class_accuracy(confusion), [0.8, 0.75, NAN])
    assert close(fg.class_accuracy([confusion, np.eye(3)]), [[0.8, 0.75, NAN], [1, 1, 1]])


def test_accuracy_is_the_diagonal_over_everything():
    """11 of 14, and 3 of 3."""
    assert close(fg.accuracy([[8, 2, 0], [1, 3, 0], [0, 0, 0]]), 11 / 14)
    assert close(fg.accuracy([np.eye(3), [[0, 1, 0], [0, 0, 2], [1, 0, 0]]]), [1, 0])


def test_forgetting_is_the_gap_between_the_best_earlier_round_and_the_last():
    """Best before the end (0.9, 0.4), last (0.6, 0.3): gaps 0.3 and 0.1, on average 0.2."""
    assert close(fg.forgetting([[0.9, 0.2], [0.5, 0.4], [0.6, 0.3]]), 0.2)


def test_forgetting_is_not_clamped_at_zero():
    """(0.1 - 0.5) and (0.4 - 0.2): -0.4 and 0.2, on average -0.1; the last round is not its own best."""
    assert close(fg.forgetting([[0.1, 0.4], [0.5, 0.2]]), -0.1)


def test_forgetting_leaves_out_classes_that_were_not_tested():
    """Gaps 0.3 and 0.1 over two classes; the third counts in neither sum nor number."""
    assert close(fg.forgetting([[0.9, NAN, 0.2], [0.5, NAN, 0.4], [0.6, NAN, 0.3]]), 0.2)


def test_forgetting_of_a_single_round_is_not_a_number():
    assert math.isnan(fg.forgetting([[0.9, 0.2]]))
    assert math.isnan(fg.forgetting(np.zeros((0, 2))))


def test_forgetting_of_sparse_rounds_is_over_the_rows_given():
    """Of the rounds 1, 2, 3 the first and the last were evaluated: 0.9 - 0.6 and 0.2 - 0.3, on average 0.1."""
    every = np.array([[0.9, 0.2], [0.5, 0.4], [0.6, 0.3]])
    assert close(fg.forgetting(every[[0, 2]]), 0.1)


def test_round_forgetting_counts_losses_and_ignores_gains():
    """Round 2 loses 0.4 of one class and gains on the other: 0.4 / 2; round 3 gains and loses 0.3: 0.3 / 2."""
    assert close(fg.round_forgetting([[0.9, 0.2], [0.5, 0.4], [0.6, 0.1]]), [0.2, 0.15])
    assert close(fg.round_forgetting([[0.1, 0.2], [0.3, 0.2]]), [0])


def test_round_forgetting_leaves_out_classes_that_were_not_tested():
    assert close(fg.round_forgetting([[0.9, 0.2, NAN], [0.5, 0.4, NAN]]), [0.2])


def test_round_forgetting_of_a_single_round_is_empty():
    assert fg.round_forgetting([[0.9, 0.2]]).shape == (0,)


@pytest.mark.parametrize("measure", [fg.forgetting, fg.round_forgetting])
def test_accuracies_without_a_class_axis_are_refused(measure):
    with pytest.raises(ValueError, match=r"\(2,\)"):
        measure([0.9, 0.5])


def test_forgetting_degree_is_the_share_that_was_lost():
    """(0.8 - 0.4) / 0.801; (0 - 0.5) / 0.001 = -500: hardly known before; all lost: 0.5 / 0.501; untested: NaN."""
    degree = fg.forgetting_degree([0.8, 0.0, 0.5, NAN], [0.4, 0.5, 0.0, NAN])
    assert close(degree, [0.4 / 0.801, -500, 0.5 / 0.501, NAN])
    assert close(fg.forgetting_degree([0.5], [0.25], xi=0), [0.5])
    assert fg.forgetting_degree(np.ones((3, 4)), np.ones((3, 4))).shape == (3, 4)


def test_in_local_weighs_by_the_clients_own_labels():
    """p = (3/4, 1/4, 0): 3/4 * 1 + 1/4 * 0.5 = 0.875."""
    assert close(fg.in_local([1.0, 0.5, 0.2], [3, 1, 0]), 0.875)


def test_out_local_weighs_by_what_the_client_lacks():
    """p = (3/4, 1/4, 0), weights (1/8, 3/8, 4/8): 0.125 * 1 + 0.375 * 0.5 + 0.5 * 0.2 = 0.4125."""
    assert close(fg.out_local([1.0, 0.5, 0.2], [3, 1, 0]), 0.4125)


def test_local_accuracies_of_many_clients_go_row_by_row():
    """Client 0 holds class 0 alone, client 1 both: in (0.2, 0.6), out (1.0, 0.6)."""
    accuracy, counts = [[0.2, 1.0], [0.2, 1.0]], [[5, 0], [2, 2]]
    assert close(fg.in_local(accuracy, counts), [0.2, 0.6])
    assert close(fg.out_local(accuracy, counts), [1.0, 0.6])


def test_local_accuracies_leave_out_classes_that_were_not_tested():
    """p = (1/2, 1/4, 1/4), the first untested: in (0.5 + 0.2) / 2 = 0.35, as is out, both weights being equal."""
    accuracy = [NAN, 0.5, 0.2]
    assert close(fg.in_local(accuracy, [2, 1, 1]), 0.35)
    assert close(fg.out_local(accuracy, [2, 1, 1]), 0.35)


def test_local_accuracies_are_not_a_number_where_nothing_weighs():
    assert math.isnan(fg.in_local([NAN, 0.5], [3, 0]))  # its only class is untested
    assert math.isnan(fg.out_local([0.5, NAN], [3, 0]))  # the only class it lacks is untested
    assert math.isnan(fg.in_local([0.5, 0.5], [0, 0]))  # it has no examples


def test_rounds_to_counts_from_one_and_reaching_is_enough():
    assert fg.rounds_to([0.1, 0.5, 0.4, 0.9], 0.5) == 2
    assert fg.rounds_to([0.5], 0.5) == 1
    assert fg.rounds_to([0.1, 0.4], 0.5) is None
    assert fg.rounds_to([], 0.5) is None
    assert fg.rounds_to([NAN, 0.6], 0.5) == 2


def test_rounds_to_of_sparse_rounds_names_the_round():
    assert fg.rounds_to([0.1, 0.5, 0.9], 0.5, rounds=[10, 20, 25]) == 20


def test_smoothed_is_an_exponential_moving_average_from_the_first_value():
    """0.5; 0.6 * 0.5 + 0.4 * 1 = 0.7; 0.6 * 0.7 + 0.4 * 0 = 0.42. At smoothing 0 nothing changes."""
    accuracy = [0.5, 1.0, 0.0]
    assert close(fg.smoothed(accuracy), [0.5, 0.7, 0.42])
    assert close(fg.smoothed(accuracy, 0), accuracy)
    assert accuracy == [0.5, 1.0, 0.0]
    assert fg.smoothed([]).shape == (0,)


def test_smoothed_leaves_the_array_it_is_given():
    given_array = np.array([0.0, 1.0])
    fg.smoothed(given_array)
    assert given_array.tolist() == [0, 1]


# losses


def logits(seed: int, *shape: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


CASES = st.tuples(st.integers(0, 10_000), st.integers(1, 5), st.integers(2, 6), st.sampled_from([0.5, 1.0, 2.0, 4.0]))


def test_cross_entropy_of_even_logits_is_the_logarithm_of_their_number():
    """-log(1/4); and with logits (log 3, 0), -log(3/4) for the first class, -log(1/4) for the second."""
    even = torch.zeros(2, 4, dtype=torch.float64)
    assert close(losses.cross_entropy(even, torch.tensor([0, 3])), [math.log(4)] * 2)
    z = torch.tensor([[math.log(3), 0.0]] * 2, dtype=torch.float64)
    assert close(losses.cross_entropy(z, torch.tensor([0, 1])), [math.log(4 / 3), math.log(4)])


def test_kl_of_two_classes_by_hand():
    """Teacher (3/4, 1/4), student (1/2, 1/2): 3/4 log(3/2) + 1/4 log(1/2); the other way 1/2 log(2/3) + 1/2 log 2."""
    teacher = torch.tensor([[math.log(3), 0.0]], dtype=torch.float64)
    student = torch.zeros(1, 2, dtype=torch.float64)
    assert close(losses.kl(student, teacher), [0.75 * math.log(1.5) + 0.25 * math.log(0.5)])
    assert close(losses.kl(teacher, student), [0.5 * math.log(2 / 3) + 0.5 * math.log(2)])


def test_kl_at_a_temperature_is_tau_squared_times_that_of_the_divided_logits():
    """Logits (2 log 3, 0) at tau = 2 are (log 3, 0): four times the value above."""
    teacher = torch.tensor([[2 * math.log(3), 0.0]], dtype=torch.float64)
    expected = 4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert close(losses.kl(torch.zeros(1, 2, dtype=torch.float64), teacher, tau=2.0), [expected])


@PROFILE
@given(CASES)
def test_kl_is_torchs_and_never_negative(case):
    seed, n, c, tau = case
    student, teacher = logits(seed, n, c), logits(seed + 1, n, c)
    ours = losses.kl(student, teacher, tau)
    inputs = F.log_softmax(student / tau, -1), F.log_softmax(teacher / tau, -1)
    theirs = tau**2 * F.kl_div(*inputs, reduction="none", log_target=True).sum(-1)
    assert ours.shape == (n,)
    assert close(ours, theirs)
    assert (ours >= -1e-12).all()
    assert close(losses.kl(student, student, tau), np.zeros(n))
    assert close(losses.kl(student + 5, teacher - 7, tau), ours)  # softmax does not see a shift


@PROFILE
@given(CASES, st.data())
def test_not_true_keeps_the_other_logits_in_order(case, data):
    seed, n, c, _ = case
    y = torch.tensor(data.draw(st.lists(st.integers(0, c - 1), min_size=n, max_size=n)))
    z = logits(seed, n, c)
    kept = losses.not_true(z, y)
    assert kept.tolist() == [[v for j, v in enumerate(row) if j != k] for row, k in zip(z.tolist(), y, strict=True)]


@PROFILE
@given(CASES, st.data())
def test_not_true_kl_has_no_gradient_at_the_true_logit_and_the_textbook_one_elsewhere(case, data):
    """The gradient of tau^2 KL(p || q) in the student's logit j is tau (q_j - p_j)."""
    seed, n, c, tau = case
    y = torch.tensor(data.draw(st.lists(st.integers(0, c - 1), min_size=n, max_size=n)))
    student, teacher = logits(seed, n, c).requires_grad_(), logits(seed + 1, n, c)
    value = losses.not_true_kl(student, teacher, y, tau)
    (grad,) = torch.autograd.grad(value.sum(), student)
    assert (grad[torch.arange(n), y] == 0).all()
    q = torch.softmax(losses.not_true(student.detach(), y) / tau, -1)
    p = torch.softmax(losses.not_true(teacher, y) / tau, -1)
    assert close(losses.not_true(grad, y), tau * (q - p))
    assert (value >= -1e-12).all()


def test_not_true_kl_does_not_see_the_true_logit():
    y = torch.tensor([1])
    student, teacher = torch.tensor([[0.0, 100.0, 0.0]]), torch.tensor([[math.log(3), -50.0, 0.0]])
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert losses.not_true_kl(student, teacher, y).item() == pytest.approx(expected, rel=1e-6)


def test_masked_mean_averages_the_real_examples():
    """(1 + 3) / 2; of nothing at all, 0; what padding holds does not matter, nor does its gradient."""
    values = torch.tensor([1.0, 3.0, float("nan")], requires_grad=True)
    mean = losses.masked_mean(values, torch.tensor([True, True, False]))
    assert mean.item() == 2
    assert torch.autograd.grad(mean, values)[0].tolist() == [0.5, 0.5, 0]
    nothing = losses.masked_mean(values, torch.zeros(3, dtype=torch.bool))
    assert nothing.item() == 0
    assert torch.autograd.grad(nothing, values)[0].tolist() == [0, 0, 0]


STACKABLE = {
    "cross_entropy": lambda z, t, y, m: losses.cross_entropy(z, y),
    "kl": lambda z, t, y, m: losses.kl(z, t, 2.0),
    "not_true": lambda z, t, y, m: losses.not_true(z, y),
    "not_true_kl": lambda z, t, y, m: losses.not_true_kl(z, t, y, 2.0),
    "masked_mean": lambda z, t, y, m: losses.masked_mean(losses.cross_entropy(z, y), m),
}


@pytest.mark.parametrize("name", STACKABLE)
def test_every_loss_stacks_under_vmap_with_its_gradient(name):
    fn = STACKABLE[name]
    z, t = logits(0, 3, 4, 5), logits(1, 3, 4, 5)
    y = torch.arange(12).reshape(3, 4) % 5
    mask = torch.arange(4).expand(3, 4) < torch.tensor([4, 2, 0])[:, None]
    one_by_one = torch.stack([fn(z[k], t[k], y[k], mask[k]) for k in range(3)])
    assert close(torch.vmap(fn)(z, t, y, mask), one_by_one)
    gradient = torch.func.grad(lambda z, t, y, m: fn(z, t, y, m).square().sum())
    assert close(
        torch.vmap(gradient)(z, t, y, mask), torch.stack([gradient(z[k], t[k], y[k], mask[k]) for k in range(3)])
    )
