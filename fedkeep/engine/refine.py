"""Refinement before training: a method's `refine` over the examples of one client, or of a stack of clients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.engine.mapping import Each
from fedkeep.errors import MethodError
from fedkeep.method import FedAvg, Visit
from fedkeep.task import Task
from fedkeep.tree import Tree

if TYPE_CHECKING:
    from fedkeep.engine.stacked_plan import StackedPlan

VisitWith = Callable[[str, Tree], Visit]  # from a hook's name and `local` to the visit


def refine_one(method: FedAvg, visit: VisitWith, local: Tree, batches: Callable[[], Iterable[Tree]]) -> Tree:
    """Return what `prepare` returned after the method has refined it, in as many passes as it wants."""
    passes = 0
    while not bool(method.refined(visit("refined", local), passes)):
        for batch in batches():
            local = _refined_by(method, visit("refine", local), batch)
        passes += 1
    return tree.detach(local)


def refine_stack(
    method: FedAvg,
    task: Task,
    each: Each,
    parts: Tree,
    plan: StackedPlan,
    gather: Callable[[Tree], Tree],
) -> Tree:
    """Return the `local` of all clients of a stack after the method has refined it.

    `parts` has `shared` and, with a leading client axis, `sent`, `client`, `facts` and `local`. `gather` returns the
    examples at a batch's places. A client that has no more batches in a pass, or is finished, keeps what it has.
    """
    shared, own = parts["shared"], {key: parts[key] for key in ("sent", "client", "facts")}
    local: Tree = tree.map(torch.clone, parts["local"])
    batches, widest = plan.refine_pass()
    live = torch.zeros(len(plan.sizes), dtype=torch.bool, device=plan.start.device)
    counter = torch.zeros(1, dtype=torch.int64, device=plan.start.device)

    def visit(hook: str, one: Tree, loc: Tree) -> Visit:
        return Visit(hook, task, shared, one["client"], one["facts"], loc, one["sent"])

    def refine_next(clients: int) -> None:
        """Refine with the next batch of the first clients, in place."""
        row = tree.map(lambda t: t[:, :clients].index_select(0, counter)[0], batches)
        some, mine = tree.take(local, slice(clients)), tree.take(own, slice(clients))
        batch = {**gather(row), "position": row["position"]}
        new = each(lambda loc, one, b: _refined_by(method, visit("refine", one, loc), b), some, mine, batch)
        takes_part = live[:clients] & row["mask"].any(1)

        def keep(old: Tensor, now: Tensor) -> None:
            old.copy_(torch.where(takes_part.reshape(-1, *[1] * (old.ndim - 1)), now, old))

        tree.map(keep, some, new)
        counter.add_(1)

    for passes in itertools.count():
        finished = each(functools.partial(_finished, method, visit, passes), local, own)
        live.copy_(~finished if passes == 0 else live & ~finished)
        if not bool(live.any()):
            return local
        counter.zero_()
        for clients, group in itertools.groupby(widest):
            step = task.accelerator.capture(functools.partial(refine_next, clients))
            for _ in group:
                step()
    raise AssertionError("unreachable")


def _finished(method: FedAvg, visit: Any, passes: int, local: Tree, own: Tree) -> Tensor:
    answer = method.refined(visit("refined", own, local), passes)
    return torch.as_tensor(answer, device=own["facts"]["n"].device).bool()


def _refined_by(method: FedAvg, visit: Visit, batch: Any) -> Tree:
    """Return the next `local`; raise unless it has the form of the last one."""
    last, new = visit.local, method.refine(visit, batch)
    if not isinstance(new, dict) or tree.spec(new) != tree.spec(last):
        raise MethodError(
            f"{method.name}: refine must return visit.local with the same names, shapes and dtypes", key="refine"
        )
    return new
