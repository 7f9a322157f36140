"""Two logits from one: a model with a sigmoid output as one for a softmax over two classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedkeep.errors import ModelError


def two_logits(model: nn.Module) -> nn.Module:
    """Return a model with the logits [0, z] of two classes, where `model` returns one logit z per example.

    softmax([0, z]) = [1 - sigmoid(z), sigmoid(z)], so its cross-entropy is the binary cross-entropy of z, its
    prediction is class 1 where z > 0, and it has the same weights and gradients. `model` itself is wrapped, not copied.

    >>> z = two_logits(nn.Linear(3, 1))(torch.zeros(4, 3))
    >>> z.shape, z[:, 0].tolist()
    (torch.Size([4, 2]), [0.0, 0.0, 0.0, 0.0])
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"two_logits takes a torch.nn.Module, not {type(model).__name__}", key="model", value=model)
    has_features = hasattr(model, "features") and hasattr(model, "head")
    return TwoLogitsWithFeatures(model) if has_features else TwoLogits(model)


class TwoLogits(nn.Module):
    """A model with one logit per example, as one with two."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Tensor:
        """Return the logits [B, 2]."""
        return _with_zero(self.model(x))


class TwoLogitsWithFeatures(TwoLogits):
    """The same for a model with `features` and `head`, which methods that read features need."""

    def features(self, x: Any) -> Tensor:
        """Return the features before the head."""
        return self.model.features(x)  # type: ignore[no-any-return, operator]

    def head(self, features: Tensor) -> Tensor:
        """Return the logits [B, 2] of features."""
        return _with_zero(self.model.head(features))  # type: ignore[operator]


def _with_zero(z: Tensor) -> Tensor:
    """Return [0, z] for logits z of shape [B, 1] or [B]."""
    if (z.ndim == 2 and z.shape[1] != 1) or z.ndim > 2:
        raise ModelError(
            f"two_logits is for a model with one logit per example, not {tuple(z.shape)}",
            key="model",
            value=tuple(z.shape),
        )
    z = z.reshape(-1, 1)
    return torch.cat([torch.zeros_like(z), z], dim=1)
