"""The result of a comparison in sentences, for the groups of one problem."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np

from fedkeep._util.text import format_megabytes, format_reached, join_names, short_name
from fedkeep.analysis.compare import (
    EQUAL,
    HIGHER_IS_BETTER,
    MAX_PAIRWISE,
    Difference,
    default_against,
    differences,
    group_named,
    ordered,
)
from fedkeep.analysis.groups import Group, bytes_to
from fedkeep.analysis.significance import MIN_SEEDS

MEASURE_NAMES = {"final": "final accuracy", "forgetting": "forgetting"}  # the measures that sentences are about
MAX_NAMES = 5
_NEVER = 0.01  # the accuracy that a class must reach in some round to count as recognised


def sentences(groups: Sequence[Group], against: str | None = None) -> list[str]:
    """Return the result of the comparison, with what is left out of it and which tests were made."""
    finished = [g for g in groups if g.finished]
    if finished and not any(g.learned for g in finished):
        return [nothing_learned(finished), *excluded(groups)]
    chosen = against is not None
    against = against or default_against(groups)
    results, tests = [], []
    for measure, name in MEASURE_NAMES.items():
        order = ordered(groups, measure)
        of_measure = differences(groups, measure, against)
        if not of_measure:
            continue
        tests += of_measure
        if against is None:
            results.append(_best_sentence(name, order, of_measure))
        else:
            best = "" if chosen else f"{_first_places(name, measure, order)} "
            results.append(best + _against_sentence(name, measure, of_measure, group_named(groups, against)))
    notes = [*excluded(groups), *remarks(groups)]
    if not results:
        among = f", one of them {against}" if chosen else ""
        alone = len(groups) == 1
        return notes if alone else [*notes, f"Nothing to compare: that needs two finished groups{among}."]
    return [*notes, *results, *_test_notes(tests, None if chosen else against)]


def bytes_sentence(groups: Sequence[Group], target: float) -> str:
    """Return what each finished group sends until the target accuracy is first reached, the least first."""
    costs = {g.label: bytes_to(g, target) for g in groups if g.finished}
    medians = {label: statistics.median(math.inf if b is None else b for b in costs[label]) for label in costs}
    reached = [label for label in sorted(costs, key=medians.__getitem__) if math.isfinite(medians[label])]
    parts = [f"{label} {format_reached(costs[label], format_megabytes)}" for label in reached]
    if never := [label for label in costs if label not in reached]:
        parts.append(f"not reached by most runs of {list_names(never)}")
    return f"MB sent until {target:.1%} accuracy is first reached, median over runs: {', '.join(parts)}."


def held_out(groups: Sequence[Group]) -> list[str]:
    """Return the note that the groups of a problem were tested on held-out training examples, if they were."""
    share = groups[0].setting.get("data", {}).get("held_out") if groups else None
    if share is None:
        return []
    return [f"Tested on held-out training examples (data.held_out = {share}), not on the test set."]


def nothing_learned(groups: Sequence[Group]) -> str:
    """Return the verdict on groups whose models never were better than a constant prediction."""
    predicted = {run.only_prediction for g in groups for run in g.runs}
    if len(predicted) == 1 and None not in predicted:
        name = short_name(groups[0].runs[0].history.class_name(predicted.pop() or 0))
        return f"No model learned: all predict {name}. Are the inputs scaled?"
    if None not in predicted:
        return "No model learned: each predicts one class for every example. Are the inputs scaled?"
    return (
        "No model learned: none was ever more accurate than predicting the most frequent class. "
        "Are the inputs scaled, and is the learning rate right?"
    )


def excluded(groups: Sequence[Group], name: Callable[[Group], str] = attrgetter("label")) -> list[str]:
    """Return which groups are left out of the result."""
    lines = []
    for status, reason in (("unfinished", "not finished"), ("diverged", "diverged")):
        if names := [name(g) for g in groups if g.status == status]:
            lines.append(f"Without a verdict, because {reason}: {', '.join(names)}.")
    return lines


def remarks(groups: Sequence[Group], name: Callable[[Group], str] = attrgetter("label")) -> list[str]:
    """Return what a reader should know about the runs: tested on what, stopped early, unverified, unlearned, ..."""
    by_note: dict[str, list[str]] = {}
    for g in groups:
        for note in g.notes:
            by_note.setdefault(note, []).append(name(g))
    lines = [*held_out(groups), *(f"{list_names(names)}: {note}." for note, names in by_note.items())]
    if early := [f"{name(g)} ({_rounds_reached(g)})" for g in groups if g.stopped_early]:
        lines.append(f"Stopped early by a callback: {list_names(early)}.")
    finished = [g for g in groups if g.finished]
    unlearned = [name(g) for g in finished if not g.learned]
    if unlearned and len(unlearned) < len(finished):
        lines.append(f"Learned nothing, so there is nothing to forget: {list_names(unlearned)}.")
    lines += _never_recognised(finished)
    if unverified := [name(g) for g in groups if not all(r.history.verified for r in g.runs)]:
        names = "all runs" if len(unverified) == len(groups) else list_names(unverified)
        lines.append(f"Not verified, because files have no checksums or a checkpoint is damaged: {names}.")
    return lines


def _never_recognised(groups: Sequence[Group]) -> list[str]:
    """Return which classes no run ever recognised: forgetting, which is 0 for them, does not show it."""
    runs = [run for g in groups for run in g.runs]
    if not any(g.learned for g in groups) or len({run.class_accuracy.shape[1] for run in runs}) > 1:
        return []
    best = np.max([run.class_accuracy.max(0) for run in runs], axis=0)  # NaN for a class without test examples
    if not (classes := np.flatnonzero(best < _NEVER).tolist()):
        return []
    names = list_names([short_name(runs[0].history.class_name(c)) for c in classes], most=3)
    share = "0%" if best[classes].max() == 0 else f"below {_NEVER:.0%}"
    return [f"Never recognised ({share} in every round{' of all runs' * (len(runs) > 1)}): {names}."]


def list_names(names: Sequence[str], most: int = MAX_NAMES) -> str:
    """List names as in a sentence; of many, the first few and the number of the others.

    >>> list_names(["a", "b"]), list_names(["a", "b", "c", "d"], most=2)
    ('a and b', 'a, b and 2 others')
    """
    if len(names) <= most + 1:
        return join_names(names)
    return join_names([*names[:most], f"{len(names) - most} others"])


def _rounds_reached(group: Group) -> str:
    reached = sorted({run.last_round for run in group.runs})
    span = f"round {reached[0]}" if len(reached) == 1 else f"rounds {reached[0]} to {reached[-1]}"
    return f"{span} of {group.runs[0].planned_rounds}"


def tied_with_first(order: Sequence[Group], measure: str) -> list[Group]:
    """Return the groups whose mean equals that of the first."""
    return [g for g in order if abs(g.mean[measure] - order[0].mean[measure]) <= EQUAL]


def _first_places(name: str, measure: str, order: Sequence[Group]) -> str:
    """Return who is best and who is second; ties are named as ties."""
    name = (name if HIGHER_IS_BETTER[measure] else f"least {name}").capitalize()
    best = tied_with_first(order, measure)
    value = _format_value(measure, best[0].mean[measure])
    if len(best) == len(order):
        all_of_them = "both" if len(order) == 2 else f"all {len(order)} groups"
        return f"{name}: {all_of_them} are equal, at {value}."
    rest = order[len(best) :]
    second = tied_with_first(rest, measure)
    its_value = _format_value(measure, second[0].mean[measure])
    next_best = f"{list_names([g.label for g in second])} second ({its_value})"
    if len(best) > 1:
        return f"{name}: {len(best)} groups are best and equal, at {value}: {list_names([g.label for g in best])}."
    return f"{name}: {best[0].label} is best ({value}), {next_best}."


def _best_sentence(name: str, order: Sequence[Group], tests: Sequence[Difference]) -> str:
    """Return who is best, and from which groups the best differs significantly."""
    measure = tests[0].measure
    text = _first_places(name, measure, order)
    best = tied_with_first(order, measure)
    if len(best) > 1:
        return text
    of_best = {t.other: t for t in tests if t.one == best[0].label}
    lead = of_best.pop(order[1].label)
    if not lead.tested:
        seeds = "1 seed" if len(lead.seeds) == 1 else f"{len(lead.seeds)} seeds"
        return f"{text} They have {seeds} in common; a test needs at least {MIN_SEEDS}."
    result = "is" if lead.significant else "is not"
    text += (
        f" The difference of {_format_gap(measure, lead.mean)} {result} statistically significant ({_format_p(lead)})."
    )
    different = [t.other for t in of_best.values() if t.significant]
    similar = [t.other for t in of_best.values() if not t.significant]
    if different:
        text += f" {best[0].label} differs significantly from {join_names(different)}."
    if similar:
        text += f" No significant difference to {join_names(similar)}."
    return text


def _against_sentence(name: str, measure: str, tests: Sequence[Difference], base: Group) -> str:
    equal = [t for t in tests if abs(t.mean) <= EQUAL]
    parts = []
    for t in (t for t in tests if t not in equal):
        gap = f"{t.one} {_format_gap(measure, t.mean, signed=True)}"
        if t.tested:
            result = "significant" if t.significant else "not significant"
            parts.append(f"{gap} ({result}, p {_format_p_value(t.p_corrected)})")
        else:
            parts.append(f"{gap} (not tested: {len(t.seeds)} common seeds)")
    if equal:
        parts.append(f"{list_names([t.one for t in equal])} equal")
    value = _format_value(measure, base.mean[measure])
    return f"{name.capitalize()} compared with {base.label} ({value}): {'; '.join(parts)}."


def _test_notes(tests: Sequence[Difference], base: str | None) -> list[str]:
    """Return which tests were made and what they assume."""
    tested = [t for t in tests if t.tested]
    if not tested:
        return []
    number = len(tested) // len({t.measure for t in tested})
    text = "Tests: paired t-tests over common seeds"
    if base is not None:
        text += f", against {base} (of more than {MAX_PAIRWISE} groups, not all pairs are tested; --against chooses)"
    if number > 1:
        text += f", corrected for {number} comparisons per measure (Holm)"
    fewest = min(len(t.seeds) for t in tested)
    if fewest < 6:
        text += (
            "; they assume normally distributed differences. The sign-flip test, which assumes only symmetric "
            f"differences, cannot reach a p-value below {2 / 2**fewest:g} with {fewest} seeds: use six or more seeds"
        )
    return [f"{text}."]


def _format_p(t: Difference) -> str:
    p, p_sign_flip = _format_p_value(t.p_corrected), _format_p_value(t.p_sign_flip)
    return f"{len(t.seeds)} seeds, p {p}; sign-flip test p {p_sign_flip}"


def _format_p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.2g}"


def _format_value(measure: str, value: float) -> str:
    return f"{value:.1%}" if HIGHER_IS_BETTER[measure] else f"{value:.3f}"


def _format_gap(measure: str, value: float, signed: bool = False) -> str:
    sign = "+" if signed else ""
    value = value if signed else abs(value)
    return f"{100 * value:{sign}.1f} points" if HIGHER_IS_BETTER[measure] else f"{value:{sign}.3f}"
