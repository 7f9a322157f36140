"""Small problems for tests, and comparisons of trees."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from fedkeep import tree
from fedkeep.testing import Problem, difference, small_problem
from fedkeep.testing.fixtures import WithDropout

__all__ = ["Problem", "gap", "make_problem", "same", "three_clients", "with_dropout"]

make_problem, gap = small_problem, difference


def same(a: tree.Tree, b: tree.Tree) -> bool:
    """Return whether two trees are equal bit for bit."""
    pairs = zip(tree.items(a), tree.items(b), strict=True)
    return all(path == other and torch.equal(x, y) for (path, x), (other, y) in pairs)


def with_dropout(problem: Problem) -> Problem:
    """Return the problem with a dense network that has dropout."""
    return dataclasses.replace(problem, model=WithDropout())


def three_clients() -> Problem:
    """Return a problem of three clients of unequal size."""
    problem = make_problem(participation=3, rounds=3)
    clients = [np.concatenate([problem.clients[k], problem.clients[k + 3]][: 1 + (k > 0)]) for k in range(3)]
    return dataclasses.replace(problem, clients=clients)
