"""Loss surface around a model: over two directions, and under noise (FedNTD appendix J, figure 14).

The paper shows the loss of a client's model on that client's data: under Gaussian noise on the weights, and over the
plane of the Hessian's two leading eigenvectors. It gives neither the ranges nor the number of points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.tree import Tree

Loss = Callable[[Tree], Tensor]


def loss_surface(
    loss: Loss, params: Tree, directions: tuple[Tree, Tree], span: float = 1.0, steps: int = 15
) -> tuple[np.ndarray, np.ndarray]:
    """Return (axis [S], losses [S, S]) with losses[i, j] = L(w + axis_i d_1 + axis_j d_2); the axis is -span to span.

    >>> bowl = lambda w: w["x"] ** 2 + 3 * w["y"] ** 2
    >>> start = {"x": torch.tensor(0.0), "y": torch.tensor(0.0)}
    >>> along = {"x": torch.tensor(1.0), "y": torch.tensor(0.0)}, {"x": torch.tensor(0.0), "y": torch.tensor(1.0)}
    >>> loss_surface(bowl, start, along, span=2.0, steps=3)[1].tolist()
    [[16.0, 4.0, 16.0], [12.0, 0.0, 12.0], [16.0, 4.0, 16.0]]
    """
    axis = np.linspace(-span, span, steps)
    one, other = directions
    with torch.no_grad():
        rows = [
            [float(loss(tree.add(tree.add(params, tree.scale(one, a)), tree.scale(other, b)))) for b in axis.tolist()]
            for a in axis.tolist()
        ]
    return axis, np.array(rows)


def loss_under_noise(loss: Loss, params: Tree, sigmas: Sequence[float], draws: int = 5, seed: int = 0) -> np.ndarray:
    """Return the mean loss at w + sigma n for every sigma, over several draws of a standard normal n.

    All sigmas use the same draws, so that the curve over sigma is smooth.

    >>> none, weak, strong = loss_under_noise(lambda w: (w["x"] ** 2).sum(), {"x": torch.zeros(3)}, [0.0, 1.0, 2.0])
    >>> bool(none == 0), round(float(strong / weak), 6)
    (True, 4.0)
    """
    generator = torch.Generator().manual_seed(seed)
    noise = [tree.map(lambda w: _normal(w, generator), params) for _ in range(draws)]
    with torch.no_grad():
        return np.array(
            [np.mean([float(loss(tree.add(params, tree.scale(n, sigma)))) for n in noise]) for sigma in sigmas]
        )


def random_directions(params: Tree, seed: int = 0) -> tuple[Tree, Tree]:
    """Draw two random directions with filter normalisation (Li et al., NeurIPS 2018).

    Each filter has the norm of the model's own filter. Biases and scales are 0.

    >>> weights = {"bias": torch.ones(2), "weight": torch.tensor([[3.0, 4.0], [0.0, 0.0]])}
    >>> one, _ = random_directions(weights)
    >>> one["weight"].norm(dim=1).tolist(), one["bias"].tolist()
    ([5.0, 0.0], [0.0, 0.0])
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(w: Tensor) -> Tensor:
        if w.ndim < 2:  # biases and scales: they can change the loss a lot without telling much about its shape
            return torch.zeros_like(w)
        d, own = _normal(w, generator).flatten(1), w.flatten(1)
        length = d.norm(dim=1, keepdim=True).clamp(min=1e-12)
        scaled: Tensor = d / length * own.norm(dim=1, keepdim=True)
        return scaled.reshape(w.shape)

    return tree.map(draw, params), tree.map(draw, params)


def hessian_directions(loss: Loss, params: Tree, seed: int = 0, tol: float = 1e-3) -> tuple[np.ndarray, list[Tree]]:
    """Return the two largest eigenvalues of the loss's Hessian and their eigenvectors, of length 1.

    Computed by Lanczos iterations on products H v; H itself is never built. The sign is chosen so that an
    eigenvector's largest entry is positive.

    >>> values, (first, second) = hessian_directions(lambda w: (torch.tensor([1.0, 4.0, 2.0, 0.5]) * w["x"] ** 2).sum(),
    ...                                              {"x": torch.zeros(4)})
    >>> values.round(3).tolist(), first["x"].abs().round(decimals=3).tolist()
    ([8.0, 4.0], [0.0, 1.0, 0.0, 0.0])
    """
    from scipy.sparse.linalg import LinearOperator, eigsh

    leaves = [w.detach().requires_grad_() for w in tree.leaves(params)]
    with torch.enable_grad():
        gradient = torch.autograd.grad(loss(tree.like(params, leaves)), leaves, create_graph=True)
    size = sum(w.numel() for w in leaves)

    def hessian_product(v: Any) -> np.ndarray:
        along = _split(torch.from_numpy(np.ascontiguousarray(v).ravel()), leaves)
        product = torch.autograd.grad(gradient, leaves, grad_outputs=along, retain_graph=True, materialize_grads=True)
        return torch.cat([p.detach().double().cpu().ravel() for p in product]).numpy()

    start = np.random.default_rng(seed).normal(size=size)
    operator = LinearOperator((size, size), matvec=hessian_product, dtype=np.float64)
    values, vectors = eigsh(operator, k=2, which="LA", v0=start, tol=tol)
    directions = []
    for v in vectors.T[::-1]:
        v = v * np.sign(v[np.abs(v).argmax()])
        directions.append(tree.like(params, _split(torch.from_numpy(v.copy()), leaves)))
    return np.asarray(values[::-1]), directions


def _split(flat: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [w.numel() for w in leaves])
    return [part.reshape(w.shape).to(w) for part, w in zip(parts, leaves, strict=True)]


def _normal(w: Tensor, generator: torch.Generator) -> Tensor:
    """Draw on the CPU, so that the numbers are the same on every device."""
    return torch.randn(w.shape, generator=generator, dtype=torch.float64).to(w)
