"""Divergence checks: stop a run at the first NaN or infinity and report client, step and weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.engine.local import ClientJob, ClientResult
from fedkeep.errors import Diverged
from fedkeep.tree import Tree


def check_finite(number: int, jobs: Sequence[ClientJob], result: ClientResult, before: Tree) -> Tensor:
    """Return every client's mean loss, [K]; raise if a client's loss, weights or upload is NaN or infinite."""
    numbers = tree.leaves({"upload": result.upload, "params": result.params})
    finite = torch.stack(
        [t.reshape(len(jobs), -1).isfinite().all(1) for t in numbers] + [result.losses.isfinite().all(0)]
    ).all(0)
    steps = torch.tensor([job.plan.steps for job in jobs])
    on_host = torch.stack([finite, result.losses.double().sum(0)]).cpu()  # the one place where the host waits
    if bool(on_host[0].all()):
        return on_host[1] / steps
    k = int((on_host[0] == 0).nonzero()[0])
    raise Diverged(number, jobs[k].id, _explanation(k, jobs[k].plan.steps, result, before))


def check_server(number: int, server: Tree) -> None:
    """Raise if aggregation made the server's tree NaN or infinite."""
    numbers = [(path, t) for path, t in tree.items(server) if t.is_floating_point()]
    finite = torch.stack([t.isfinite().all() for _, t in numbers]).tolist()
    bad = [path for (path, _), good in zip(numbers, finite, strict=True) if not good]
    if bad:
        raise Diverged(number, None, f"aggregation made {', '.join(bad[:3])} NaN or infinite")


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
    return "; ".join(causes) + "; a smaller lr or a clip_norm may help"
