"""Gradients without their means: Yong et al., "Gradient Centralization", ECCV 2020."""

from __future__ import annotations

import math

from torch import Tensor


def subtract_mean(g: Tensor) -> Tensor:
    """Return g minus its mean over all axes but the first, the outputs; as it is if an output has only one weight."""
    return g - g.mean(tuple(range(1, g.ndim)), keepdim=True) if math.prod(g.shape[1:]) > 1 else g
