"""Groups of runs that differ only in the seed, with mean and spread over seeds."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedkeep import forgetting
from fedkeep._util.json import flatten
from fedkeep.analysis.anatomy import Anatomy, anatomies, loss_by_phase
from fedkeep.errors import RunError
from fedkeep.runs.history import History
from fedkeep.runs.reading import find_runs, load_run

log = logging.getLogger("fedkeep")

Status = Literal["finished", "unfinished", "diverged"]
FRACTIONS = (0.5, 0.75, 0.95)  # of a target accuracy
_IGNORED_KEYS = ("format", "seed", "made_by", "checkpoint_every", "keep")
_STOPPED = {"unfinished": "unfinished at round", "diverged": "diverged after round"}


@dataclass(eq=False)
class Run:
    """One run and its measures, each computed once: reading class accuracies from a long history is slow."""

    history: History

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.history.about["seed"])

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
    def anatomies(self) -> list[Anatomy]:
        """The rounds whose local models were evaluated."""
        return anatomies(self.history)

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

    @classmethod
    def of_histories(cls, label: str, histories: Iterable[History]) -> Group:
        """Make a finished group of histories that need no setting."""
        return cls(label, {}, [Run(history) for history in histories])

    @property
    def finished(self) -> bool:
        """Whether its runs reached their last round."""
        return self.status == "finished"

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return [run.seed for run in self.runs]

    @property
    def last_round(self) -> int:
        """The last round that its runs reached."""
        return int(self.runs[0].history.records[-1]["round"])

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
        return {key: [run.summary[key] for run in self.runs] for key in self.runs[0].summary}


def group_runs(paths: Iterable[str | Path]) -> list[Group]:
    """Read runs and group them by setting; a label names what differs between the groups.

    A run without an evaluated round is skipped, and so is a second run of the same setting and seed. Runs that are
    unfinished or diverged form groups of their own.
    """
    groups: dict[str, Group] = {}
    for path in find_runs(paths):
        history = load_run(path, weights=False)
        if not any("confusion" in r for r in history.records if r["round"]):
            log.warning("%s has no evaluated round: skipped", path)
            continue
        setting, status = _setting(history.about), _status(history)
        stopped = None if status == "finished" else history.records[-1]["round"]
        key = json.dumps([setting, status, stopped], sort_keys=True)
        group = groups.setdefault(key, Group("", setting, status=status))
        if history.about["seed"] in group.seeds:
            log.warning("%s is a second run of the same setting and seed: skipped", path)
        else:
            group.runs.append(Run(history))
    if not groups:
        raise RunError("none of these runs has an evaluated round yet")
    _set_labels(list(groups.values()))
    return list(groups.values())


def rounds_to(group: Group, target: float) -> dict[float, list[int | None]]:
    """Return the rounds to fractions of a target accuracy, for every run of a group (Flashback table 1)."""
    reached = [forgetting.rounds_to_fractions(run.accuracy, target, FRACTIONS, run.rounds) for run in group.runs]
    return {x: [one[x] for one in reached] for x in FRACTIONS}


def _status(history: History) -> Status:
    if history.finished:
        return "finished"
    return "diverged" if history.diverged else "unfinished"


def _setting(about: dict[str, Any]) -> dict[str, Any]:
    setting = {key: value for key, value in about.items() if key not in _IGNORED_KEYS}
    for key in ("data", "split"):
        setting[key] = {k: v for k, v in setting[key].items() if k != "seed"}
    return setting


def _set_labels(groups: list[Group]) -> None:
    """Label each group by its method and by what else differs between the groups, without default hyperparameters."""
    settings = [flatten(g.setting) for g in groups]
    keys = dict.fromkeys(key for setting in settings for key in setting if key != "method.name")
    differing = [key for key in keys if len({repr(setting.get(key)) for setting in settings}) > 1]
    stops_differ = len({(g.status, None if g.finished else g.last_round) for g in groups}) > 1
    taken: dict[str, int] = {}
    for g, setting in zip(groups, settings, strict=True):
        shown = [key for key in differing if key in setting and not _is_default(g, key)]
        parts = [f"{key.rpartition('.')[2]}={_format_value(setting[key])}" for key in shown]
        if stops_differ and not g.finished:
            parts.append(f"{_STOPPED[g.status]} {g.last_round}")
        name = g.setting["method"]["name"]
        label = f"{name} ({', '.join(parts)})" if parts else name
        taken[label] = taken.get(label, 0) + 1
        g.label = label if taken[label] == 1 else f"{label} #{taken[label]}"


def _is_default(g: Group, key: str) -> bool:
    """Return whether a key is a hyperparameter at its default, which differs only because other methods lack it."""
    from fedkeep import methods

    section, _, name = key.partition(".")
    kind = methods.discover().get(g.setting["method"]["name"])
    return section == "method" and kind is not None and kind.defaults().get(name) == g.setting["method"].get(name)


def _format_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
