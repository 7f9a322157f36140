"""The server's hooks of a method, called with checks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fedkeep import tree
from fedkeep.data.seeds import server_seed
from fedkeep.engine.settings import Settings
from fedkeep.engine.setup import _checked
from fedkeep.errors import Diverged
from fedkeep.method import Cohort, FedAvg
from fedkeep.task import Task
from fedkeep.tree import Tree


def check_server(number: int, server: Tree) -> None:
    """Raise if aggregation made the server's tree leave the finite numbers."""
    numbers = [(path, t) for path, t in tree.items(server) if t.is_floating_point()]
    finite = torch.stack([t.isfinite().all() for _, t in numbers]).tolist()
    bad = [path for (path, _), good in zip(numbers, finite, strict=True) if not good]
    if bad:
        raise Diverged(number, None, f"aggregation made {', '.join(bad[:3])} leave the finite numbers")


def make_cohort(settings: Settings, ids: Iterable[int], round: int) -> Cohort:
    """Say who took part in a round, and what the server's own randomness in it is keyed by."""
    return Cohort(tuple(ids), round, server_seed(settings.seed, round))


def init_server(method: FedAvg, task: Task) -> Tree:
    """Make the server's first tree."""
    return _checked(method, "init_server", method.init_server(task, task.init))


def broadcast(method: FedAvg, server: Tree) -> Tree:
    """Choose what goes to every client."""
    return _checked(method, "broadcast", method.broadcast(server))


def aggregate(method: FedAvg, task: Task, server: Tree, uploads: Tree, cohort: Cohort) -> Tree:
    """Make the server's next tree; one whose numbers are not finite ends the run."""
    made: Tree = tree.detach(_checked(method, "aggregate", method.aggregate(task, server, uploads, cohort)))
    check_server(cohort.round, made)
    return made
