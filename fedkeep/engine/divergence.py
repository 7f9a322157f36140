"""Numbers that leave the finite range end a run, and it is said where and what grew."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.engine.local import ClientJob, ClientResult
from fedkeep.errors import Diverged
from fedkeep.tree import Tree


def check_finite(number: int, jobs: Sequence[ClientJob], trained: ClientResult, before: Tree) -> Tensor:
    """Return every client's mean loss, [K]; raise if any client's loss, weights or upload left the finite numbers."""
    numbers = tree.leaves({"upload": trained.upload, "params": trained.params})
    finite = torch.stack(
        [t.reshape(len(jobs), -1).isfinite().all(1) for t in numbers] + [trained.losses.isfinite().all(0)]
    ).all(0)
    steps = torch.tensor([job.plan.steps for job in jobs])
    known = torch.stack([finite, trained.losses.double().sum(0)]).cpu()  # the one place where the host waits
    if bool(known[0].all()):
        return known[1] / steps
    k = int((known[0] == 0).nonzero()[0])
    losses = trained.losses[: jobs[k].plan.steps, k].tolist()
    what = []
    broken = next((s for s, value in enumerate(losses) if not math.isfinite(value)), None)
    if broken is not None:
        trail = " -> ".join(f"{losses[s]:.4g}" for s in sorted({0, max(broken - 1, 0), broken}))
        what.append(f"the loss went {trail} at step {broken + 1} of {len(losses)}")
    names = [path for path, t in tree.items(trained.params) if not bool(t[k].isfinite().all())]
    if names:
        what.append(f"not finite any more: {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}")
    others = [path for path, t in tree.items(trained.upload) if not bool(t[k].isfinite().all())]
    if others and not names:
        what.append(f"not finite in the upload: {', '.join(others[:3])}")
    path, size = max(((path, float(w.abs().max())) for path, w in tree.items(before)), key=lambda item: item[1])
    what.append(f"the largest weight it started from was {size:.4g} ({path})")
    raise Diverged(number, jobs[k].id, "; ".join(what) + "; a smaller lr or a clip_norm may help")
