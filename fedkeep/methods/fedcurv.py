"""FedCurv. Shoham et al., "Overcoming Forgetting in Federated Learning on Non-IID Data", NeurIPS workshop on
federated learning 2019 (arXiv 1910.07796).

The local loss is CE + lam * sum over the other clients j of (w - w_j)' F_j (w - w_j), F_j the diagonal Fisher
information at w_j. Its gradient needs two sums only, of u_j = F_j and of v_j = F_j w_j.

Where the paper leaves a choice:

- F is the empirical Fisher, with the true labels, over at most s of the client's examples, in random order, never
  augmented and with the model in evaluation mode. `fisher = "example"` is the mean of the squared gradients of single
  examples; "batch" the mean over minibatches of the squared gradient of a minibatch's mean loss, as in FedNTD's
  released code (s = 500, lam = 1). That is smaller, by about the size of a batch where gradients are noise: a good
  lam for one is not one for the other. FedSSD, which finds lam = 1e-3 best for CIFAR-10, does not say which it took.
- The sum is over the last u and v of every client seen so far, not over this round's cohort, and plain: clients
  do not weigh by n_k.
- The server keeps the sums and nothing per client: a client remembers its own last u and v, uploads the changes, and
  takes its own part out of the sums it receives. In round 1 they are 0, so there is no penalty.
- FedSSD's text counts 2.5 times FedAvg's bytes, and twice in its section 5.4. Here it is 3 models down and 3 up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.method import Cohort, FedAvg, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree

_AT_ONCE = 10  # gradients of single examples held at a time: each is as large as the model


@dataclass(frozen=True)
class FedCurv(FedAvg):
    """FedCurv: hold every client near the others' last weights, each weight as firmly as it mattered to them."""

    name: ClassVar[str] = "fedcurv"
    paper: ClassVar[str] = "Shoham et al., NeurIPS workshop 2019"
    lam: float = hyper(1.0, "weight of the penalty (lambda)", low=0, neutral=0.0, other=0.1)
    s: int = hyper(500, "examples that estimate the Fisher information, at most", low=1, whole=True, other=2)
    fisher: str = hyper("example", "squared gradients of what", choices=("example", "batch"), other="batch")

    def init_server(self, task: Task, params: Tree) -> Tree:
        """Start with sums of 0."""
        return {"params": params, "u": tree.zeros_like(params), "v": tree.zeros_like(params)}

    def broadcast(self, server: Tree) -> Tree:
        """Send the weights and the sums of u and v."""
        return {"params": server["params"], "u": server["u"], "v": server["v"]}

    def init_client(self, task: Task, params: Tree) -> Tree:
        """Start with nothing in the sums."""
        return {"u": tree.zeros_like(params), "v": tree.zeros_like(params)}

    def prepare(self, task: Task, shared: Tree, client: Tree, facts: Tree) -> Tree:
        """Take the client's own part out of the sums."""
        return {"u": tree.sub(shared["u"], client["u"]), "v": tree.sub(shared["v"], client["v"])}

    def correct(self, grads: Tree, params: Tree, shared: Tree, local: Tree) -> Tree:
        """Return g + 2 lam (u w - v)."""

        def pull(g: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
            return g + 2 * self.lam * (u * w - v)

        return tree.map(pull, grads, params, local["u"], local["v"])  # type: ignore[no-any-return]

    def measure(self, task: Task, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tree:
        """Sum squared gradients over the first s examples, and count them (or the minibatches)."""
        x, y = batch["x"], batch["y"]
        counted = (batch["mask"] & (batch["place"] < self.s)).to(task.dtype)
        if self.fisher == "batch":
            size = counted.sum()
            gradient = torch.func.grad(lambda w: (counted * _losses(task, w, x, y)).sum() / size.clamp(min=1))(params)
            return {"squares": tree.map(torch.square, gradient), "count": size.clamp(max=1)}
        squares = tree.zeros_like(params)
        for at in torch.split(torch.arange(len(y), device=y.device), _AT_ONCE):
            each = _gradients(task)(params, tree.take(x, at), y[at])
            squares = tree.map(lambda t, g, c=counted[at]: t + torch.tensordot(c, g**2, dims=1), squares, each)
        return {"squares": squares, "count": counted.sum()}

    def finish(
        self, shared: Tree, params: Tree, local: Tree, client: Tree, facts: Tree, measured: Tree
    ) -> tuple[Tree, Tree]:
        """Upload the changes of u = F and v = F w, and keep both."""
        u = tree.scale(measured["squares"], 1 / measured["count"])
        kept = {"u": u, "v": tree.map(torch.mul, u, params)}
        return {"params": params, "n": facts["n"], **tree.sub(kept, client)}, kept

    def aggregate(self, task: Task, server: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """Average the weights, and add the changes to the sums."""
        sums = {key: tree.map(lambda t, d: t + d.sum(0), server[key], uploads[key]) for key in ("u", "v")}
        return {"params": tree.mean(uploads["params"], uploads["n"]), **sums}


def _losses(task: Task, params: Tree, x: Any, y: Tensor) -> Tensor:
    return task.criterion(task.apply(params, x), y)


def _gradients(task: Task) -> Callable[..., Tree]:
    """Make the function (params, x, y) -> the gradient of every single example's loss."""

    def single(params: Tree, x: Any, y: Tensor) -> Tensor:
        return _losses(task, params, tree.map(lambda t: t[None], x), y[None]).sum()

    return torch.func.vmap(torch.func.grad(single), in_dims=(None, 0, 0))
