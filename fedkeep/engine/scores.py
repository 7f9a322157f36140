"""Scores of the global model on the test set: what a record holds of one evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedkeep import metrics
from fedkeep._util.json import without_nan
from fedkeep.data.client_indices import owner_name
from fedkeep.data.dataset import Dataset
from fedkeep.engine.user_metrics import Metric, evaluate_metrics
from fedkeep.runs.history import Record
from fedkeep.runs.packed import as_table
from fedkeep.tree import Tree

MAX_SITES = 200  # of more, none is recorded: a record would be mostly theirs


@dataclass(frozen=True)
class Sites:
    """The owners of the test examples: their names, and which of them each example belongs to, [N]."""

    names: tuple[str, ...]
    of_example: Tensor

    @classmethod
    def of(cls, data: Dataset | None, device: torch.device) -> Sites | None:
        """Return the sites of a data set; None if the owners of test examples are unknown, or too many."""
        if data is None or data.test_ids is None:
            return None
        owners, index = np.unique(data.test_ids, return_inverse=True)
        if len(owners) > MAX_SITES:
            return None
        return cls(tuple(map(owner_name, owners)), torch.from_numpy(index).to(device))


@dataclass(frozen=True)
class Scorer:
    """Scores logits of the test set, whose labels are `y`."""

    y: Tensor
    n_classes: int
    sites: Sites | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # the user's own, by name

    @property
    def without_sites(self) -> Scorer:
        """The same scorer, of the test set as a whole only."""
        return replace(self, sites=None)

    def start(self, logits: Tensor, loss: Tensor) -> Tree:
        """Start to score the logits [N, C] of the test set and their summed loss; a GPU may be at work on return."""
        predicted = logits.argmax(-1)
        scores: Tree = {
            "loss": loss,
            "confusion": metrics.count_pairs(self.y, predicted, self.n_classes),
            "auc": metrics.auc(logits, self.y),
            "ece": metrics.calibration_error(logits, self.y),
        }
        if self.sites is not None:
            scores["sites"] = self._score_sites(self.sites, logits, predicted)
        return {**scores, "logits": logits} if self.metrics else scores

    def read(self, scores: Tree, round: int) -> Record:
        """Return the record of what `start` returned; the user's metrics are computed now, on the CPU."""
        record: Record = {
            "confusion": as_table(scores["confusion"].cpu()),
            "test_loss": float(scores["loss"]) / len(self.y),
            "auc": without_nan(scores["auc"].tolist()),
            "ece": without_nan(float(scores["ece"])),
        }
        if self.sites is not None:
            tables = {key: as_table(scores["sites"][key].cpu()) for key in ("examples", "predicted", "right")}
            values = {key: without_nan(scores["sites"][key].tolist()) for key in ("auc", "ece")}
            record["sites"] = {**tables, **values}
        if self.metrics:
            record["metrics"] = evaluate_metrics(self.metrics, scores["logits"].cpu(), self.y.cpu(), round)
        return record

    def _score_sites(self, sites: Sites, logits: Tensor, predicted: Tensor) -> Tree:
        """Return, for each site, the counts of each class [S, C], the macro AUC and the calibration error [S]."""
        here = (sites.of_example, len(sites.names))
        right = torch.where(predicted == self.y, self.y, self.n_classes)  # in one column more, the wrong ones
        return {
            "examples": self._count(sites, self.y)[:, : self.n_classes],
            "predicted": self._count(sites, predicted)[:, : self.n_classes],
            "right": self._count(sites, right)[:, : self.n_classes],
            "auc": metrics.auc(logits, self.y, *here).nanmean(1),
            "ece": metrics.calibration_error(logits, self.y, *here),
        }

    def _count(self, sites: Sites, classes: Tensor) -> Tensor:
        """Return how many examples of each site are of each class, [S, C + 1]."""
        width = self.n_classes + 1
        counts = torch.zeros(len(sites.names) * width, dtype=torch.long, device=classes.device)
        cells = sites.of_example * width + classes
        return counts.index_add_(0, cells, torch.ones_like(cells)).reshape(-1, width)
