"""The criterion: a function of logits and labels with one value per example."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep._util.rng import random_state, seeded
from fedkeep._util.text import one_line
from fedkeep.errors import ModelError

log = logging.getLogger("fedkeep")

_BINARY = (
    *("BCELoss", "BCEWithLogitsLoss", "SoftMarginLoss", "MultiLabelMarginLoss", "MultiLabelSoftMarginLoss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss", "multilabel_margin_loss"),
    "multilabel_soft_margin_loss",
)
_REGRESSION = (
    *("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss", "GaussianNLLLoss"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss", "gaussian_nll_loss"),
)

Criterion = Callable[[Tensor, Tensor], Tensor]  # logits [B, C], labels [B] -> one value per example [B]


def require_criterion(criterion: Any, n_classes: int, device: torch.device, dtype: torch.dtype) -> Criterion:
    """Return the criterion, tried out on four examples; raise unless it returns one value for each.

    A loss module (`nn.CrossEntropyLoss`) is copied to the device, and its `reduction` becomes "none".
    """
    _require_one_class_per_example(criterion)
    if isinstance(criterion, nn.Module):
        criterion = _without_reduction(copy.deepcopy(criterion)).to(device=device, dtype=dtype).requires_grad_(False)
    elif isinstance(criterion, type) or not callable(criterion):
        raise ModelError(
            f"the criterion must be a function (logits, labels) -> one value per example, not {criterion!r}",
            key="criterion",
            value=criterion,
        )
    y = torch.tensor([0, n_classes - 1, n_classes // 2, 0], device=device)
    z = torch.linspace(-1, 2, 4 * n_classes, dtype=torch.float64).sin().reshape(4, n_classes).to(device, dtype)
    with torch.no_grad(), seeded(0, device):
        before = random_state(device)
        values = _call_criterion(criterion, z, y)
        if not torch.equal(before, random_state(device)):
            return criterion  # type: ignore[no-any-return]  # its values differ from call to call
        alone = torch.cat([_call_criterion(criterion, z[i : i + 1], y[i : i + 1]) for i in range(4)])
    tolerance = 16 * torch.finfo(dtype).eps
    if not torch.allclose(values, alone, rtol=tolerance, atol=tolerance, equal_nan=True):
        raise ModelError(
            f"the criterion {criterion_name(criterion)} mixes the examples of a batch: the value of an example must "
            "depend only on its own logits and label, because batches are divided, padded and summed",
            key="criterion",
        )
    return criterion  # type: ignore[no-any-return]


def criterion_name(criterion: Any) -> str:
    """Return a name for messages and records."""
    if isinstance(criterion, nn.Module):
        return " ".join(repr(criterion).split())
    return str(getattr(criterion, "__qualname__", type(criterion).__qualname__))


def _require_one_class_per_example(criterion: Any) -> None:
    """Raise if a loss of torch's is for other problems than one class per example."""
    name = type(criterion).__name__ if isinstance(criterion, nn.Module) else getattr(criterion, "__name__", "")
    known = isinstance(criterion, nn.Module) or getattr(criterion, "__module__", "") == nn.functional.__name__
    if known and name in _BINARY:
        raise ModelError(
            f"the criterion {name} is for one logit or several labels per example; fedkeep supports one class per "
            "example: for two classes wrap the model as fedkeep.models.two_logits(model) and use the default criterion",
            key="criterion",
            value=name,
        )
    if known and name in _REGRESSION:
        raise ModelError(
            f"the criterion {name} is for regression; fedkeep supports one class per example: use the default "
            "criterion, or one of your own of logits [batch, classes] and labels [batch]",
            key="criterion",
            value=name,
        )


def _without_reduction(criterion: nn.Module) -> nn.Module:
    """Set the reduction of a loss module to "none"; warn where its mean is not the mean over the examples."""
    reduction = getattr(criterion, "reduction", None)
    if reduction not in ("mean", "sum"):
        return criterion
    weighted = getattr(criterion, "weight", None) is not None
    if weighted or reduction == "sum":
        log.warning(
            "the criterion %s is taken with reduction='none', and the mean over the examples is trained and reported%s",
            type(criterion).__name__,
            "; its own mean would divide by the sum of the class weights, not by the number of examples"
            if weighted and reduction == "mean"
            else "",
        )
    criterion.reduction = "none"  # type: ignore[assignment]
    return criterion


def _call_criterion(criterion: Criterion, z: Tensor, y: Tensor) -> Tensor:
    """Return the criterion's values; raise unless there is one for each example."""
    name = criterion_name(criterion)
    try:
        values = criterion(z.clone(), y.clone())
    except Exception as error:
        raise ModelError(
            f"the criterion {name} fails on logits {tuple(z.shape)} and labels {tuple(y.shape)}: {one_line(error)}",
            key="criterion",
        ) from error
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape != (len(y),) or not values.is_floating_point():
        raise ModelError(
            f"the criterion {name} must return one value per example, a tensor of shape ({len(y)},) for {len(y)} "
            f"examples, not {shape}; most losses do so with reduction='none'",
            key="criterion",
            value=shape,
        )
    return values
