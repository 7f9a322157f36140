"""The result of one problem in sentences: which method forgets least, how accurate it is, where forgetting happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep._util.text import clip, format_mean, join_names
from fedkeep.analysis.compare import ordered
from fedkeep.analysis.groups import Group
from fedkeep.analysis.sentences import excluded, list_names, nothing_learned, remarks, tied_with_first


@dataclass(frozen=True)
class Verdict:
    """One sentence with the main result, and further sentences with details and warnings."""

    headline: str
    details: list[str]


def verdict(groups: list[Group]) -> Verdict:
    """Return what the runs of one problem show, with warnings about what limits the comparison.

    Groups that are not finished, and groups that never learned anything, are left out of the result.
    """
    finished = [g for g in groups if g.finished]
    if not finished:
        return Verdict(_progress(groups), _warnings(groups))
    if not any(g.learned for g in finished):
        return Verdict(nothing_learned(finished), [*_accuracies(finished), *_warnings(groups)])
    ranked = ordered(groups, "forgetting")
    if not ranked:
        return Verdict("No result yet: forgetting needs at least two evaluated rounds.", _warnings(groups))
    headline = _single_group(ranked[0]) if len(ranked) == 1 else _ranking(ranked)
    details = [*_runner_up(ranked), *_forgotten_classes(ranked), *_phase_details(ranked)]
    return Verdict(headline, [*details, *_warnings(groups)])


def reference(groups: list[Group]) -> Group:
    """Return the group that others are compared with: FedAvg if there is one, otherwise the one that forgets most."""
    fedavg = [g for g in groups if g.setting["method"]["name"].lower() == "fedavg"]
    return max(fedavg or groups, key=lambda g: g.mean["forgetting"])


def format_points(share: float) -> str:
    """Format a share as percentage points.

    >>> format_points(0.238), format_points(0.004), format_points(0.0)
    ('24', '0.4', '0')
    """
    return f"{share * 100:.1f}" if 0.0005 <= abs(share) < 0.0095 else f"{share * 100:.0f}"


def _in_points(share: float) -> str:
    points = format_points(share)
    return f"{points} point{'s' * (points != '1')}"


def _progress(groups: list[Group]) -> str:
    """Return how far runs are of which none is finished."""
    if len(groups) > 1:
        return f"No run is finished, so nothing is compared yet: {list_names([g.label for g in groups], most=3)}."
    [group] = groups
    planned = group.runs[0].planned_rounds
    return f"{group.label} is at {_format_accuracy(group)} accuracy; {planned} rounds were planned."


def _accuracies(groups: list[Group]) -> list[str]:
    low, high = (pick(g.mean["final"] for g in groups) for pick in (min, max))
    return [f"Final accuracy: {low:.1%}." if high - low < 5e-4 else f"Final accuracy: {low:.1%} to {high:.1%}."]


def _single_group(group: Group) -> str:
    accuracy = _format_accuracy(group)
    return f"{group.label} ends at {accuracy} accuracy, with its classes {_below_best(group)} on average."


def _ranking(ranked: list[Group]) -> str:
    best = tied_with_first(ranked, "forgetting")
    if len(best) == len(ranked):
        return _all_equal(ranked)
    least, base = best[0], reference(ranked)
    other = base if base not in best else ranked[-1]
    points = f"{_short(other)}: {format_points(other.mean['forgetting'])}"
    if len(best) > 1:
        names = list_names([_short(g) for g in best], most=3)
        return f"{names} forget least, and equally: their classes end {_below_best(least)} ({points})."
    return (
        f"{_short(least)} forgets least: its classes end {_below_best(least)} ({points}; {_seed_count(least, other)}), "
        f"{_accuracy_clause(ranked, least)}."
    )


def _all_equal(ranked: list[Group]) -> str:
    number = "Both" if len(ranked) == 2 else f"All {len(ranked)} groups"
    text = f"{number} forget equally: their classes end {_below_best(ranked[0])}"
    best = tied_with_first(by_accuracy := ordered(ranked, "final"), "final")
    if len(best) == len(ranked):
        return f"{text}, and they are equally accurate ({_format_accuracy(ranked[0])})."
    names = list_names([_short(g) for g in best], most=3)
    has = "has" if len(best) == 1 else "have"
    return f"{text}; {names} {has} the highest final accuracy ({_format_accuracy(by_accuracy[0])})."


def _short(group: Group) -> str:
    """Return a group's label for the headline, which has room for a short one."""
    return clip(group.label, 32)


def _below_best(group: Group) -> str:
    lost = group.mean["forgetting"]
    return f"{_in_points(lost)} below their best" if lost > 0 else "at their best"


def _accuracy_clause(groups: list[Group], least: Group) -> str:
    best = tied_with_first(ordered(groups, "final"), "final")
    if least in best:
        others = [_short(g) for g in best if g is not least]
        shared = f", as {'has' if len(others) == 1 else 'have'} {list_names(others, most=2)}" if others else ""
        return f"and it also has the highest final accuracy ({_format_accuracy(least)}{shared})"
    names = list_names([_short(g) for g in best], most=2)
    return (
        f"but {names} {'has' if len(best) == 1 else 'have'} a higher final accuracy "
        f"({_format_accuracy(best[0])}, compared with {_format_accuracy(least)})"
    )


def _seed_count(least: Group, other: Group) -> str:
    """Return on how many common seeds the first group forgot less; the same seed means the same cohorts."""
    ours, theirs = ({run.seed: run.summary["forgetting"] for run in g.runs} for g in (least, other))
    shared = ours.keys() & theirs.keys()
    fewer = sum(ours[seed] < theirs[seed] for seed in shared)
    if len(shared) < 2:
        return f"{len(shared)} common seed{'s' * (not shared)}, so this may be chance"
    return f"lower on {fewer} of {len(shared)} seeds"


def _forgotten_classes(ranked: list[Group]) -> list[str]:
    """Return which classes the reference, or the only group, forgets most, and in which phase."""
    group = ranked[0] if len(ranked) == 1 else reference(ranked)
    lost = group.class_forgetting
    worst = [str(c) for c in np.argsort(-np.nan_to_num(lost, nan=-1.0), kind="stable") if lost[c] > 0][:3]
    if not worst:
        return [f"{group.label} forgets no class."]
    classes = f"{'class' if len(worst) == 1 else 'classes'} {join_names(worst)}"
    return [f"{group.label} forgets {classes} most{_main_phase(group)}."]


def _main_phase(group: Group) -> str:
    losses = group.loss_by_phase
    if losses is None:
        return ""
    return ", mainly in local training" if losses["local"] >= losses["aggregation"] else ", mainly in aggregation"


def _runner_up(ranked: list[Group]) -> list[str]:
    best = tied_with_first(ranked, "forgetting")
    if len(ranked) < 3 or len(best) > 1:
        return []
    first, second = ranked[:2]
    gap = second.mean["forgetting"] - first.mean["forgetting"]
    spread = float(np.nanmax([0.0, first.spread["forgetting"], second.spread["forgetting"]]))
    points = _in_points(second.mean["forgetting"])
    close = f"; the gap is within the spread over seeds ({_in_points(spread)})" if gap < spread else ""
    seconds = [g.label for g in tied_with_first(ranked[1:], "forgetting")]
    return [f"{list_names(seconds)} forget{'s' * (len(seconds) == 1)} second least ({points}){close}."]


def _phase_details(ranked: list[Group]) -> list[str]:
    """Return how much a round loses in each phase, for the reference and for the group that forgets least."""
    details = []
    for group in {g.label: g for g in (reference(ranked), ranked[0])}.values():
        if (losses := group.loss_by_phase) is not None:
            details.append(
                f"In a round of {group.label}, a class loses {_in_points(losses['local'])} in local training "
                f"and {_in_points(losses['aggregation'])} in aggregation, on average over clients."
            )
    observed = all(run.identity.observed for group in ranked for run in group.runs)
    option = "local_every=1 of fedkeep.flower.forgetting" if observed else "eval_local_every=1"
    return details or [f"The phase of a round in which classes are forgotten was not recorded: use {option}."]


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
    if len(groups) > 1 and all(len(g.runs) == 1 for g in groups):
        warnings.append("One seed each: differences may be due to chance. Repeat with, say, --sweep seed=0,1,2.")
    warnings += [*excluded(groups), *remarks(groups)]
    if differing := _differing_settings(groups):
        warnings.append(f"The runs differ not only in the method, but also in: {join_names(differing)}.")
    return warnings


def _differing_settings(groups: Sequence[Group]) -> list[str]:
    """Return the tables in which groups differ: the method's own apart, and the names that the user gave."""
    settings = [g.setting for g in groups]
    keys = dict.fromkeys(key for setting in settings for key in setting if key not in ("method", "label"))
    return [key for key in keys if any(setting.get(key) != settings[0].get(key) for setting in settings)]


def _format_accuracy(group: Group) -> str:
    return f"{format_mean(group.mean['final'], group.spread['final'], 1, 100)}%"
