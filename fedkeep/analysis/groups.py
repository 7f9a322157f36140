"""Groups of runs that differ only in the seed, with mean and spread over seeds, and problems that groups solve."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from fedkeep import forgetting, methods
from fedkeep._util.text import printable
from fedkeep.analysis.anatomy import Anatomy, anatomies, loss_by_phase
from fedkeep.analysis.identity import Identity
from fedkeep.runs.history import History
from fedkeep.runs.round_metrics import class_metrics_of

Status = Literal["finished", "unfinished", "diverged"]
FRACTIONS = (0.5, 0.75, 0.95)  # of a target accuracy


@dataclass(eq=False)
class Run:
    """One run and its measures, each computed once: reading class accuracies from a long history is slow."""

    history: History

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.history.about["seed"])

    @cached_property
    def identity(self) -> Identity:
        """What the run is."""
        return Identity(self.history)

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.history.folder.name if self.history.folder else f"seed {self.seed}"

    @property
    def last_round(self) -> int:
        """The last round that the run reached."""
        return int(self.history.records[-1]["round"])

    @property
    def planned_rounds(self) -> int:
        """The number of rounds that the run was started for."""
        return int(self.history.about.get("train", {}).get("rounds", self.last_round))

    @cached_property
    def rounds(self) -> np.ndarray:
        """[T] the evaluated rounds."""
        return self.history.rounds

    @cached_property
    def class_accuracy(self) -> np.ndarray:
        """[T, C] accuracy of each class."""
        return self.history.class_accuracy

    @cached_property
    def accuracy(self) -> np.ndarray:
        """[T] accuracy."""
        return self.history.accuracy

    @cached_property
    def summary(self) -> dict[str, float]:
        """The measures of `History.summary`."""
        return self.history.summary()

    @cached_property
    def class_metrics(self) -> dict[str, np.ndarray]:
        """[C] the metrics of each class in the last evaluated round."""
        last = [r for r in self.history.records if r["round"] and ("confusion" in r or "hits" in r)][-1:]
        return {name: table[-1] for name, table in class_metrics_of(last).items()}

    @cached_property
    def anatomies(self) -> list[Anatomy]:
        """The rounds whose local models were evaluated."""
        return anatomies(self.history)

    @cached_property
    def learned(self) -> bool:
        """Whether the global model was ever better than one that always predicts the same class."""
        counts = self._last_confusion.sum(1)
        if (counts > 0).sum() < 2 or self.accuracy.max() > counts.max() / counts.sum() + 1e-9:
            return True
        return bool(np.nanmean(self.class_accuracy, axis=1).max() > 1.05 / (counts > 0).sum())

    @cached_property
    def only_prediction(self) -> int | None:
        """The class that the final model predicts for every example; None if it predicts several."""
        predicted = np.flatnonzero(self._last_confusion.sum(0))
        return int(predicted[0]) if len(predicted) == 1 else None

    @property
    def _last_confusion(self) -> np.ndarray:
        return np.asarray(next(r["confusion"] for r in reversed(self.history.records) if "confusion" in r))

    @property
    def below_best(self) -> np.ndarray:
        """[C] how far each class ends below its best earlier round (FedNTD eq. 5, by class)."""
        a = self.class_accuracy
        return np.asarray(a[:-1].max(0) - a[-1]) if len(a) > 1 else np.full(a.shape[1], np.nan)


@dataclass(eq=False)
class Group:
    """Runs that differ only in the seed. Unfinished runs are grouped by the last round they reached."""

    label: str
    setting: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    status: Status = "finished"
    notes: list[str] = field(default_factory=list)  # what is not known of its runs

    @classmethod
    def of_histories(cls, label: str, histories: Iterable[History]) -> Group:
        """Make a finished group of histories that need no setting."""
        return cls(label, {}, [Run(history) for history in histories])

    @cached_property
    def title(self) -> str:
        """Its label, with the method's name as its paper writes it; a label that the user chose stays as it is."""
        name = str(self.setting.get("method", {}).get("name", ""))
        if "label" in self.setting or not name or not self.label.startswith(name):
            return self.label
        return printable(methods.title_of(name)) + self.label.removeprefix(name)

    @property
    def finished(self) -> bool:
        """Whether its runs ended as planned: at their last round, or stopped by a callback."""
        return self.status == "finished"

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return [run.seed for run in self.runs]

    @property
    def last_round(self) -> int:
        """The last round that its runs reached."""
        return max(run.last_round for run in self.runs)

    @property
    def stopped_early(self) -> bool:
        """Whether a callback ended some of its runs before their last round."""
        return self.finished and any(run.last_round < run.planned_rounds for run in self.runs)

    @property
    def learned(self) -> bool:
        """Whether any of its runs was ever better than a model that always predicts the same class."""
        return any(run.learned for run in self.runs)

    @cached_property
    def mean(self) -> dict[str, float]:
        """The mean of every summary measure over the runs."""
        return {key: float(np.mean(values)) for key, values in self._values().items()}

    @cached_property
    def spread(self) -> dict[str, float]:
        """The standard deviation of every summary measure over the runs; NaN for a single run."""
        return {
            key: float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")
            for key, values in self._values().items()
        }

    @cached_property
    def class_forgetting(self) -> np.ndarray:
        """[C] how far each class ends below its best earlier round, mean over runs."""
        return np.asarray(np.mean([run.below_best for run in self.runs], axis=0))

    @cached_property
    def loss_by_phase(self) -> dict[str, float] | None:
        """The accuracy a round loses in local training and in aggregation; None if it was not recorded."""
        return loss_by_phase(anatomy for run in self.runs for anatomy in run.anatomies)

    def _values(self) -> dict[str, list[float]]:
        keys = dict.fromkeys(key for run in self.runs for key in run.summary)
        return {key: [run.summary.get(key, float("nan")) for run in self.runs] for key in keys}


@dataclass(eq=False)
class Problem:
    """Groups that may be compared with each other: same data, same split, same rounds."""

    title: str
    tables: dict[str, Any]  # data, split and train, as far as they define the problem
    groups: list[Group]


def bytes_to(group: Group, target: float) -> list[float | None]:
    """Return the bytes sent, down and up, until the target accuracy is first reached, for every run of a group.

    None for a run that never reaches it in an evaluated round.
    """
    return [_bytes_until(run, target) for run in group.runs]


def _bytes_until(run: Run, target: float) -> float | None:
    last = forgetting.rounds_to(run.accuracy, target * (1 - 1e-12), run.rounds)  # 0.75 reaches 0.7500000000000001
    if last is None:
        return None
    return float(sum(r["bytes_down"] + r["bytes_up"] for r in run.history.records if 0 < r["round"] <= last))


def rounds_to(group: Group, target: float) -> dict[float, list[int | None]]:
    """Return the rounds to fractions of a target accuracy, for every run of a group (Flashback table 1)."""
    reached = [forgetting.rounds_to_fractions(run.accuracy, target, FRACTIONS, run.rounds) for run in group.runs]
    return {x: [one[x] for one in reached] for x in FRACTIONS}
