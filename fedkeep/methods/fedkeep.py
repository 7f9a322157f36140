"""FedKeep, fedkeep's own method: a calibrated loss, centred gradients, classifier rows averaged by label counts, and
momentum at the server.

Formula, choices and figures: docs/methods/fedkeep.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep import tree
from fedkeep.losses import masked_mean
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
    Upload,
    Visit,
    hyper,
)  # fmt: skip
from fedkeep.methods._centred import centred
from fedkeep.methods._classifier import classifier
from fedkeep.methods._per_class import LABEL_COUNTS, mean_by_counts
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class FedKeep(FedAvg):
    """FedKeep: clients hardly push down the classes that they lack, and the server keeps its direction."""

    name: ClassVar[str] = "fedkeep"
    paper: ClassVar[str] = "this library"
    bounds: ClassVar[Mapping[str, Bound]] = {**FedAvg.bounds, "mu": LABEL_COUNTS}
    floor: float = hyper(1e-3, "smallest class share in the calibrated loss; 1: plain cross-entropy",
                         search=(1e-4, 0.1), above=0, high=1, test_value=0.05)  # fmt: skip
    server_momentum: float = hyper(0.7, "share of the server's velocity kept from round to round", search=(0.5, 0.8),
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
        """A classifier whose rows can be averaged."""
        return {"classifier": "set rows=False"} if self.rows else {}

    # Clients

    def prepare(self, visit: Visit) -> Local:
        """Compute log p, what the loss adds to the logits."""
        share = visit.facts["label_counts"] / visit.facts["n"]
        return {"log_p": share.clamp(min=self.floor).log()}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the mean of CE(z + log p, y)."""
        z = visit.task.apply(params, batch["x"], train=True)
        return masked_mean(visit.task.criterion(z + visit.local["log_p"], batch["y"]), batch["mask"])

    def correct(self, visit: Visit, params: Params, grads: Grads) -> Grads:
        """Return the gradients without their means over a layer's inputs."""
        return tree.map(centred, grads) if self.centre else grads

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Upload the weights and, for the rows, the label counts mu."""
        facts = visit.facts
        counts = {"mu": facts["label_counts"]} if self.rows else {}
        return {"params": params, "n": facts["n"], **counts}, visit.client

    # Server

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Start with the velocity v = 0."""
        if self.rows:
            self._head(task)
        return {"params": params, "v": tree.zeros_like(params)}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average, the classifier's rows by label counts; v <- m v + (average - w); w <- w + v."""
        w = server["params"]
        average = dict(tree.mean(uploads["params"], uploads["n"]))
        for name in self._head(task) if self.rows else ():  # of a class that nobody has, the last row
            average[name] = mean_by_counts(uploads["params"][name], uploads["mu"], w[name])
        v = tree.map(lambda v, a, w: self.server_momentum * v + (a - w), server["v"], average, w)
        return {"params": tree.add(w, v), "v": v}

    def _head(self, task: Task) -> list[str]:
        """Return the names of the classifier's weights."""
        return classifier(task, self.name, "rows", "False")
