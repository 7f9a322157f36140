"""Average of the global weights over rounds: what is tested and saved, while clients start from the last weights.

`average_weights` is a number below 1, rho, or a number n of rounds. After the t-th round that changed the weights w,

    rho:  a <- r a + (1 - r) w,   r = min(rho, 1 - 1/t)        the mean of all rounds first, then exponential
    n:    a = the mean of w over the last n rounds, of all rounds while there are fewer

The average is an entry of the server's tree, which no hook of a method sees. So checkpoints, ranks and federations
carry it, and a run resumes bit for bit. It is computed without a wait for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.runs.server_state import AVERAGE
from fedkeep.tree import Tree


def with_average(server: Tree, average_weights: float | int | None) -> Tree:
    """Return a first server tree with the average, which is the untrained model; unchanged if none is wanted.

    >>> with_average({"params": {"w": torch.zeros(1)}}, 3)["average_weights"]["last"]["w"].shape
    torch.Size([3, 1])
    """
    if average_weights is None:
        return server
    params = server["params"]
    device = next(iter(tree.leaves(params))).device
    state: Tree = {"weights": tree.map(_copy, params), "count": torch.zeros((), dtype=torch.int64, device=device)}
    if isinstance(average_weights, int):
        state["last"] = tree.map(lambda w: _copy(w).new_zeros(average_weights, *w.shape), params)
    return {**server, AVERAGE: state}


def next_average(state: Tree, params: Tree, average_weights: float | int) -> Tree:
    """Return the average after a round that ended with these weights."""
    count = state["count"] + 1
    if not isinstance(average_weights, int):
        share = torch.clamp(1.0 / count.double(), min=1.0 - average_weights)  # of these weights: 1 - r

        def moved(a: Tensor, w: Tensor) -> Any:
            return torch.lerp(a, w.to(a.dtype), share.to(a.dtype))

        return {"weights": tree.map(moved, state["weights"], params), "count": count}
    place, rounds = (state["count"] % average_weights)[None], count.clamp(max=average_weights)
    last = tree.map(lambda t, w: t.index_copy(0, place, w.to(t.dtype)[None]), state["last"], params)
    return {"weights": tree.map(lambda t: t.sum(0) / rounds, last), "last": last, "count": count}


def _copy(w: Tensor) -> Tensor:
    """Return a copy, in float32 at least: averages of half-precision weights would stop moving."""
    return w.detach().to(torch.promote_types(w.dtype, torch.float32), copy=True)
