"""What came out, in words: who forgets least, whether that is also ahead in accuracy, where forgetting happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkeep._util.text import join_names
from fedkeep.analysis.groups import DIVERGED, UNFINISHED
from fedkeep.analysis.measured import Measured


@dataclass(frozen=True)
class Verdict:
    """One sentence, and what it rests on."""

    headline: str
    details: list[str]


def verdict(groups: list[Measured]) -> Verdict:
    """Say what these runs show, and how far to believe it."""
    known = sorted((g for g in groups if np.isfinite(g.mean["forgetting"])), key=lambda g: g.mean["forgetting"])
    if not known:
        return Verdict("Too early to say: forgetting needs at least two evaluated rounds.", _cautions(groups))
    headline = _alone(known[0]) if len(known) == 1 else _ranking(known)
    return Verdict(headline, [*_runner_up(known), *_places(known), *_cautions(groups)])


def reference(groups: list[Measured]) -> Measured:
    """Choose what the others are measured against: FedAvg where it is there, else the one that forgets most."""
    plain = [g for g in groups if g.setting["method"]["name"] == "fedavg"]
    return max(plain or groups, key=lambda g: g.mean["forgetting"])


def points(share: float) -> str:
    """Write a share in points of a hundred.

    >>> points(0.238), points(0.004), points(0.0)
    ('24', '0.4', '0')
    """
    return f"{share * 100:.1f}" if 0.0005 <= abs(share) < 0.0095 else f"{share * 100:.0f}"


def _alone(group: Measured) -> str:
    return (
        f"{group.label} ends at {_percent(group)} accuracy, its classes {_below(group)} on average; "
        f"it forgets {_worst_classes(group)}{_phase(group)}."
    )


def _ranking(ranked: list[Measured]) -> str:
    least, base = ranked[0], reference(ranked)
    against = base if base is not least else ranked[-1]
    return (
        f"{least.label} forgets least: its classes end {_below(least)} "
        f"({against.label}: {points(against.mean['forgetting'])}){_belief(least, against)}, "
        f"{_accuracy_clause(ranked, least)}; "
        f"{against.label} forgets {_worst_classes(against)}{_phase(against)}."
    )


def _below(group: Measured) -> str:
    lost = group.mean["forgetting"]
    return f"{points(lost)} points below their best" if lost > 0 else "at their best"


def _accuracy_clause(groups: list[Measured], least: Measured) -> str:
    ahead = max(groups, key=lambda g: g.mean["final"])
    if ahead is least:
        return f"and it ends most accurate too ({_percent(least)})"
    return f"but {ahead.label} ends more accurate ({_percent(ahead)} against {_percent(least)})"


def _belief(least: Measured, against: Measured) -> str:
    """Count the seeds on which the first forgot less than the second: on the same cohorts, so paired."""
    ours, theirs = ({r.seed: r.summary["forgetting"] for r in g.runs} for g in (least, against))
    shared = ours.keys() & theirs.keys()
    fewer = sum(ours[seed] < theirs[seed] for seed in shared)
    if len(shared) < 2:
        return " with a single seed, which may be chance" if shared else " on other seeds, which may be chance"
    if fewer == len(shared):
        return f" on each of {fewer} seeds"
    return f", though on {fewer} of {len(shared)} seeds only"


def _worst_classes(group: Measured, number: int = 3) -> str:
    lost = group.class_forgetting
    worst = [str(c) for c in np.argsort(-np.nan_to_num(lost, nan=-1.0), kind="stable") if lost[c] > 0][:number]
    if not worst:
        return "no class"
    return f"{'class' if len(worst) == 1 else 'classes'} {join_names(worst)} most"


def _phase(group: Measured) -> str:
    if group.where is None:
        return ""
    local = group.where["local"] >= group.where["aggregation"]
    return ", chiefly in local training" if local else ", chiefly when clients' models are aggregated"


def _runner_up(ranked: list[Measured]) -> list[str]:
    if len(ranked) < 3:
        return []
    first, second = ranked[:2]
    gap = second.mean["forgetting"] - first.mean["forgetting"]
    spread = float(np.nanmax([0.0, first.spread["forgetting"], second.spread["forgetting"]]))
    near = f", closer than the spread over seeds ({points(spread)} points): call it a tie" if gap < spread else ""
    return [f"{first.label} is followed by {second.label}, with {points(second.mean['forgetting'])} points{near}."]


def _places(ranked: list[Measured]) -> list[str]:
    """Say of the reference and of the one that forgets least how much a round loses in which phase."""
    told = []
    for group in {g.label: g for g in (reference(ranked), ranked[0])}.values():
        if group.where is not None:
            told.append(
                f"In a round of {group.label}, training costs a client's model {points(group.where['local'])} points "
                "of what the global model knew of a class, on average, and aggregation loses "
                f"{points(group.where['aggregation'])} points of what a client knew."
            )
    return told or ["Where in a round it is lost was not recorded: eval_local_every=1 does that."]


def _cautions(groups: list[Measured]) -> list[str]:
    told = []
    if all(len(g.runs) == 1 for g in groups):
        told.append("One seed each: a difference may be chance. Repeat with, say, --sweep seed=0,1,2.")
    for words, key in (("Not at its end yet", UNFINISHED), ("Diverged", DIVERGED)):
        if labels := [g.label for g in groups if key in g.setting]:
            told.append(f"{words}: {join_names(labels)}.")
    differing = _beside_the_method([g.setting for g in groups])
    if differing:
        told.append(f"Beside the method, the runs differ in {join_names(differing)}: compare with that in mind.")
    return told


def _beside_the_method(settings: list[dict[str, Any]]) -> list[str]:
    ignored = ("method", UNFINISHED, DIVERGED)
    keys = dict.fromkeys(key for setting in settings for key in setting if key not in ignored)
    return [key for key in keys if any(setting.get(key) != settings[0].get(key) for setting in settings)]


def _percent(group: Measured) -> str:
    mean, spread = group.mean["final"] * 100, group.spread["final"] * 100
    return f"{mean:.1f}%" if np.isnan(spread) else f"{mean:.1f}±{spread:.1f}%"
