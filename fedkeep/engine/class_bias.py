"""The best bias per class: C numbers that are added to a model's logits.

    b = argmin_b  1/n sum_i CE(z_i + b, y_i) + penalty |b|^2

The objective is strictly convex, so there is one minimum. Newton's method with backtracking finds it from b = 0, in
float64 and on the CPU, so that the same logits give the same bias everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

PENALTY = 0.005
TOLERANCE = 1e-10  # the largest entry of the gradient at the end
_MAX_STEPS = 100  # from 5 to 10 are usual
_ROUNDING = 1e-14  # relative, of the objective


def fit_class_bias(logits: Tensor, y: Tensor, penalty: float = PENALTY) -> Tensor:
    """Return the bias [C] that fits logits [n, C] best to the classes y [n], in float64 on the CPU.

    It is 0 without any examples, and for logits that are not finite.

    >>> fit_class_bias(torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]), penalty=1e-9).diff().exp().round(decimals=3)
    tensor([0.3330], dtype=torch.float64)
    """
    z, y = logits.detach().double().cpu(), y.cpu()
    bias = z.new_zeros(z.shape[1])
    if not len(y) or not bool(z.isfinite().all()):
        return bias
    shares = torch.bincount(y, minlength=len(bias)).double() / len(y)
    value = objective(z, y, bias, penalty)
    for _ in range(_MAX_STEPS):
        p = (z + bias).softmax(1)
        gradient = p.mean(0) - shares + 2 * penalty * bias
        if float(gradient.abs().max()) <= TOLERANCE:
            break
        hessian = torch.diag(p.mean(0) + 2 * penalty) - p.T @ p / len(y)
        step = torch.linalg.solve(hessian, gradient)
        bias, value = _line_search(z, y, penalty, bias, value, step, float(gradient @ step))
    return bias


def objective(logits: Tensor, y: Tensor, bias: Tensor, penalty: float = PENALTY) -> Tensor:
    """Return the function that `fit_class_bias` minimises."""
    return torch.nn.functional.cross_entropy(logits + bias, y) + penalty * bias.square().sum()


def _line_search(
    z: Tensor, y: Tensor, penalty: float, bias: Tensor, value: Tensor, step: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    """Return the point along -step, halved until the objective falls enough, and its value there."""
    size, slack = 1.0, _ROUNDING * (1 + float(value.abs()))
    while True:
        trial = bias - size * step
        reached = objective(z, y, trial, penalty)
        if float(reached) <= float(value) - 1e-4 * size * slope + slack or size < 1e-6:
            return trial, reached
        size /= 2
