"""The result of a report in sentences: which method forgets least, how accurate it is, and where forgetting happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkeep._util.text import format_mean, join_names
from fedkeep.analysis.groups import Group


@dataclass(frozen=True)
class Verdict:
    """One sentence with the main result, and further sentences with details and warnings."""

    headline: str
    details: list[str]


def verdict(groups: list[Group]) -> Verdict:
    """Return what these runs show, with warnings about what limits the comparison."""
    ranked = sorted((g for g in groups if np.isfinite(g.mean["forgetting"])), key=lambda g: g.mean["forgetting"])
    if not ranked:
        return Verdict("No result yet: forgetting needs at least two evaluated rounds.", _warnings(groups))
    headline = _single_group(ranked[0]) if len(ranked) == 1 else _ranking(ranked)
    return Verdict(headline, [*_runner_up(ranked), *_phase_details(ranked), *_warnings(groups)])


def reference(groups: list[Group]) -> Group:
    """Return the group that others are compared with: FedAvg if there is one, otherwise the one that forgets most."""
    fedavg = [g for g in groups if g.setting["method"]["name"] == "fedavg"]
    return max(fedavg or groups, key=lambda g: g.mean["forgetting"])


def format_points(share: float) -> str:
    """Format a share as percentage points.

    >>> format_points(0.238), format_points(0.004), format_points(0.0)
    ('24', '0.4', '0')
    """
    return f"{share * 100:.1f}" if 0.0005 <= abs(share) < 0.0095 else f"{share * 100:.0f}"


def _single_group(group: Group) -> str:
    return (
        f"{group.label} ends at {_format_accuracy(group)} accuracy, with its classes {_below_best(group)} on average; "
        f"it forgets {_worst_classes(group)}{_main_phase(group)}."
    )


def _ranking(ranked: list[Group]) -> str:
    least, base = ranked[0], reference(ranked)
    other = base if base is not least else ranked[-1]
    return (
        f"{least.label} forgets least: its classes end {_below_best(least)} "
        f"({other.label}: {format_points(other.mean['forgetting'])}; {_seed_count(least, other)}), "
        f"{_accuracy_clause(ranked, least)}; "
        f"{other.label} forgets {_worst_classes(other)}{_main_phase(other)}."
    )


def _below_best(group: Group) -> str:
    lost = group.mean["forgetting"]
    return f"{format_points(lost)} points below their best" if lost > 0 else "at their best"


def _accuracy_clause(groups: list[Group], least: Group) -> str:
    most_accurate = max(groups, key=lambda g: g.mean["final"])
    if most_accurate is least:
        return f"and it also has the highest final accuracy ({_format_accuracy(least)})"
    return (
        f"but {most_accurate.label} has a higher final accuracy "
        f"({_format_accuracy(most_accurate)}, compared with {_format_accuracy(least)})"
    )


def _seed_count(least: Group, other: Group) -> str:
    """Return on how many common seeds the first group forgot less; the same seed means the same cohorts."""
    ours, theirs = ({run.seed: run.summary["forgetting"] for run in g.runs} for g in (least, other))
    shared = ours.keys() & theirs.keys()
    fewer = sum(ours[seed] < theirs[seed] for seed in shared)
    if len(shared) < 2:
        return f"{len(shared)} common seed{'s' * (not shared)}, so this may be chance"
    return f"lower on {fewer} of {len(shared)} seeds"


def _worst_classes(group: Group, number: int = 3) -> str:
    lost = group.class_forgetting
    worst = [str(c) for c in np.argsort(-np.nan_to_num(lost, nan=-1.0), kind="stable") if lost[c] > 0][:number]
    if not worst:
        return "no class"
    return f"{'class' if len(worst) == 1 else 'classes'} {join_names(worst)} most"


def _main_phase(group: Group) -> str:
    losses = group.loss_by_phase
    if losses is None:
        return ""
    return ", mainly in local training" if losses["local"] >= losses["aggregation"] else ", mainly in aggregation"


def _runner_up(ranked: list[Group]) -> list[str]:
    if len(ranked) < 3:
        return []
    first, second = ranked[:2]
    gap = second.mean["forgetting"] - first.mean["forgetting"]
    spread = float(np.nanmax([0.0, first.spread["forgetting"], second.spread["forgetting"]]))
    points = format_points(second.mean["forgetting"])
    tie = f"; the gap is within the spread over seeds ({format_points(spread)} points)" if gap < spread else ""
    return [f"{second.label} forgets second least ({points} points){tie}."]


def _phase_details(ranked: list[Group]) -> list[str]:
    """Return how much a round loses in each phase, for the reference and for the group that forgets least."""
    details = []
    for group in {g.label: g for g in (reference(ranked), ranked[0])}.values():
        if (losses := group.loss_by_phase) is not None:
            details.append(
                f"In a round of {group.label}, a class loses {format_points(losses['local'])} points in local training "
                f"and {format_points(losses['aggregation'])} points in aggregation, on average over clients."
            )
    return details or ["The phase of a round in which classes are forgotten was not recorded: use eval_local_every=1."]


def _privacy(groups: list[Group]) -> list[str]:
    """Return what the differentially private groups have spent."""
    spent = {}
    for group in groups:
        epsilons = [run.history.epsilon for run in group.runs if run.history.epsilon is not None]
        if epsilons:
            delta = group.runs[0].history.about["train"]["dp_delta"]
            spent[group.label] = f"{group.label}: epsilon {max(epsilons):.2f} at delta {delta:g}"
    return [f"Differentially private for each client: {join_names(list(spent.values()))}."] if spent else []


def _warnings(groups: list[Group]) -> list[str]:
    warnings = _privacy(groups)
    if all(len(g.runs) == 1 for g in groups):
        warnings.append("One seed each: differences may be due to chance. Repeat with, say, --sweep seed=0,1,2.")
    for status, name in (("unfinished", "Not finished"), ("diverged", "Diverged")):
        if labels := [g.label for g in groups if g.status == status]:
            warnings.append(f"{name}: {join_names(labels)}.")
    differing = _differing_settings([g.setting for g in groups])
    if differing:
        warnings.append(f"The runs differ not only in the method, but also in: {join_names(differing)}.")
    return warnings


def _differing_settings(settings: list[dict[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for setting in settings for key in setting if key != "method")
    return [key for key in keys if any(setting.get(key) != settings[0].get(key) for setting in settings)]


def _format_accuracy(group: Group) -> str:
    return f"{format_mean(group.mean['final'], group.spread['final'], 1, 100)}%"
