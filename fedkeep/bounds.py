"""Bounds of an upload's entries by their meaning: what no honest client can send.

A method declares `bounds` next to `finish`. The server of a federation rejects an upload that breaks one. Entries
without a bound have only the general limits. A bound may depend on what the server knows of the visit: its own tree,
the learning rate, and how many steps a client with so many examples takes.

>>> import torch
>>> counts = Bound(whole=True, low=0, total="n")
>>> counts.problem(torch.tensor([3.0, 2.0]), Received({"n": torch.tensor(5.0)}))
>>> counts.problem(torch.tensor([7.0, -2.0]), Received({"n": torch.tensor(5.0)})).reason
'contains -2, below 0'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.batches import count_batches, count_held
from fedkeep.tree import Tree

Limit = float | Callable[["Received"], Any]  # a number, or a function that returns one number or one per element


@dataclass(frozen=True)
class Received:
    """An upload, and what the server knows of the visit that made it."""

    upload: Tree
    server: Tree = field(default_factory=dict)  # before the round
    method: Any = None
    task: Any = None
    round: int = 1
    lr: float = 0.0
    epochs: int = 1
    batch_size: int = 1
    drop_last: bool = False

    @property
    def steps(self) -> int:
        """How many local steps a client takes that has as many examples as this upload says."""
        n = max(1, int(self.upload["n"]))
        held = self.method.hold_out() if self.method is not None else 0.0
        trained = n - count_held(n, held)
        return self.epochs * count_batches(trained, self.batch_size, self.drop_last)

    @property
    def effective_steps(self) -> float:
        """The effective steps of such a client."""
        return float(self.task.optimizer.effective_steps(self.steps))


class Problem(NamedTuple):
    """A value that is outside a bound, and why."""

    value: float
    reason: str


@dataclass(frozen=True)
class Bound:
    """What an entry of an honest upload is like; a limit is a number, or a function of the `Received` upload."""

    whole: bool = False  # whole numbers
    low: Limit | None = None  # the smallest value
    high: Limit | None = None  # the largest value
    total: str = ""  # the values add up to this entry of the upload

    def problem(self, value: Any, received: Received) -> Problem | None:
        """Return what is wrong with an entry, or None."""
        problems = (self._problem_of_leaf(leaf, path, received) for path, leaf in tree.items(value) if leaf.numel())
        return next((problem for problem in problems if problem is not None), None)

    def _problem_of_leaf(self, leaf: Tensor, path: str, received: Received) -> Problem | None:
        values, where = leaf.detach().double().cpu().flatten(), f" in {path}" if path else ""
        if self.whole and bool((values != values.round()).any()):
            broken = float(values[values != values.round()][0])
            return Problem(broken, f"contains {broken:g}{where}, which is not a whole number")
        for name, limit, sign in (("below", self.low, 1.0), ("above", self.high, -1.0)):
            if limit is None:
                continue
            bound = _at(limit(received) if callable(limit) else limit, path).flatten()
            gap = sign * (values - bound)
            if not bool((gap >= 0).all()):
                worst = int(gap.argmin())
                broken, edge = float(values[worst]), float(bound.expand_as(values)[worst])
                return Problem(broken, f"contains {broken:.6g}{where}, {name} {edge:.6g}")
        if self.total:
            total, expected = float(values.sum()), float(received.upload[self.total])
            if not abs(total - expected) <= 1e-6 * abs(expected):
                return Problem(total, f"adds up to {total:g}, but {self.total} is {expected:g}")
        return None


def broken_bound(bounds: Mapping[str, Bound], received: Received) -> tuple[str, Problem] | None:
    """Return the first entry that breaks its bound, and how; None if the upload keeps all of them."""
    for name, bound in bounds.items():
        if name in received.upload:
            problem = bound.problem(received.upload[name], received)
            if problem is not None:
                return name, problem
    return None


def tolerance(*values: Tensor) -> Tensor:
    """Return how much the result of a short computation with these values may differ by rounding, per element."""
    eps = max(torch.finfo(value.dtype).eps for value in values)
    largest = torch.stack(
        [value.double().abs().max() if value.numel() else torch.zeros(()).double() for value in values]
    )
    return 64 * eps * largest.max() + 1e-30


def _at(bound: Any, path: str) -> Tensor:
    """Return the bound of one leaf: of a tree of bounds, the leaf at the same path."""
    for key in path.split("/") if path else ():
        bound = bound[key] if isinstance(bound, dict) else bound
    return torch.as_tensor(bound, dtype=torch.float64, device="cpu")
