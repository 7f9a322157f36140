"""Sums and means of each class, and the label counts that clients upload for them."""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeep.method import Batch, Bound
from fedkeep.task import Task

LABEL_COUNTS = Bound(whole=True, low=0, total="n")  # of a client's label counts in an upload


def class_sums(task: Task, values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the sums [C, d] of the values [B, d] of each class's examples, and their numbers [C], both like values."""
    of_class = batch["y"] == torch.arange(task.n_classes, device=values.device)[:, None]
    member = (of_class & batch["mask"]).to(values.dtype)
    return member @ values, member.sum(1)


def mean_by_counts(stacked: Tensor, counts: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Average row c of [K, C, ...] by the counts [K, C] of class c.

    The row of a class that nobody has is that of `otherwise` [C, ...], or 0.

    >>> rows, counts = torch.tensor([[1.0, 2.0], [5.0, 4.0]]), torch.tensor([[3, 0], [1, 0]])
    >>> mean_by_counts(rows, counts).tolist(), mean_by_counts(rows, counts, otherwise=torch.tensor([8.0, 9.0])).tolist()
    ([2.0, 0.0], [2.0, 9.0])
    """
    share = class_shares(counts).to(stacked.dtype).reshape(*counts.shape, *[1] * (stacked.ndim - 2))
    mean = (share * stacked).sum(0)
    return mean if otherwise is None else torch.where(share.sum(0) > 0, mean, otherwise)


def class_shares(counts: Tensor) -> Tensor:
    """Return each client's share of the cohort's examples of a class, [K, C]; 0 where nobody has any.

    >>> class_shares(torch.tensor([[3, 0], [1, 0]])).tolist()
    [[0.75, 0.0], [0.25, 0.0]]
    """
    precise = counts.to(torch.promote_types(counts.dtype, torch.float32))
    total = precise.sum(0)
    return precise / torch.where(total > 0, total, 1)
