"""Runs side by side: grouped by setting, with mean and spread over seeds."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep import forgetting
from fedkeep._util.json import flatten
from fedkeep.errors import RunError
from fedkeep.runs.history import History
from fedkeep.runs.reading import find_runs, load_run

log = logging.getLogger("fedkeep")

FRACTIONS = (0.5, 0.75, 0.95)  # of a target accuracy
UNFINISHED, DIVERGED = "unfinished at round", "diverged after round"
_NOT_THE_SETTING = ("format", "seed", "made_by", "checkpoint_every")


@dataclass
class Group:
    """Runs that differ in their seeds alone."""

    label: str
    setting: dict[str, Any]
    histories: list[History] = field(default_factory=list)
    _summaries: dict[int, dict[str, float]] = field(default_factory=dict, repr=False)  # by place: each made once

    @property
    def finished(self) -> bool:
        """Whether its runs have come to their end."""
        return not self.setting.keys() & {UNFINISHED, DIVERGED}

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return [h.about["seed"] for h in self.histories]

    def summaries(self) -> list[dict[str, float]]:
        """The summaries of its runs; tests ask for them again and again, and a long run's takes a while."""
        for k, history in enumerate(self.histories):
            if k not in self._summaries:
                self._summaries[k] = history.summary()
        return [self._summaries[k] for k in range(len(self.histories))]

    def mean(self) -> dict[str, float]:
        """The mean of every summary over the runs."""
        rows = self.summaries()
        return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}

    def spread(self) -> dict[str, float]:
        """The standard deviation of every summary over the runs; NaN for a single one."""
        rows = self.summaries()
        if len(rows) < 2:
            return {key: float("nan") for key in rows[0]}
        return {key: float(np.std([row[key] for row in rows], ddof=1)) for key in rows[0]}


def group(paths: Iterable[str | Path]) -> list[Group]:
    """Read runs and group them by setting; a label names what differs between the groups.

    A run without an evaluated round is left out, and so is a second run of the same setting and seed; one that has not
    come to its end stands apart, marked.
    """
    groups: dict[str, Group] = {}
    for path in find_runs(paths):
        history = load_run(path, weights=False)
        if not any("confusion" in r for r in history.records if r["round"]):
            log.warning("%s has no evaluated round; left out", path)
            continue
        setting = _setting(history.about)
        if not history.finished:
            setting[DIVERGED if history.diverged else UNFINISHED] = history.records[-1]["round"]
        found = groups.setdefault(json.dumps(setting, sort_keys=True), Group("", setting))
        if history.about["seed"] in found.seeds:
            log.warning("%s is a second run of one setting and seed; left out", path)
        else:
            found.histories.append(history)
    if not groups:
        raise RunError("none of these runs has an evaluated round yet")
    _label(list(groups.values()))
    return list(groups.values())


def rounds_to(group: Group, target: float) -> dict[float, list[int | None]]:
    """Return the rounds to shares of a target accuracy, for every run of a group (Flashback table 1)."""
    found = [forgetting.rounds_to_fractions(h.accuracy, target, FRACTIONS, h.rounds) for h in group.histories]
    return {x: [one[x] for one in found] for x in FRACTIONS}


def _label(groups: list[Group]) -> None:
    """Name each group by its method and by what else differs, hyperparameters at their defaults left unsaid."""
    flat = [flatten(g.setting) for g in groups]
    differing = [k for k in dict.fromkeys(k for f in flat for k in f) if len({repr(f.get(k)) for f in flat}) > 1]
    taken: dict[str, int] = {}
    for g, f in zip(groups, flat, strict=True):
        said = [k for k in differing if k in f and k != "method.name" and not _is_default(g, k)]
        label = ", ".join([g.setting["method"]["name"], *(f"{k.rpartition('.')[2]} {_short(f[k])}" for k in said)])
        taken[label] = taken.get(label, 0) + 1
        g.label = label if taken[label] == 1 else f"{label} #{taken[label]}"


def _is_default(g: Group, key: str) -> bool:
    """Whether a key is a hyperparameter at its default, which differs only because other methods lack it."""
    from fedkeep import methods

    section, _, name = key.partition(".")
    kind = methods.discover().get(g.setting["method"]["name"])
    return section == "method" and kind is not None and kind.defaults().get(name) == g.setting["method"].get(name)


def _setting(about: dict[str, Any]) -> dict[str, Any]:
    setting = {key: value for key, value in about.items() if key not in _NOT_THE_SETTING}
    for key in ("data", "split"):
        setting[key] = {k: v for k, v in setting[key].items() if k != "seed"}
    return setting


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
