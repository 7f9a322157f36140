"""Gradients without their means: Yong et al., "Gradient Centralization", ECCV 2020."""

from __future__ import annotations

from torch import Tensor


def centred(g: Tensor) -> Tensor:
    """Return g minus its mean over all axes but the first, the outputs; a vector as it is."""
    return g - g.mean(tuple(range(1, g.ndim)), keepdim=True) if g.ndim > 1 else g
