"""Runs side by side: grouped by setting, with mean and spread over seeds."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep import forgetting, plain
from fedkeep.errors import RunError
from fedkeep.history import History
from fedkeep.runs import EXPERIMENT, load_run

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


def find(paths: Iterable[str | Path]) -> list[Path]:
    """Turn paths into run folders: each one itself, or those directly below it."""
    found: list[Path] = []
    for path in map(Path, paths):
        if (path / EXPERIMENT).exists():
            found.append(path)
        elif path.is_dir() and (below := sorted(p.parent for p in path.glob(f"*/{EXPERIMENT}"))):
            found += below
        else:
            far = (p for depth in (2, 3, 4) for p in sorted(path.glob("*/" * depth + EXPERIMENT)))
            deeper = next((p.parent.parent for p in far), None)
            where = f"; there are some in {deeper}" if deeper else ""
            raise RunError(f"{path} is not a run folder and holds none{where}")
    return list(dict.fromkeys(found))


def group(paths: Iterable[str | Path]) -> list[Group]:
    """Read runs and group them by setting; a label names what differs between the groups.

    A run without an evaluated round is left out, and so is a second run of the same setting and seed; one that has not
    come to its end stands apart, marked.
    """
    groups: dict[str, Group] = {}
    for path in find(paths):
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


def as_data(groups: list[Group], against: str | None = None, target: float | None = None) -> dict[str, Any]:
    """Return the comparison as plain data: the groups, every test, and what it found in words."""
    from fedkeep import findings

    rows = []
    for g in groups:
        row = {"label": g.label, "setting": g.setting, "seeds": g.seeds, "finished": g.finished}
        row |= {"mean": g.mean(), "spread": g.spread()}
        if target is not None:
            row["rounds_to"] = {f"{x:g}": rounds for x, rounds in rounds_to(g, target).items()}
        rows.append(row)
    means = {g.label: g.mean() for g in groups if g.finished}
    return {
        "groups": rows,
        "ranks": {
            key: findings.ranks({label: mean[key] for label, mean in means.items()}, higher)
            for key, higher in findings.HIGHER.items()
        },
        "tests": [t for key in findings.HIGHER for t in findings.as_data(findings.differences(groups, key, against))],
        "found": findings.words(groups, against),
    }


def _label(groups: list[Group]) -> None:
    """Name each group by its method and by what else differs, hyperparameters at their defaults left unsaid."""
    flat = [plain.flat(g.setting) for g in groups]
    differing = [k for k in dict.fromkeys(k for f in flat for k in f) if len({repr(f.get(k)) for f in flat}) > 1]
    taken: dict[str, int] = {}
    for g, f in zip(groups, flat, strict=True):
        said = [k for k in differing if k in f and k != "method.name" and not _is_default(g, k)]
        label = ", ".join([g.setting["method"]["name"], *(f"{k.rpartition('.')[2]} {_short(f[k])}" for k in said)])
        taken[label] = taken.get(label, 0) + 1
        g.label = label if taken[label] == 1 else f"{label} #{taken[label]}"


def as_markdown(groups: list[Group]) -> str:
    """Write the table in Markdown: accuracies in percent, mean±standard deviation over seeds; **best**, <u>next</u>."""
    from fedkeep.findings import HIGHER, ranks

    places = {key: ranks({g.label: g.mean()[key] for g in groups if g.finished}, up) for key, up in HIGHER.items()}
    around = {0: ("", ""), 1: ("**", "**"), 2: ("<u>", "</u>")}
    lines = [
        "| method | final | best | smoothed | forgetting | round forgetting | MB | runs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for g in groups:
        mean, spread = g.mean(), g.spread()
        several = len(g.histories) > 1

        cells = []
        for key, higher in HIGHER.items():
            scale, digits = (100, 1) if higher else (1, 3)
            number = f"{mean[key] * scale:.{digits}f}" + (f"±{spread[key] * scale:.{digits}f}" if several else "")
            before, after = around[places[key].get(g.label, 0)]
            cells.append(f"{before}{number}{after}")
        lines.append(f"| {g.label} | {' | '.join(cells)} | {mean['bytes'] / 1e6:.1f} | {len(g.histories)} |")
    return "\n".join(lines)


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
