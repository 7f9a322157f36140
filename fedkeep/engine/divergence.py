"""Divergence checks: stop a run at the first NaN or infinity and report client, step and weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.engine.local import ClientJob, ClientResult
from fedkeep.errors import Diverged
from fedkeep.tree import Tree

_LARGE_INPUT = 30  # inputs of about 1 are usual


def finite_and_loss(jobs: Sequence[ClientJob], result: ClientResult) -> Tensor:
    """Return whether every client's losses, weights and upload are finite, and its mean loss: [2, K], on the device."""
    leaves = tree.leaves({"upload": result.upload, "params": result.params})
    numbers = {(t.data_ptr(), t.shape, t.stride()): t for t in leaves}.values()  # uploaded weights are there twice
    finite = torch.stack(
        [_all_finite(t.reshape(len(jobs), -1)) for t in numbers] + [result.losses.isfinite().all(0)]
    ).all(0)
    losses = result.losses.double().sum(0)
    steps = torch.tensor([job.plan.steps for job in jobs]).to(losses.device, non_blocking=True)
    return torch.stack([finite, losses / steps])


def require_finite(
    number: int,
    jobs: Sequence[ClientJob],
    result: ClientResult,
    before: Tree,
    status: Tensor,
    inputs_of: Callable[[ClientJob], Any],
) -> None:
    """Raise if `status`, from `finite_and_loss`, has a NaN or infinity. The host waits for the device here.

    `inputs_of` returns the model inputs of a client.
    """
    bad = (status[0] == 0).nonzero().flatten().tolist()
    if bad:
        k = bad[0]
        explanation = _explanation(k, jobs[k].plan.steps, result, before)
        raise Diverged(number, jobs[k].id, f"{explanation}; {_remedy(inputs_of(jobs[k]))}")


def finite_server(server: Tree) -> Tensor:
    """Return whether each number of the server's tree is finite, on the device."""
    return torch.stack([t.isfinite().all() for t in tree.leaves(server) if t.is_floating_point()])


def require_finite_server(number: int, server: Tree, finite: Tensor | None = None) -> None:
    """Raise if aggregation made the server's tree NaN or infinite; `finite` is what `finite_server` returned."""
    paths = [path for path, t in tree.items(server) if t.is_floating_point()]
    flags = (finite_server(server) if finite is None else finite).tolist()
    bad = [path for path, good in zip(paths, flags, strict=True) if not good]
    if bad:
        raise Diverged(number, None, f"aggregation made {', '.join(bad[:3])} NaN or infinite")


def _all_finite(rows: Tensor) -> Tensor:
    """Return whether each row has finite numbers only: 0 times NaN or infinity is NaN. Faster than `isfinite`.

    >>> _all_finite(torch.tensor([[1.0, 2.0], [1.0, -torch.inf], [torch.nan, 0.0], [3e38, 3e38]]))
    tensor([ True, False, False,  True])
    """
    return (rows * 0).sum(1) == 0


def _explanation(k: int, steps: int, result: ClientResult, before: Tree) -> str:
    losses = result.losses[:steps, k].tolist()
    causes = []
    broken = next((s for s, value in enumerate(losses) if not math.isfinite(value)), None)
    if broken is not None:
        trail = " -> ".join(f"{losses[s]:.4g}" for s in sorted({0, max(broken - 1, 0), broken}))
        causes.append(f"the loss went {trail} at step {broken + 1} of {len(losses)}")
    names = [path for path, t in tree.items(result.params) if not bool(t[k].isfinite().all())]
    if names:
        causes.append(f"NaN or infinite: {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}")
    others = [path for path, t in tree.items(result.upload) if not bool(t[k].isfinite().all())]
    if others and not names:
        causes.append(f"NaN or infinite in the upload: {', '.join(others[:3])}")
    path, size = max(((path, float(w.abs().max())) for path, w in tree.items(before)), key=lambda item: item[1])
    causes.append(f"the largest weight at the start was {size:.4g} ({path})")
    return "; ".join(causes)


def _remedy(inputs: Any) -> str:
    """Return what may help: with large inputs, their normalisation."""
    floats = [t for t in tree.leaves(inputs) if t.is_floating_point() and t.numel()]
    largest = max((float(t.abs().max()) for t in floats), default=0.0)
    if largest <= _LARGE_INPUT:
        return "a smaller lr or a clip_norm may help"
    return f'its largest input is {largest:.4g}: normalise="standard" of the data, a smaller lr or a clip_norm may help'
