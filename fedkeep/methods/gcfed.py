"""GC-Fed. Seo et al., "GC-Fed: Gradient Centralized Federated Learning with Partial Client Participation", Information
Fusion 131 (arXiv:2503.13180): Local GC for the feature extractor, Global GC for the classifier.

Choices and deviations: docs/methods/gcfed.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep import tree
from fedkeep._util.centring import subtract_mean
from fedkeep.method import Cohort, FedAvg, Grads, Params, ServerTree, Visit, hyper
from fedkeep.methods._classifier import classifier
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class GCFed(FedAvg):
    """GC-Fed: subtract each gradient's mean over a layer's inputs; for the classifier at the server."""

    name: ClassVar[str] = "gcfed"
    title: ClassVar[str] = "GC-Fed"
    paper: ClassVar[str] = "Seo et al., Information Fusion 2026"
    averaged: ClassVar[tuple[str, ...]] = ("params",)
    form: str = hyper("hybrid", "the classifier at the server, the rest at the clients; all at the clients (local) or "
                      "the server (global); as hybrid, and all at the server (released)",
                      choices=("hybrid", "local", "global", "released"), test_value="local")  # fmt: skip
    biases: bool = hyper(False, "centre vectors too, by their mean over all entries, as the released code does",
                         choices=(True, False), test_value=True)  # fmt: skip

    @property
    def needs(self) -> Mapping[str, str]:
        """A classifier, for the forms that treat it differently."""
        return {"classifier": "set form='local'"} if self.form in ("hybrid", "released") else {}

    @property
    def corrects(self) -> bool:
        """Whether vectors are centred too."""
        return self.biases

    def centred_weights(self, task: Task) -> Sequence[str]:
        """Return the names of the weights that `form` gives to the clients."""
        if self.form == "global":
            return ()
        head = [] if self.form == "local" else self.head(task)
        return [name for name in task.init if name not in head]

    def correct(self, visit: Visit, params: Params, grads: Grads) -> Grads:
        """Return the gradients, with vectors centred too, in the layers that `form` gives to the clients."""
        layers = self.centred_weights(visit.task)
        return {name: self._centre(g) if name in layers and g.ndim == 1 else g for name, g in grads.items()}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Average, and centre the step in the layers that `form` gives to the server."""
        params = super().aggregate(task, server, uploads, cohort)["params"]
        step = tree.sub(params, server["params"])
        layers = self.head(task) if self.form == "hybrid" else [] if self.form == "local" else list(step)
        centred = {name: server["params"][name] + self._centre(step[name]) for name in layers}
        return {"params": {**params, **centred}}

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Raise if `form` needs a classifier and the model has none."""
        if self.form in ("hybrid", "released"):
            self.head(task)
        return super().init_server(task, params)

    def head(self, task: Task) -> list[str]:
        """Return the names of the classifier's weights."""
        return classifier(task, self.name, "form", "'local'")

    def _centre(self, g: Tensor) -> Tensor:
        """Return g minus its mean over all axes but the first, the outputs; a vector only with `biases`."""
        return g - g.mean() if g.ndim == 1 and self.biases else subtract_mean(g)
