"""The result of one problem in sentences: which method forgets least, how accurate it is, where forgetting happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from fedkeep._util.text import clip, format_mean, join_names, short_name
from fedkeep.analysis.compare import Difference, ordered
from fedkeep.analysis.groups import Group
from fedkeep.analysis.sentences import excluded, list_names, nothing_learned, remarks, tied_with_first
from fedkeep.reports.about import MAX_NAME


@dataclass(frozen=True)
class Verdict:
    """The main result in one clause, and sentences with details and warnings."""

    headline: str
    details: list[str]


def verdict(groups: list[Group], tests: Sequence[Difference] = ()) -> Verdict:
    """Return what the runs of one problem show, with warnings about what limits the comparison.

    Groups that are not finished, and groups that never learned anything, are left out of the result. `tests` are those
    of the differences in forgetting.
    """
    finished = [g for g in groups if g.finished]
    if not finished:
        return Verdict(_progress(groups), _warnings(groups))
    if not any(g.learned for g in finished):
        return Verdict(nothing_learned(finished), [*_accuracies(finished), *_warnings(groups)])
    ranked = ordered(groups, "forgetting")
    if not ranked:
        return Verdict("No result yet: forgetting needs at least two evaluated rounds.", _warnings(groups))
    if len(ranked) == 1:
        headline, details = _single_group(ranked[0]), []
    else:
        headline, details = _ranking(ranked), [*_evidence(ranked, tests), _accuracy(ranked), *_runner_up(ranked)]
    details += [*_forgotten_classes(ranked), *_phases(ranked)]
    return Verdict(headline, [*details, *_warnings(groups)])


def reference(groups: list[Group]) -> Group:
    """Return the group that others are compared with: FedAvg if there is one, otherwise the one that forgets most."""
    fedavg = [g for g in groups if g.setting["method"]["name"].lower() == "fedavg"]
    return max(fedavg or groups, key=lambda g: g.mean["forgetting"])


def format_points(share: float, digits: int = 0) -> str:
    """Format a share as percentage points.

    >>> format_points(0.238), format_points(0.004), format_points(0.0)
    ('24', '0.4', '0')
    """
    return f"{share * 100:.1f}" if 0.0005 <= abs(share) < 0.0095 else f"{share * 100:.{digits}f}"


def _in_points(share: float, digits: int = 0) -> str:
    points = format_points(share, digits)
    return f"{points} point{'s' * (points != '1')}"


def _progress(groups: list[Group]) -> str:
    """Return how far runs are of which none is finished."""
    if len(groups) > 1:
        return f"No run is finished, so nothing is compared yet: {list_names([g.title for g in groups], most=3)}"
    [group] = groups
    planned = group.runs[0].planned_rounds
    return f"{group.title} is at {_format_accuracy(group)} accuracy; {planned} rounds were planned"


def _accuracies(groups: list[Group]) -> list[str]:
    low, high = (pick(g.mean["final"] for g in groups) for pick in (min, max))
    return [f"Final accuracy: {low:.1%}." if high - low < 5e-4 else f"Final accuracy: {low:.1%} to {high:.1%}."]


def _single_group(group: Group) -> str:
    return f"{_short(group)} ends at {_format_accuracy(group)} and forgets {_lost(group)}"


def _ranking(ranked: list[Group]) -> str:
    best, other = tied_with_first(ranked, "forgetting"), _opposite(ranked)
    if other is None:
        number = "Both" if len(ranked) == 2 else f"All {len(ranked)} groups"
        return f"{number} forget {_lost(ranked[0])}"
    lost = [best[0].mean["forgetting"], other.mean["forgetting"]]
    digits = 0 if format_points(lost[0]) != format_points(lost[1]) else 1
    names = list_names([_short(g) for g in best], most=3)
    forget = "forgets" if len(best) == 1 else "forget"
    if lost[0] <= 0:
        return f"{names} {forget} nothing, {_short(other)} {_in_points(lost[1], digits)}"
    return f"{names} {forget} {_in_points(lost[0], digits)}, {_short(other)} {format_points(lost[1], digits)}"


def _opposite(ranked: list[Group]) -> Group | None:
    """Return the group that the best are compared with: the reference, or the worst; None if all are equal."""
    best = tied_with_first(ranked, "forgetting")
    if len(best) == len(ranked):
        return None
    base = reference(ranked)
    return base if base not in best else ranked[-1]


def _short(group: Group) -> str:
    """Return a group's title for the headline, which has room for a short one."""
    return clip(group.title, 32)


def _lost(group: Group) -> str:
    lost = group.mean["forgetting"]
    return _in_points(lost) if lost > 0 else "nothing"


def _evidence(ranked: list[Group], tests: Sequence[Difference]) -> list[str]:
    """Return on how many common seeds the first group forgot less, and the test; one seed alone has its own warning."""
    best, other = tied_with_first(ranked, "forgetting"), _opposite(ranked)
    if other is None or len(best) > 1:
        return []
    ours, theirs = ({run.seed: run.summary["forgetting"] for run in g.runs} for g in (best[0], other))
    shared = ours.keys() & theirs.keys()
    if len(shared) < 2:
        return [] if shared else [f"{best[0].title} and {other.title} have no seed in common."]
    fewer = sum(ours[seed] < theirs[seed] for seed in shared)
    text = f"{best[0].title} forgets less than {other.title} on {fewer} of {len(shared)} seeds"
    pair = {best[0].label, other.label}
    test = next((t for t in tests if {t.one, t.other} == pair and t.tested), None)
    if test is None:
        return [f"{text}."]
    number = sum(t.tested for t in tests)
    result = "statistically significant" if test.significant else "not statistically significant"
    p = "p < 0.001" if test.p_corrected < 0.001 else f"p = {test.p_corrected:.2g}"
    return [f"{text}; the difference is {result} ({p}{f', corrected for {number} comparisons' if number > 1 else ''})."]


def _accuracy(ranked: list[Group]) -> str:
    """Return who ends most accurate, next to the group that forgets least and the one it is compared with."""
    order = ordered(ranked, "final")
    best, least, other = tied_with_first(order, "final"), ranked[0], _opposite(ranked)
    if len(best) == len(ranked):
        return f"All end at {_format_accuracy(best[0])} accuracy."
    names = list_names([_short(g) for g in best], most=3)
    also = " also" if best == [least] and other is not None else ""
    has = "has" if len(best) == 1 else "have"
    text = f"{names}{also} {has} the highest final accuracy: {_format_accuracy(best[0])}"
    others = [g for g in dict.fromkeys([least, other]) if g is not None and g not in best]
    return f"{text}, {join_names([f'{_short(g)} {_format_accuracy(g)}' for g in others])}." if others else f"{text}."


def _forgotten_classes(ranked: list[Group]) -> list[str]:
    """Return which classes the reference, or the only group, forgets most, and in which phase."""
    group = ranked[0] if len(ranked) == 1 else reference(ranked)
    lost = group.class_forgetting
    worst = [int(c) for c in np.argsort(-np.nan_to_num(lost, nan=-1.0), kind="stable") if lost[c] > 0][:3]
    if not worst:
        return [f"{group.title} forgets no class."]
    return [f"{group.title} forgets {_class_list(group, worst)} most{_main_phase(group)}."]


def _class_list(group: Group, classes: Sequence[int]) -> str:
    history = group.runs[0].history
    if history.class_names is not None:
        return join_names([short_name(history.class_name(c), MAX_NAME) for c in classes])
    return f"{'class' if len(classes) == 1 else 'classes'} {join_names([str(c) for c in classes])}"


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
    seconds = [g.title for g in tied_with_first(ranked[1:], "forgetting")]
    return [f"{list_names(seconds)} forget{'s' * (len(seconds) == 1)} second least ({points}){close}."]


def _phases(ranked: list[Group]) -> list[str]:
    """Return how much a round loses in each phase, for the reference and for the group that forgets least."""
    parts = []
    for group in {g.label: g for g in (reference(ranked), ranked[0])}.values():
        if (losses := group.loss_by_phase) is not None:
            local, aggregation = _in_points(losses["local"]), format_points(losses["aggregation"])
            parts.append(f"{local} in local training and {aggregation} in aggregation with {group.title}")
    if not parts:
        observed = all(run.identity.observed for group in ranked for run in group.runs)
        option = "local_every=1 of fedkeep.flower.forgetting" if observed else "eval_local_every=1"
        return [f"The phase of a round in which classes are forgotten was not recorded: use {option}."]
    return [f"In a round a class loses {', '.join(parts)}, mean over clients."]


def _privacy(groups: list[Group]) -> list[str]:
    """Return what the differentially private groups have spent."""
    spent = {}
    for group in groups:
        epsilons = [run.history.epsilon for run in group.runs if run.history.epsilon is not None]
        if epsilons:
            delta = group.runs[0].history.about["train"]["dp_delta"]
            spent[group.label] = f"{group.title}: epsilon {max(epsilons):.2f} at delta {delta:g}"
    return [f"Differentially private for each client: {join_names(list(spent.values()))}."] if spent else []


def _warnings(groups: list[Group]) -> list[str]:
    warnings = _privacy(groups)
    if len(groups) > 1 and all(len(g.runs) == 1 for g in groups):
        warnings.append("One seed each: differences may be due to chance. Repeat with, say, --sweep seed=0,1,2.")
    title = attrgetter("title")
    warnings += [*excluded(groups, title), *remarks(groups, title)]
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
