"""FedCurv. Shoham et al., "Overcoming Forgetting in Federated Learning on Non-IID Data", NeurIPS workshop on
federated learning 2019 (arXiv:1910.07796).

The local loss is CE + lam * sum over the other clients j of (w - w_j)' F_j (w - w_j), F_j the diagonal Fisher
information at w_j. Its gradient needs two sums only, of u_j = F_j and of v_j = F_j w_j.
Choices and deviations: docs/methods/fedcurv.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.bounds import Received, tolerance
from fedkeep.method import (
    Batch,
    Bound,
    ClientState,
    Cohort,
    FedAvg,
    Grads,
    Local,
    Params,
    ServerTree,
    Shared,
    Upload,
    Visit,
    hyper,
)  # fmt: skip
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedCurv(FedAvg):
    """FedCurv: penalise changes to weights that are important for other clients."""

    name: ClassVar[str] = "fedcurv"
    paper: ClassVar[str] = "Shoham et al., NeurIPS workshop 2019"
    averaged: ClassVar[tuple[str, ...]] = ("params", "u", "v")
    bounds: ClassVar[Mapping[str, Bound]] = {
        **FedAvg.bounds,
        "u": Bound(low=lambda r: tree.map(lambda u: -_largest_part(u), r.server["u"]), high=lambda r: _largest_u(r)),
        "v": Bound(low=lambda r: _v(r, -1.0), high=lambda r: _v(r, 1.0)),
    }
    lam: float = hyper(1.0, "weight of the penalty (lambda)", search=(0.001, 10.0), low=0, fedavg_at=0.0,
                       test_value=0.1,
                       warning='a good value for fisher="example" is not one for "batch", whose Fisher information '
                               "is smaller by about the batch size")  # fmt: skip
    s: int = hyper(500, "maximum number of examples that estimate the Fisher information", low=1, whole=True,
                   test_value=2)  # fmt: skip
    fisher: str = hyper("example", "squared gradients of single examples or of minibatches",
                        choices=("example", "batch"), test_value="batch")  # fmt: skip

    def init_client(self, task: Task, params: Params) -> ClientState:
        """Start with nothing in the sums."""
        return {"u": tree.zeros_like(params), "v": tree.zeros_like(params)}

    def prepare(self, visit: Visit) -> Local:
        """Subtract the client's own part from the sums."""
        return {key: tree.sub(visit.shared[key], visit.client[key]) for key in ("u", "v")}

    def correct(self, visit: Visit, params: Params, grads: Grads) -> Grads:
        """Return g + 2 lam (u w - v)."""

        def corrected(g: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
            return g + 2 * self.lam * (u * w - v)

        return tree.map(corrected, grads, params, visit.local["u"], visit.local["v"])

    def measure(self, visit: Visit, params: Params, batch: Batch) -> Tree:
        """Sum squared gradients over the first s examples, and count them (or the minibatches)."""
        task, x, y = visit.task, batch["x"], batch["y"]
        counted = (batch["mask"] & (batch["position"] < self.s)).to(task.dtype)
        if self.fisher == "batch":
            size = counted.sum()
            gradient = torch.func.grad(lambda w: (counted * _losses(task, w, x, y)).sum() / size.clamp(min=1))(params)
            return {"squares": tree.map(torch.square, gradient), "count": size.clamp(max=1)}
        return {"squares": task.squared_gradients(params, x, y, counted), "count": counted.sum()}

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Upload the changes of u = F and v = F w, and keep both."""
        u = tree.scale(measured["squares"], 1 / measured["count"])
        state = {"u": u, "v": tree.map(torch.mul, u, params)}
        return {"params": params, "n": visit.facts["n"], **tree.sub(state, visit.client)}, state

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with sums of 0."""
        return {"params": params, "u": tree.zeros_like(params), "v": tree.zeros_like(params)}

    def broadcast(self, server: ServerTree) -> Shared:
        """Send the weights and the sums of u and v."""
        return {"params": server["params"], "u": server["u"], "v": server["v"]}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average the weights, and add the changes to the sums."""
        sums = {key: tree.map(lambda t, d: t + d.sum(0), server[key], uploads[key]) for key in ("u", "v")}
        return {"params": tree.mean(uploads["params"], uploads["n"]), **sums}


def _losses(task: Task, params: Params, x: Any, y: Tensor) -> Tensor:
    return task.criterion(task.apply(params, x), y)


# Bounds of an honest upload: the client takes back its old part of the sums, and adds a new one that is not negative


def _largest_part(u_sum: Tensor) -> Tensor:
    """Return the sum of all clients' u, which no client's own part exceeds, plus what rounding may have taken."""
    lost = max(1e-3, 64 * torch.finfo(u_sum.dtype).eps) * u_sum.double().abs().max()
    return 1.01 * u_sum.double().abs() + lost + 1e-12


def _largest_u(received: Received) -> float:
    """Return ten times the u at which every other client's training becomes unstable: lr 2 lam u = 2 (1 + momentum)."""
    momentum = float(getattr(received.task.optimizer, "momentum", 0.0))
    return 10.0 * (1 + momentum) / max(received.lr * float(received.method.lam), 1e-30)


def _v(received: Received, sign: float) -> Tree:
    """Return u w, plus or minus what the part that is taken back adds: v = u w + u_old (w - w_old)."""
    norm = float(tree.dot(received.server["params"], received.server["params"])) ** 0.5

    def limit(u: Tensor, w: Tensor, u_sum: Tensor) -> Tensor:
        rounding = tolerance(u, u_sum) * (w.double().abs().max() + max(norm, 1.0))
        taken_back = _largest_part(u_sum) * (w.double().abs() + 10 * max(norm, 1.0))
        limits: Tensor = u.double() * w.double() + sign * (taken_back + rounding)
        return limits

    return tree.map(limit, received.upload["u"], received.upload["params"], received.server["u"])
