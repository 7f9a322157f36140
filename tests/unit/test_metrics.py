"""Metrics of a classifier, against scikit-learn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

from fedkeep import metrics


def draw(n: int, classes: int, present: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits, of which half occur twice, and labels of the first `present` classes."""
    rng = torch.Generator().manual_seed(n + classes)
    z = torch.randn(n, classes, generator=rng)
    z[: n // 4] = z[-(n // 4) :]
    return z, torch.randint(0, present or classes, (n,), generator=rng)


@pytest.mark.parametrize(("classes", "present"), [(2, 2), (5, 5), (7, 4)])
def test_confusion_metrics_are_those_of_scikit_learn(classes: int, present: int) -> None:
    z, y = draw(200, classes, present)
    predicted = z.argmax(-1)
    confusion = metrics.count_pairs(y, predicted, classes).numpy()
    options = {"labels": list(range(classes)), "average": None, "zero_division": 0}
    precision, recall, f1, _ = reference.precision_recall_fscore_support(y, predicted, **options)
    assert np.allclose(metrics.precision(confusion), precision, rtol=1e-15)
    assert np.allclose(metrics.recall(confusion)[:present], recall[:present], rtol=1e-15)
    assert np.isnan(metrics.recall(confusion)[present:]).all()
    assert np.allclose(metrics.f1(confusion), f1, rtol=1e-15)
    macro_f1 = reference.f1_score(y, predicted, average="macro", zero_division=0)
    assert float(metrics.macro(metrics.f1(confusion))) == pytest.approx(macro_f1, rel=1e-14)
    if present == classes:
        balanced = reference.balanced_accuracy_score(y, predicted)
        assert float(metrics.balanced_accuracy(confusion)) == pytest.approx(balanced, rel=1e-14)


def test_classes_that_are_absent_or_never_predicted() -> None:
    confusion = [[3, 1, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]  # class 1 is never right, 2 and 3 are absent
    assert metrics.precision(confusion).tolist()[:2] == [0.6, 0.0]
    assert np.isnan(metrics.precision(confusion)[2:]).all()
    assert np.isnan(metrics.f1(confusion)[2:]).all()
    assert metrics.precision([[2, 0], [2, 0]]).tolist() == [0.5, 0.0]  # in the test set, and never predicted
    rounds = metrics.f1(np.stack([confusion, confusion]))
    assert rounds.shape == (2, 4)
    assert float(metrics.balanced_accuracy(confusion)) == 0.375


@pytest.mark.parametrize(("n", "classes"), [(300, 2), (300, 5), (50, 20)])
def test_auc_is_that_of_scikit_learn_also_with_ties(n: int, classes: int) -> None:
    z, y = draw(n, classes)
    y[:classes] = torch.arange(classes)
    p = z.double().softmax(-1).numpy()
    areas = metrics.auc(z, y)
    assert len(np.unique(p[:, 0])) < n  # ties
    for c in range(classes):
        assert float(areas[c]) == pytest.approx(reference.roc_auc_score(y == c, p[:, c]), rel=1e-13)
    if classes > 2:
        macro = reference.roc_auc_score(y, p, multi_class="ovr", average="macro")
        assert float(areas.mean()) == pytest.approx(macro, rel=1e-13)


def test_auc_in_several_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = draw(100, 7)
    whole = metrics.auc(z, y)
    monkeypatch.setattr(metrics, "_AT_ONCE", 250)
    assert torch.equal(metrics.auc(z, y), whole)


def test_metrics_of_groups_are_those_of_their_examples_alone() -> None:
    z, y = draw(200, 4)
    group = torch.arange(200) % 3 * 2  # groups 1 and 5 are empty
    areas, errors = metrics.auc(z, y, group, 6), metrics.calibration_error(z, y, group, 6)
    for k in (0, 2, 4):
        own = group == k
        assert torch.equal(areas[k], metrics.auc(z[own], y[own]))
        assert torch.equal(errors[k], metrics.calibration_error(z[own], y[own]))
    assert areas[1].isnan().all()
    assert errors[5].isnan()


def test_calibration_error_is_the_textbook_sum() -> None:
    z, y = draw(500, 3)
    confidence, predicted = z.double().softmax(-1).max(-1)
    edges, expected = torch.linspace(0, 1, metrics.BINS + 1, dtype=torch.float64), 0.0
    for low, high in itertools.pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            gap = confidence[inside].mean() - (predicted == y)[inside].double().mean()
            expected += float(inside.double().mean() * gap.abs())
    assert float(metrics.calibration_error(z, y)) == pytest.approx(expected, abs=1e-9)
    sure = torch.tensor([[40.0, -40.0]] * 4)
    assert float(metrics.calibration_error(sure, torch.tensor([0, 0, 0, 1]))) == 0.25


def test_logits_that_are_not_numbers_have_no_metrics() -> None:
    z, y = draw(50, 3)
    z[7, 1] = float("nan")
    assert metrics.auc(z, y).isnan().all()
    assert metrics.calibration_error(z, y).isnan()
    z[7, 1] = float("-inf")  # a class that is ruled out
    assert not metrics.auc(z, y).isnan().any()
    assert not metrics.calibration_error(z, y).isnan()
    one_class = metrics.auc(z, torch.zeros(50, dtype=torch.long))
    assert one_class.isnan().all()
