"""Losses: pure functions with one value per example, safe under `vmap`.

Legend for names: z logits, y true classes, B examples in a batch, C classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average over the real examples of a batch; padded ones count for nothing.

    >>> masked_mean(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return -log softmax(z)[y], [B, C] and [B] -> [B]."""
    return F.cross_entropy(logits, y, reduction="none")


def kl(student: Tensor, teacher: Tensor, tau: float = 1.0) -> Tensor:
    """Return tau^2 KL(teacher || student) of the softmaxes at temperature tau, [B, C] -> [B].

    >>> same = torch.tensor([[1.0, 2.0]])
    >>> kl(same, same).item()
    0.0
    """
    log_q = F.log_softmax(student / tau, dim=-1)
    log_p = F.log_softmax(teacher / tau, dim=-1)
    return tau**2 * (log_p.exp() * (log_p - log_q)).sum(-1)


def not_true(logits: Tensor, y: Tensor) -> Tensor:
    """Drop the true class's logit, [B, C] -> [B, C-1], in a fixed shape (a mask would not stack).

    >>> not_true(torch.tensor([[10.0, 11.0, 12.0]]), torch.tensor([1]))
    tensor([[10., 12.]])
    """
    j = torch.arange(logits.shape[-1] - 1, device=logits.device)
    return logits.gather(-1, j + (j >= y.unsqueeze(-1)))


def not_true_kl(student: Tensor, teacher: Tensor, y: Tensor, tau: float = 1.0) -> Tensor:
    """Return `kl` over the C-1 classes other than y: not-true distillation (FedNTD eq. 11).

    No gradient reaches the true class's logit.
    """
    return kl(not_true(student, y), not_true(teacher, y), tau)
