"""FedKeep, fedkeep's own method: a calibrated loss, centred gradients, classifier rows averaged by label counts, and
clients that start where the server's momentum leads.

Formula, choices and figures: docs/methods/fedkeep.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.losses import masked_mean
from fedkeep.method import (
    Batch,
    Bound,
    ClientState,
    Cohort,
    FedAvg,
    Local,
    Params,
    ServerTree,
    Shared,
    Upload,
    Visit,
    hyper,
)  # fmt: skip
from fedkeep.methods._classifier import classifier
from fedkeep.methods._per_class import LABEL_COUNTS, mean_by_counts
from fedkeep.optim import SGD
from fedkeep.task import Task
from fedkeep.tree import Tree

_FLOOR_WITHOUT_SGD = 0.01  # Adam's steps are as long for a small gradient as for a large one


@dataclass(frozen=True)
class FedKeep(FedAvg):
    """FedKeep: clients hardly push down the classes that they lack, and start where the server's momentum leads."""

    name: ClassVar[str] = "fedkeep"
    paper: ClassVar[str] = "this library"
    bounds: ClassVar[Mapping[str, Bound]] = {**FedAvg.bounds, "mu": LABEL_COUNTS}
    push: float = hyper(0.3, "with SGD, roughly how far, in nats, a visit may lower the logit of a class that the "
                        "client lacks; very large: plain cross-entropy", search=(0.1, 3.0), above=0,
                        test_value=0.05, only_with={"optimizer": "sgd"})  # fmt: skip
    server_momentum: float = hyper(0.85, "share of the server's velocity kept from round to round", search=(0.6, 0.95),
                                   low=0, high=0.999, test_value=0.3)  # fmt: skip
    rows: bool = hyper(True, "average the classifier's rows by label counts, which clients then disclose",
                       choices=(True, False), test_value=False)  # fmt: skip
    centre: bool = hyper(True, "subtract from every gradient its mean over a layer's inputs", choices=(True, False),
                         test_value=False)  # fmt: skip

    @property
    def averaged(self) -> tuple[str, ...]:
        """Nothing if rows are weighed by label counts, otherwise the weights."""
        return () if self.rows else ("params",)

    @property
    def needs(self) -> Mapping[str, str]:
        """A classifier whose rows can be averaged, and every client's upload to average them."""
        return dict.fromkeys(("classifier", "every_upload"), "set rows=False") if self.rows else {}

    # Clients

    def prepare(self, visit: Visit) -> Local:
        """Compute the class shares, and S: how far a visit moves a weight whose gradient stays at 1."""
        facts = visit.facts
        return {"share": facts["label_counts"] / facts["n"], "S": visit.shared["lr"] * facts["effective_steps"]}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of CE(z + log p, y), p being the class shares, at least the floor."""
        share = visit.local["share"]
        if isinstance(visit.task.optimizer, SGD):
            h, z = visit.task.classifier_inputs(params, batch["x"], train=True)
            p = torch.maximum(share, self.floor(visit, h.detach(), batch["mask"]))
        else:
            z = visit.task.apply(params, batch["x"], train=True)
            p = share.clamp(min=_FLOOR_WITHOUT_SGD)
        return masked_mean(visit.task.criterion(z + p.log(), batch["y"]), batch["mask"])

    def floor(self, visit: Visit, h: Tensor, mask: Tensor) -> Tensor:
        """Return push / (S (1 + mean |h|^2)), at most 1, for the classifier's inputs h of a batch."""
        precise = h.to(visit.local["share"].dtype)  # squares are large for float16
        size = 1 + masked_mean(precise.square().sum(1), mask)  # of the gradient of a logit by its row, weights and bias
        floor: Tensor = self.push / (visit.local["S"] * size)
        return floor.clamp(max=1)

    def centred_weights(self, task: Task) -> Sequence[str]:
        """Return the names of all weights, or of none."""
        return list(task.init) if self.centre else ()

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Upload the weights and, for the rows, the label counts mu."""
        facts = visit.facts
        counts = {"mu": facts["label_counts"]} if self.rows else {}
        return {"params": params, "n": facts["n"], **counts}, visit.client

    # Server

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with the velocity v = 0, and the learning rate before any decay. Raise if the model does not fit."""
        if task.examined and isinstance(task.optimizer, SGD):
            task.require_last_linear()
        if self.rows:
            self._head(task)
        precise = torch.promote_types(task.dtype, torch.float32)
        lr = torch.tensor(task.base_lr, dtype=precise, device=task.device)
        return {"params": params, "v": tree.zeros_like(params), "lr": lr}

    def broadcast(self, server: ServerTree) -> Shared:
        """Send w + m v, the point to which the momentum leads, and the learning rate."""
        return {"params": self._ahead(server), "lr": server["lr"]}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average, the classifier's rows by label counts; v is the step from w to the average."""
        average = dict(tree.mean(uploads["params"], uploads["n"]))
        sent = self._ahead(server)
        for name in self._head(task) if self.rows else ():  # of a class that nobody has, the row that was sent
            average[name] = mean_by_counts(uploads["params"][name], uploads["mu"], sent[name])
        return {**server, "params": average, "v": tree.sub(average, server["params"])}

    def _ahead(self, server: ServerTree) -> Params:
        """Return w + m v."""
        return tree.add(server["params"], tree.scale(server["v"], self.server_momentum))

    def _head(self, task: Task) -> list[str]:
        """Return the names of the classifier's weights."""
        return classifier(task, self.name, "rows", "False")
