"""Client optimisers as pure functions: `init` returns the state, `update` the new weights and the new state.

They compute what `torch.optim` computes. The state starts fresh at every visit of a client. `update` is the formula,
for one client; `update_` is torch's fused kernel for it, in place, for one client or a stack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.private_apis import fused_adam, fused_adamw, fused_sgd
from fedkeep._util.validate import require_choice, require_number
from fedkeep.tree import Tree

OPTIMIZERS = ("sgd", "adam", "adamw")


class Optimizer(Protocol):
    """What an engine needs of an optimiser."""

    def init(self, params: Tree) -> Tree:
        """Return the state at the start of a visit."""

    def update(self, grads: Tree, state: Tree, params: Tree, lr: float | Tensor) -> tuple[Tree, Tree]:
        """Return (new params, new state)."""

    def update_(self, grads: Tree, state: Tree, params: Tree, lr: float | Tensor) -> None:
        """Do the same in place and in one pass over memory, for float32, with or without a leading client axis."""

    @property
    def fused(self) -> bool:
        """Whether this torch has the kernel that `update_` needs."""

    def effective_steps(self, steps: int) -> float:
        """Return the number of plain SGD steps that move as far along a constant gradient as these steps."""


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with heavy-ball momentum and L2 weight decay, as `torch.optim.SGD`."""

    momentum: float = 0.0
    weight_decay: float = 0.0

    def init(self, params: Tree) -> Tree:
        """Return a zero momentum buffer, or nothing without momentum."""
        return {"buffer": tree.zeros_like(params)} if self.momentum else {}

    def update(self, grads: Tree, state: Tree, params: Tree, lr: float | Tensor) -> tuple[Tree, Tree]:
        """Return w - lr * v with v = momentum * v + g + weight_decay * w."""
        if self.weight_decay:
            grads = tree.map(lambda g, w: g + self.weight_decay * w, grads, params)
        if self.momentum:
            grads = tree.map(lambda v, g: self.momentum * v + g, state["buffer"], grads)
            state = {"buffer": grads}
        # on a CPU, torch rounds a tensor lr to bfloat16 if it is the first factor
        return tree.map(lambda w, g: w - g * lr, params, grads), state

    def update_(self, grads: Tree, state: Tree, params: Tree, lr: float | Tensor) -> None:
        """Write w - lr * v over w, and v over the buffer."""
        fused_sgd(
            tree.leaves(params),
            _laid_out(grads, params),
            tree.leaves(state["buffer"]) if self.momentum else [],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    @property
    def fused(self) -> bool:
        """Whether this torch has the kernel that `update_` needs."""
        return fused_sgd is not None

    def effective_steps(self, steps: int) -> float:
        """With momentum r, a gradient applied t times counts (t - r (1 - r^t) / (1 - r)) / (1 - r).

        >>> SGD().effective_steps(10)
        10.0
        >>> SGD(momentum=0.5).effective_steps(2)  # v1 = g, v2 = 1.5 g
        2.5
        """
        r = self.momentum
        return (steps - r * (1 - r**steps) / (1 - r)) / (1 - r)


@dataclass(frozen=True)
class Adam:
    """Adam with L2 weight decay, as `torch.optim.Adam`."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def init(self, params: Tree) -> Tree:
        """Return zero moments and a step counter, in float32 if the weights are less precise."""
        zeros = tree.map(lambda w: torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)), params)
        some: Tensor = tree.leaves(zeros)[0]
        return {"m": zeros, "v": tree.zeros_like(zeros), "t": some.new_zeros(())}

    def update(self, grads: Tree, state: Tree, params: Tree, lr: float | Tensor) -> tuple[Tree, Tree]:
        """Return w - lr * m_hat / (sqrt(v_hat) + eps)."""
        given, precise = params, tree.leaves(state["m"])[0].dtype
        grads, params = self._decayed(tree.to(grads, precise), tree.to(params, precise), lr)
        t = state["t"] + 1
        m = tree.map(lambda m, g: self.beta1 * m + (1 - self.beta1) * g, state["m"], grads)
        v = tree.map(lambda v, g: self.beta2 * v + (1 - self.beta2) * g * g, state["v"], grads)
        m_bias, v_bias = 1 - torch.pow(self.beta1, t), 1 - torch.pow(self.beta2, t)
        new = tree.map(lambda w, m, v: w - lr * (m / m_bias) / ((v / v_bias).sqrt() + self.eps), params, m, v)
        return tree.map(lambda w, n: n.to(w.dtype), given, new), {"m": m, "v": v, "t": t}

    def update_(self, grads: Tree, state: Tree, params: Tree, lr: float | Tensor) -> None:
        """Write the new weights and moments over the old; all stacked clients are at the same step."""
        self._update_with(fused_adam, grads, state, params, lr)

    @property
    def fused(self) -> bool:
        """Whether this torch has the kernel that `update_` needs."""
        return fused_adam is not None

    def effective_steps(self, steps: int) -> float:
        """Count the steps: Adam moves by about lr whatever the gradient's size.

        So (w_g - w) / (effective steps * lr) is a *normalised* gradient here, of another scale than the loss's.
        """
        return float(steps)

    def _decayed(self, grads: Tree, params: Tree, lr: float | Tensor) -> tuple[Tree, Tree]:
        """Return the gradients and weights of a step with weight decay: here it is part of the gradient."""
        if self.weight_decay:
            grads = tree.map(lambda g, w: g + self.weight_decay * w, grads, params)
        return grads, params

    def _update_with(self, kernel: Any, grads: Tree, state: Tree, params: Tree, lr: float | Tensor) -> None:
        state["t"] += 1
        kernel(
            tree.leaves(params),
            _laid_out(grads, params),
            tree.leaves(state["m"]),
            tree.leaves(state["v"]),
            [],
            [state["t"].reshape(-1)[0]] * len(tree.leaves(params)),
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`: the weights shrink by lr * weight_decay in every step.

    On a GPU, torch's fused kernel takes its steps; those of `fedkeep.engine.gpu` are for Adam.
    """

    def update_(self, grads: Tree, state: Tree, params: Tree, lr: float | Tensor) -> None:
        """Write the new weights and moments over the old; all stacked clients are at the same step."""
        self._update_with(fused_adamw, grads, state, params, lr)

    @property
    def fused(self) -> bool:
        """Whether this torch has the kernel that `update_` needs."""
        return fused_adamw is not None

    def _decayed(self, grads: Tree, params: Tree, lr: float | Tensor) -> tuple[Tree, Tree]:
        if self.weight_decay:
            params = tree.map(lambda w: w - w * (lr * self.weight_decay), params)
        return grads, params


def _laid_out(grads: Tree, params: Tree) -> list[Tensor]:
    """Return the gradients, each with the memory layout of its weight: the fused kernels need the same."""
    pairs = zip(tree.leaves(grads), tree.leaves(params), strict=True)
    return [g if g.stride() == w.stride() else torch.empty_like(w).copy_(g) for g, w in pairs]


def make(name: str, momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    """Return the optimiser of this name; for Adam and AdamW, momentum is beta1."""
    require_number("momentum", momentum, low=0, below=1)
    require_number("weight_decay", weight_decay, low=0)
    require_choice("optimizer", name, OPTIMIZERS)
    if name == "sgd":
        return SGD(momentum, weight_decay)
    return (AdamW if name == "adamw" else Adam)(beta1=momentum, weight_decay=weight_decay)
