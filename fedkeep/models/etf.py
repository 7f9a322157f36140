"""Fixed equiangular classifier: one direction per class, all at the same angle to each other, never trained.

Such directions, a simplex equiangular tight frame (ETF), are what a classifier tends to at the end of training on
balanced classes (Papyan et al., PNAS 2020, arXiv:2008.08186). Given to all clients from the start, they cannot drift.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedkeep.errors import ModelError


def etf_classifier(width: int, n_classes: int) -> nn.Linear:
    """Return a linear layer without bias whose rows are a simplex ETF in a random orientation; it is frozen."""
    layer = nn.Linear(width, n_classes, bias=False)
    with torch.no_grad():
        layer.weight.copy_(simplex(width, n_classes))
    return layer.requires_grad_(False)


def simplex(width: int, n_classes: int) -> Tensor:
    """Return n_classes vectors of length 1 with the same angle between any two, the largest possible: [C, width].

    >>> rows = simplex(5, 3)
    >>> (rows @ rows.T).round(decimals=3).abs()  # cosines of -1/2
    tensor([[1.0000, 0.5000, 0.5000],
            [0.5000, 1.0000, 0.5000],
            [0.5000, 0.5000, 1.0000]])
    """
    if n_classes < 2 or width < n_classes - 1:
        raise ModelError(
            f'head = "etf" needs at least two classes, and at least C - 1 features for C classes: not {width} '
            f"features for {n_classes} classes",
            key="head",
            value="etf",
            valid=["linear"],
        )
    corners = torch.eye(n_classes, dtype=torch.float64) - 1 / n_classes  # in the plane where coordinates add up to 0
    plane = torch.linalg.qr(corners[:, :-1]).Q  # an orthonormal basis of it, [C, C-1]
    rotation = torch.linalg.qr(torch.randn(width, n_classes - 1, dtype=torch.float64)).Q
    rows = corners @ plane @ rotation.T
    return torch.nn.functional.normalize(rows, dim=1).float()
