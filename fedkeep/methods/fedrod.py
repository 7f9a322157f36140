"""FedRoD. Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022
(arXiv:2107.00778): a generic head by balanced softmax, and with `personal_head` a head of each client on top of it.

Choices and deviations: docs/methods/fedrod.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.errors import MethodError
from fedkeep.losses import keep_classes, masked_mean
from fedkeep.method import Batch, ClientState, FedAvg, Local, Params, ServerTree, Upload, Visit, hyper
from fedkeep.methods._classifier import classifier
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedRoD(FedAvg):
    """FedRoD: balanced softmax for the generic model, and a head of each client's own that adds to its logits."""

    name: ClassVar[str] = "fedrod"
    paper: ClassVar[str] = "Chen and Chao, ICLR 2022"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    gamma: float = hyper(1.0, "exponent of the label counts", search=(0.3, 1.5), low=0, fedavg_at=0.0, test_value=0.3)
    personal_head: bool = hyper(False, "also train a head of each client's own; the generic model stays the same",
                                choices=(True, False), test_value=True)  # fmt: skip

    @property
    def needs(self) -> Mapping[str, str]:
        """For personal heads whole batches, and a classifier that they can be added to."""
        return dict.fromkeys(("whole_batches", "classifier"), "set personal_head=False") if self.personal_head else {}

    @property
    def personalises(self) -> bool:
        """Whether clients have heads of their own."""
        return self.personal_head

    @property
    def uploads_as_fedavg(self) -> bool:
        """Yes: what `finish` adds stays with the client."""
        return True

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor | tuple[Tensor, Tree]:  # type: ignore[override]
        """Return the mean of -log(n_y^gamma e^{z_y} / sum_c n_c^gamma e^{z_c}), and the personal head's step."""
        if not self.personal_head:
            return self.balanced(visit, visit.task.apply(params, batch["x"], train=True), batch)
        h, z = visit.task.outputs(params, batch["x"], train=True)
        return self.balanced(visit, z, batch), self.head_step(visit, h.detach(), z.detach(), batch)

    def balanced(self, visit: Visit, z: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of the generic head."""
        z = keep_classes(z + visit.local["shift"], visit.local["present"])
        return masked_mean(visit.task.criterion(z, batch["y"]), batch["mask"])

    def head_step(self, visit: Visit, h: Tensor, z: Tensor, batch: Batch) -> Tree:
        """Return what a step of the client's optimiser along the mean CE(z + W_p h + b_p, y) changes, z and h fixed."""
        tracked, task = visit.local["tracked"], visit.task

        def mean_loss(head: Tree) -> Tensor:
            return masked_mean(task.criterion(z + _logits(head, h), batch["y"]), batch["mask"])

        grads = torch.func.grad(mean_loss)(tracked["head"])
        lr = visit.facts["lr"].to(h.dtype)
        head, state = task.optimizer.update(grads, tracked["state"], tracked["head"], lr)
        return tree.sub({"head": head, "state": state}, tracked)

    def prepare(self, visit: Visit) -> Local:
        """Compute gamma log n_c; that of a missing class, -infinity, is left to the mask. Take up the personal head."""
        counts = visit.facts["label_counts"]
        local = {"shift": self.gamma * counts.clamp(min=1).log(), "present": (counts > 0) | (self.gamma == 0)}
        if not self.personal_head:
            return local
        head = visit.client["head"]
        return {**local, "tracked": {"head": head, "state": visit.task.optimizer.init(head)}}

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Upload the generic model; keep the personal head."""
        kept = {"head": visit.local["tracked"]["head"]} if self.personal_head else {}
        return {"params": params, "n": visit.facts["n"]}, kept

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Raise if a personal head could not be added to the model's classifier."""
        if self.personal_head:
            head = self.generic_head(task, params)
            h = torch.ones(1, task.n_features, dtype=task.dtype, device=task.device)
            fits = head["weight"].shape[1] == task.n_features
            if not fits or not torch.allclose(task.head(params, h), _logits(head, h), rtol=1e-2, atol=1e-2):
                raise MethodError(
                    f"{self.name}: the model's head is not one linear layer, to which a personal head could be added; "
                    "set personal_head=False",
                    key="method.personal_head",
                )
        return super().init_server(task, params)

    def init_client(self, task: Task, params: Params) -> ClientState:
        """Start with a personal head of 0: the generic model."""
        return {"head": tree.zeros_like(self.generic_head(task, params))} if self.personal_head else {}

    def generic_head(self, task: Task, params: Params) -> Params:
        """Return the classifier's weight, and its bias if it has one."""
        return {part: params[name] for part, name in self.names(task).items()}

    def names(self, task: Task) -> dict[str, str]:
        """Return the names of the classifier's weight and bias."""
        names = classifier(task, self.name, "personal_head", "False", checks=True)
        return dict(zip(("weight", "bias"), names, strict=False))

    def personal_params(self, visit: Visit) -> Params:
        """Return the global model with the client's head added to its own: the sum of both heads' logits."""
        shared = visit.shared["params"]
        if not self.personal_head:
            return shared  # type: ignore[no-any-return]
        own = visit.client["head"]
        return {**shared, **{name: shared[name] + own[part] for part, name in self.names(visit.task).items()}}


def _logits(head: Tree, h: Tensor) -> Tensor:
    """Return W h + b."""
    z: Tensor = h @ head["weight"].T
    return z + head["bias"] if "bias" in head else z
