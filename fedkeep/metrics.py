"""Metrics of a classifier: from confusion matrices with numpy, from logits with torch.

Precision, recall, F1 and balanced accuracy follow from a confusion matrix [..., true, predicted]. The area under the
ROC curve and the calibration error need the logits [N, C] and labels [N]; they are computed where the logits are,
without waiting for a GPU. All agree with scikit-learn; docs/metrics.md has the formulas.

>>> confusion = [[8, 2], [1, 9]]
>>> f1(confusion).round(3).tolist(), round(float(balanced_accuracy(confusion)), 3)
([0.842, 0.857], 0.85)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

BINS = 15  # of confidence, all equally wide
_AT_ONCE = 1 << 22  # scores that are sorted at a time
_UNIT = 1 << 32  # of confidences as whole numbers, whose sums do not depend on the order


class ClassCounts(NamedTuple):
    """How many examples are of each class, how many are predicted as it, and how many are both, [..., C] each."""

    true: np.ndarray
    predicted: np.ndarray
    right: np.ndarray

    @classmethod
    def of(cls, confusion: Any) -> ClassCounts:
        """Return the counts of confusion matrices [..., true, predicted]."""
        matrix = np.asarray(confusion)
        return cls(matrix.sum(-1), matrix.sum(-2), np.diagonal(matrix, axis1=-2, axis2=-1))

    def accuracy(self) -> np.ndarray:
        """Return the share of correctly classified examples, [...]."""
        return _ratio(self.right.sum(-1), self.true.sum(-1))

    def precision(self) -> np.ndarray:
        """Return, by class, the share of the examples predicted as it that are of it; see `precision`."""
        of_none = np.where(self.true > 0, 1, 0)  # 0 of 1 for a class that is never predicted
        return _ratio(self.right, np.where(self.predicted > 0, self.predicted, of_none))

    def recall(self) -> np.ndarray:
        """Return, by class, the share of its examples that are predicted as it; see `recall`."""
        return _ratio(self.right, self.true)

    def f1(self) -> np.ndarray:
        """Return the harmonic mean of precision and recall by class; see `f1`."""
        return _ratio(2 * self.right, self.true + self.predicted)


def precision(confusion: Any) -> np.ndarray:
    """Return, by class, the share of the examples predicted as it that are of it, [..., C].

    0 for a class of the test set that is never predicted; NaN for one that is neither there nor predicted.
    """
    return ClassCounts.of(confusion).precision()


def recall(confusion: Any) -> np.ndarray:
    """Return, by class, the share of its examples that are predicted as it, [..., C]: the class accuracy.

    NaN for a class that the test set lacks.
    """
    return ClassCounts.of(confusion).recall()


def f1(confusion: Any) -> np.ndarray:
    """Return the harmonic mean of precision and recall by class, [..., C].

    NaN for a class that is neither in the test set nor predicted.
    """
    return ClassCounts.of(confusion).f1()


def balanced_accuracy(confusion: Any) -> np.ndarray:
    """Return the mean recall of the classes in the test set, [...]."""
    return macro(recall(confusion))


def macro(by_class: Any) -> np.ndarray:
    """Return the mean over the classes that have a value, [...]; NaN if none has.

    >>> float(macro([0.5, float("nan"), 1.0]))
    0.75
    """
    values = np.asarray(by_class, dtype=float)
    known = ~np.isnan(values)
    return _ratio(np.where(known, values, 0.0).sum(-1), known.sum(-1))


def _ratio(part: Any, whole: Any) -> np.ndarray:
    part, whole = np.asarray(part, dtype=float), np.asarray(whole, dtype=float)
    return np.asarray(np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0))


def count_pairs(truth: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Return how often each class [B] was predicted as each class [..., B]: [..., true, predicted].

    Counted, not multiplied from one-hot vectors: that takes C^2 operations for every example and model.
    """
    models = predicted.reshape(-1, predicted.shape[-1])
    first = torch.arange(len(models), device=truth.device)[:, None] * classes
    cells = (first + truth) * classes + models
    cells, size = cells.reshape(-1), len(models) * classes**2
    if cells.is_cuda:  # where bincount waits for the device
        counts = torch.zeros(size, dtype=torch.long, device=cells.device).index_add_(0, cells, torch.ones_like(cells))
    else:
        counts = torch.bincount(cells, minlength=size)
    return counts.reshape(*predicted.shape[:-1], classes, classes)


@torch.no_grad()
def auc(logits: Tensor, y: Tensor, groups: Tensor | None = None, n_groups: int = 1) -> Tensor:
    """Return the area under the ROC curve of each class against the others, [C]; with `groups` [N], [n_groups, C].

    The score of an example is its softmax probability of the class, in float64. The area is the share of pairs of an
    example of the class and another one in which the first has the higher score; equal scores count half. NaN for a
    class without such pairs, and where a probability is NaN.

    >>> z = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.5, 0.0], [1.0, 0.0]])
    >>> auc(z, torch.tensor([0, 1, 1, 0])).tolist()
    [1.0, 1.0]
    """
    classes = logits.shape[-1]
    scores = _probabilities(logits).T.contiguous()
    group = torch.zeros_like(y) if groups is None else groups
    step = max(1, _AT_ONCE // max(1, len(y)))
    parts = []
    for first in range(0, classes, step):
        some = torch.arange(first, min(first + step, classes), device=y.device)
        parts.append(_areas(scores[first : first + step], y == some[:, None], group, n_groups))
    areas = torch.cat(parts).T
    return areas[0] if groups is None else areas


def _areas(scores: Tensor, of_class: Tensor, group: Tensor, n_groups: int) -> Tensor:
    """Return the areas [K, G] of scores [K, N], given which examples are of the class [K, N] and their groups [N].

    By ranks (Mann and Whitney): examples are sorted by group and score; equal scores share their mean rank.
    """
    values, order = scores.sort(dim=1)
    if n_groups > 1:
        in_groups = group[order].argsort(dim=1, stable=True)
        values, order = values.gather(1, in_groups), order.gather(1, in_groups)
    group, of_class = group[order], of_class.gather(1, order).long()
    position = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    begins = torch.ones_like(order, dtype=torch.bool)  # where a new score or group begins
    begins[:, 1:] = (values[:, 1:] != values[:, :-1]) | (group[:, 1:] != group[:, :-1])
    ends = torch.ones_like(begins)
    ends[:, :-1] = begins[:, 1:]
    first = torch.where(begins, position, 0).cummax(1).values
    last = torch.where(ends, position, scores.shape[1]).flip(1).cummin(1).values.flip(1)

    cells = (group + torch.arange(len(group), device=group.device)[:, None] * n_groups).reshape(-1)

    def sum_by_group(numbers: Tensor) -> Tensor:
        return _sum_by_cell(cells, numbers.reshape(-1), len(group) * n_groups).reshape(-1, n_groups)

    size, of_class_here = sum_by_group(torch.ones_like(order)), sum_by_group(of_class)
    start = size.cumsum(1) - size
    twice_ranks = sum_by_group((first + last + 2 - 2 * start.gather(1, group)) * of_class)
    won = twice_ranks - of_class_here * (of_class_here + 1)  # twice the pairs that the class wins
    pairs = 2 * of_class_here * (size - of_class_here)
    broken = sum_by_group(values.isnan().long()) > 0
    return torch.where((pairs > 0) & ~broken, won.double() / pairs, torch.nan)


@torch.no_grad()
def calibration_error(
    logits: Tensor, y: Tensor, groups: Tensor | None = None, n_groups: int = 1, bins: int = BINS
) -> Tensor:
    """Return the expected calibration error, []; with `groups` [N], [n_groups].

    The confidence is the largest softmax probability. In each of `bins` equally wide intervals of confidence, the mean
    confidence is compared with the accuracy; the error is the mean difference over all examples (Guo et al., 2017). NaN
    for a group without examples, and where a probability is NaN.

    >>> z = torch.tensor([[0.0, 0.0], [0.0, 0.0]])  # half sure, and right in one of two
    >>> float(calibration_error(z, torch.tensor([0, 1])))
    0.0
    """
    confidence, predicted = _probabilities(logits).max(-1)
    group = torch.zeros_like(y) if groups is None else groups
    broken = confidence.isnan()
    confidence = confidence.nan_to_num(0.0)
    interval = ((confidence * bins).ceil().long() - 1).clamp(0, bins - 1)
    surplus = (confidence * _UNIT).round().long() - (predicted == y).long() * _UNIT

    gaps = _sum_by_cell(group * bins + interval, surplus, n_groups * bins).abs().reshape(n_groups, bins).sum(1)
    sizes = _sum_by_cell(group, torch.ones_like(y), n_groups)
    usable = (sizes > 0) & (_sum_by_cell(group, broken.long(), n_groups) == 0)
    errors = torch.where(usable, gaps.double() / _UNIT / sizes, torch.nan)
    return errors[0] if groups is None else errors


def _sum_by_cell(cells: Tensor, numbers: Tensor, n_cells: int) -> Tensor:
    """Return the sums of whole numbers by cell, [n_cells]: exact, so their order does not matter."""
    return torch.zeros(n_cells, dtype=torch.long, device=cells.device).index_add_(0, cells, numbers)


def _probabilities(logits: Tensor) -> Tensor:
    return logits.double().softmax(-1)
