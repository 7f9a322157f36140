"""Losses: pure functions that return one value per example and work under `vmap`.

Legend for names: z logits, y true classes, B examples in a batch, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import wrap_torch_function

_Loss = TypeVar("_Loss", bound=Callable[..., Tensor])


def _replaceable(loss: _Loss) -> _Loss:
    """Let an engine compute a loss by a kernel of its own, through torch's protocol for that (`__torch_function__`)."""
    return cast(_Loss, wrap_torch_function(lambda *args, **named: (*args, *named.values()))(loss))


@_replaceable
def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the real examples of a batch; padded ones do not count.

    >>> masked_mean(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


@_replaceable
def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return -log softmax(z)[y], [B, C] and [B] -> [B]."""
    return -F.log_softmax(logits, dim=-1).gather(-1, y[:, None]).squeeze(-1)


@_replaceable
def kl(student: Tensor, teacher: Tensor, tau: float = 1.0) -> Tensor:
    """Return tau^2 KL(teacher || student) of the softmaxes at temperature tau, [B, C] -> [B].

    >>> same = torch.tensor([[1.0, 2.0]])
    >>> kl(same, same).item()
    0.0
    """
    log_q = F.log_softmax(student / tau, dim=-1)
    log_p = F.log_softmax(teacher / tau, dim=-1)
    return tau**2 * (log_p.exp() * (log_p - log_q)).sum(-1)


def mse(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean over the classes of the squared differences of the logits, [B, C] -> [B].

    >>> mse(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 5.0]]))
    tensor([4.5000])
    """
    return (student - teacher).square().mean(-1)


def not_true(logits: Tensor, y: Tensor) -> Tensor:
    """Return the logits without the true class's, [B, C] -> [B, C-1]; a fixed shape, unlike boolean indexing.

    >>> not_true(torch.tensor([[10.0, 11.0, 12.0]]), torch.tensor([1]))
    tensor([[10., 12.]])
    """
    j = torch.arange(logits.shape[-1] - 1, device=logits.device)
    return logits.gather(-1, j + (j >= y.unsqueeze(-1)))


@_replaceable
def not_true_kl(student: Tensor, teacher: Tensor, y: Tensor, tau: float = 1.0) -> Tensor:
    """Return `kl` over the C-1 classes other than y: not-true distillation (FedNTD eq. 11).

    No gradient reaches the true class's logit.
    """
    return kl(not_true(student, y), not_true(teacher, y), tau)


def keep_classes(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the logits, with -10,000 where the mask is False: these classes leave the softmax and get no gradient.

    The number is finite in every dtype, so that a product with a probability of 0 is 0 and not NaN. [B, C], and a mask
    [B, C] or [C], -> [B, C].

    >>> keep_classes(torch.zeros(1, 3), torch.tensor([True, True, False])).softmax(-1)
    tensor([[0.5000, 0.5000, 0.0000]])
    """
    return torch.where(classes, logits, -1e4)


def masked_kl(
    student: Tensor, teacher: Tensor, student_classes: Tensor, teacher_classes: Tensor, tau: float = 1.0
) -> Tensor:
    """Return `kl` with each softmax over the classes of its own mask, [B, C] -> [B]; 0 if the teacher has no class.

    The teacher's classes must be among the student's. The masks are [B, C] or [C].

    >>> z, both = torch.zeros(1, 3), torch.tensor([True, True, False])
    >>> masked_kl(z, z, both, both), masked_kl(z, z, both, torch.zeros(3).bool())
    (tensor([0.]), tensor([0.]))
    """
    log_q = F.log_softmax(keep_classes(student / tau, student_classes), dim=-1)
    log_p = F.log_softmax(keep_classes(teacher / tau, teacher_classes), dim=-1)
    return tau**2 * torch.where(teacher_classes, log_p.exp() * (log_p - log_q), 0).sum(-1)


def credibility_weights(credibility: Tensor, p_true: Tensor, m_max: float) -> Tensor:
    """Return FedSSD's weight of every class channel (eq. 4): A [C, C] and p_g(x)[y] [B] -> M [B, C].

    `credibility[i, j]` is the rate at which the teacher predicts class i as j. A channel's weight grows with the recall
    of its class and falls with the rate at which another class is mistaken for it; an example's weight grows with the
    teacher's probability of the true class.

    >>> credibility_weights(torch.eye(2), torch.tensor([1.0, 0.75, 0.0]), m_max=1.0)
    tensor([[0.9000, 0.9000],
            [0.4000, 0.4000],
            [0.0000, 0.0000]])
    """
    own = torch.eye(credibility.shape[-1], dtype=torch.bool, device=credibility.device)
    m_class = credibility.diagonal() * (1 - credibility.masked_fill(own, 0).amax(0))
    m_sample = 1 - (1 - p_true).clamp(min=0).sqrt()
    return m_max * (m_class * m_sample.unsqueeze(-1) - 0.1).clamp(min=0)


def dynamic_alpha(student_counts: Tensor, teacher_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return Flashback's weights of student and teachers in each class: [C] and [K, C] -> (alpha_s [C], alpha [K, C]).

    They add up to 1 in every class, and to 0 in a class that neither student nor teachers have seen.

    >>> dynamic_alpha(torch.tensor([3.0, 0.0]), torch.tensor([[1.0, 0.0]]))
    (tensor([0.7500, 0.0000]), tensor([[0.2500, 0.0000]]))
    """
    total = student_counts + teacher_counts.sum(0)
    total = torch.where(total > 0, total, 1)
    return student_counts / total, teacher_counts / total


def dynamic_kl(student: Tensor, teacher: Tensor, alpha: Tensor, tau: float = 1.0) -> Tensor:
    """Return sum_c alpha[c] p[c] log(p[c] / q[c]) at temperature tau, [B, C] -> [B]; not times tau^2.

    The weights stand inside the sum over classes, so the value can be negative. Teachers on a leading axis, [K, B, C]
    with alpha [K, 1, C], give [K, B].

    >>> same = torch.tensor([[1.0, 2.0]])
    >>> dynamic_kl(same, same, torch.tensor([0.3, 0.9])).item()
    0.0
    """
    log_q = F.log_softmax(student / tau, dim=-1)
    log_p = F.log_softmax(teacher / tau, dim=-1)
    return (alpha * log_p.exp() * (log_p - log_q)).sum(-1)


def anchor_gap(student: Tensor, teacher: Tensor, class_mask: Tensor, reduce: str = "sum") -> Tensor:
    """Return the squared distance of logits over the channels where the mask is True (FedKA eq. 3).

    The sum over these channels, or their mean. [B, C], [B, C] and [C] -> [B].

    >>> anchor_gap(torch.tensor([[1.0, 2.0, 9.0]]), torch.zeros(1, 3), torch.tensor([True, True, False]))
    tensor([5.])
    """
    total = torch.where(class_mask.bool(), (student - teacher) ** 2, 0).sum(-1)
    return total if reduce == "sum" else total / class_mask.bool().sum().clamp(min=1)
