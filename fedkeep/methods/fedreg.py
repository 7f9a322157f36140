"""FedReg. Xu et al., "Acceleration of Federated Learning with Alleviated Forgetting in Local Training", ICLR 2022
(arXiv:2203.02645), after the released code.

A step on a batch (x, y), with theta_0 the weights received, x_s and x_p made of other examples of the client:
    theta' = theta - lr g1,   g1 = the gradient of CE(x, y) at gamma theta + (1 - gamma) theta_0
    g2, g3 = the gradients of CE(x_s, y_s) and CE(x_p, y_p) at beta theta' + (1 - beta) theta_0
    theta <- theta' - w2 g2 - w3 g3,   w2 = <d, g2>+ / |g2|^2,  w3 = <d - w2 g2, g3>+ / |g3|^2,  d = theta' - theta_0
Choices and deviations: docs/methods/fedreg.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.errors import MethodError
from fedkeep.losses import kl, masked_mean
from fedkeep.method import Batch, Cohort, FedAvg, Grads, Params, ServerTree, Visit, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedReg(FedAvg):
    """FedReg: take back what a step forgets of pseudo data, which encode what the global model knows."""

    name: ClassVar[str] = "fedreg"
    paper: ClassVar[str] = "Xu et al., ICLR 2022"
    passes: ClassVar[tuple[str, ...]] = ("loss", "pseudo", "perturbed")
    optimizers: ClassVar[tuple[str, ...]] = ("sgd",)  # its formula is about a step of SGD
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    needs: ClassVar[Mapping[str, str]] = {"real_inputs": ""}  # pseudo data are changed inputs
    gamma: float = hyper(0.5, "share of the local weights in those at which the loss has its gradient",
                         search=(0.25, 1.0), above=0, high=1, test_value=1.0,
                         warning="train without momentum: corrections that enter it are repeated in later steps"
                         )  # fmt: skip
    beta: float = hyper(0.5, "share of the local weights in those at which pseudo data have theirs", above=0, high=1,
                        test_value=1.0)  # fmt: skip
    eta_s: float = hyper(0.1, "step size of the pseudo data, in units of the model's inputs", search=(0.02, 0.5), low=0,
                         test_value=0.5)  # fmt: skip
    eta_p: float = hyper(0.001, "step size of the perturbed data", low=0, test_value=0.1)
    iterations: int = hyper(10, "steps in which pseudo and perturbed data are made", low=1, whole=True, test_value=2)
    average: str = hyper("clients", "what counts alike in the average of the clients' weights",
                         choices=("clients", "examples"), test_value="examples")  # fmt: skip

    def rehearse(self, visit: Visit, x: Any, y: Tensor) -> Tree:
        """Make the pseudo data x_s, with the global model's logits z_s, and the perturbed data x_p, y_p = y."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise MethodError(
                "fedreg makes pseudo data by changing the inputs, which must be one tensor of real numbers: it does "
                "not work for tokens or several inputs",
                key="data",
            )
        task, w_g = visit.task.without_accelerator, visit.shared["params"]  # a kernel has no gradient to the inputs
        x_s, x_p = (self._ascend(task, w_g, x, y, eta) for eta in (self.eta_s, self.eta_p))
        return {"x_s": x_s, "z_s": task.apply(w_g, x_s), "x_p": x_p, "y_p": y}

    def _ascend(self, task: Task, params: Params, x: Tensor, y: Tensor, eta: float) -> Tensor:
        """Return the inputs after some steps along the sign of the gradient of their own loss."""
        gradient = torch.func.grad(lambda x: task.criterion(task.apply(params, x), y).sum())
        for _ in range(self.iterations):
            x = x + eta * gradient(x).sign()
        return x

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean CE at gamma theta + (1 - gamma) theta_0; its gradient by theta is gamma g1."""
        return super().loss(visit, _mixed(params, visit.shared["params"], self.gamma), batch)

    def pseudo(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of KL(y_s || softmax(z(x_s))), which has the gradient of CE(x_s, y_s)."""
        rehearsed = batch["rehearsed"]
        z = visit.task.apply(params, rehearsed["x_s"], train=True)
        return masked_mean(kl(z, rehearsed["z_s"]), batch["mask"])

    def perturbed(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of CE(x_p, y_p)."""
        rehearsed = batch["rehearsed"]
        z = visit.task.apply(params, rehearsed["x_p"], train=True)
        return masked_mean(visit.task.criterion(z, rehearsed["y_p"]), batch["mask"])

    def gradient_point(self, visit: Visit, params: Params, grads: Mapping[str, Grads]) -> Params:
        """Return beta theta' + (1 - beta) theta_0, for both kinds of data."""
        return _mixed(self._stepped(visit, params, grads), visit.shared["params"], self.beta)

    def combine_gradients(self, visit: Visit, params: Params, grads: Mapping[str, Grads]) -> Grads:
        """Return g1 + (w2 g2 + w3 g3) / lr: a step of plain SGD along it ends at theta' - w2 g2 - w3 g3."""
        d = tree.sub(self._stepped(visit, params, grads), visit.shared["params"])
        g2, g3 = grads["pseudo"], grads["perturbed"]
        w2 = _uphill(d, g2)
        w3 = _uphill(tree.map(lambda d, g: d - w2 * g, d, g2), g3)
        u2, u3 = w2 / visit.facts["lr"], w3 / visit.facts["lr"]
        return tree.map(lambda g1, g2, g3: g1 / self.gamma + u2 * g2 + u3 * g3, grads["loss"], g2, g3)

    def _stepped(self, visit: Visit, params: Params, grads: Mapping[str, Grads]) -> Params:
        """Return theta'."""
        scale = visit.facts["lr"] / self.gamma
        return tree.map(lambda w, g: w - scale * g, params, grads["loss"])

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average the weights; every client counts alike."""
        if self.average == "examples":
            return super().aggregate(task, server, uploads, cohort)
        return {"params": tree.mean(uploads["params"])}


def _mixed(params: Params, received: Params, share: float) -> Params:
    return tree.map(lambda w, w_0: share * w + (1 - share) * w_0, params, received)


def _uphill(moved: Tree, gradient: Grads) -> Tensor:
    """Return how often a displacement contains a gradient; 0 if it goes downhill."""
    return (tree.dot(moved, gradient) / tree.dot(gradient, gradient).clamp(min=1e-30)).clamp(min=0)
