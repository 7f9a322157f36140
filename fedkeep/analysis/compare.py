"""Comparison of groups of runs: ranks, significance tests, and sentences that sum them up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedkeep._util.text import did_you_mean, format_mean, join_names
from fedkeep.analysis.groups import Group, rounds_to
from fedkeep.analysis.significance import MIN_SEEDS, holm, paired_t, sign_flip
from fedkeep.errors import FedkeepError

LEVEL = 0.05
HIGHER_IS_BETTER = {"final": True, "best": True, "smoothed": True, "forgetting": False, "round_forgetting": False}
MEASURE_NAMES = {"final": "final accuracy", "forgetting": "forgetting"}  # the measures that sentences are about


@dataclass(frozen=True)
class Difference:
    """Two groups on one measure, over their common seeds."""

    measure: str
    one: str
    other: str
    seeds: tuple[int, ...]
    mean: float  # one minus other
    p: float  # paired t-test
    p_corrected: float  # the same, corrected for all comparisons on this measure
    p_sign_flip: float

    @property
    def significant(self) -> bool:
        """Whether the difference is statistically significant."""
        return self.p_corrected < LEVEL

    @property
    def tested(self) -> bool:
        """Whether there are enough common seeds for a test."""
        return len(self.seeds) >= MIN_SEEDS

    def as_data(self) -> dict[str, Any]:
        """Return the test as JSON-compatible data."""
        return {**asdict(self), "seeds": list(self.seeds), "told_apart": self.significant}


def ranks(values: Mapping[str, float], higher: bool) -> dict[str, int]:
    """Return who is best (1) and second best (2); equal values share a rank, NaN has none.

    >>> ranks({"a": 0.5, "b": 0.9, "c": 0.7, "d": 0.9}, higher=True)
    {'b': 1, 'd': 1}
    >>> ranks({"a": 0.5, "b": 0.9, "c": 0.7}, higher=False)
    {'a': 1, 'c': 2}
    """
    scores = {name: value if higher else -value for name, value in values.items() if not np.isnan(value)}
    if len(scores) < 2:
        return {}
    rank = {name: 1 + sum(other > score for other in scores.values()) for name, score in scores.items()}
    return {name: rank[name] for name in scores if rank[name] <= 2}


def rank_groups(groups: Mapping[str, Group]) -> dict[str, dict[str, int]]:
    """Return the ranks of the finished groups by measure; the keys are the names to use."""
    finished = {name: group.mean for name, group in groups.items() if group.finished}
    return {
        measure: ranks({name: mean[measure] for name, mean in finished.items()}, higher)
        for measure, higher in HIGHER_IS_BETTER.items()
    }


def ordered(groups: Sequence[Group], measure: str) -> list[Group]:
    """Return the finished groups that have the measure, best first."""
    usable = [g for g in groups if g.finished and not np.isnan(g.mean[measure])]
    return sorted(usable, key=lambda g: -g.mean[measure] if HIGHER_IS_BETTER[measure] else g.mean[measure])


def differences(groups: Sequence[Group], measure: str, against: str | None = None) -> list[Difference]:
    """Test all pairs of groups, or each against one; p-values are corrected for the number of these comparisons.

    All pairs are counted, because which group is best was not known in advance.
    """
    order = ordered(groups, measure)
    if against is None:
        pairs = list(itertools.combinations(order, 2))
    else:
        base = group_named(groups, against)
        pairs = [(g, base) for g in order if g is not base and base in order]
    paired = [_paired(one, other, measure) for one, other in pairs]
    p_values = [paired_t(d) for _, d in paired]
    return [
        Difference(
            measure,
            one.label,
            other.label,
            tuple(seeds),
            float(d.mean()) if len(d) else float("nan"),
            p,
            corrected,
            sign_flip(d),
        )
        for (one, other), (seeds, d), p, corrected in zip(pairs, paired, p_values, holm(p_values), strict=True)
    ]


def group_named(groups: Sequence[Group], name: str) -> Group:
    """Return the group with this label, or the only group of the method with this name."""
    by_label = [g for g in groups if g.label == name]
    by_method = [g for g in groups if g.setting["method"]["name"] == name]
    matches = by_label or (by_method if len(by_method) == 1 else [])
    if not matches:
        labels = [g.label for g in groups]
        raise FedkeepError(
            f"no group is labelled {name!r}: {did_you_mean(name, labels)}", key="against", value=name, valid=labels
        )
    return matches[0]


def comparison_as_data(groups: list[Group], against: str | None = None, target: float | None = None) -> dict[str, Any]:
    """Return the comparison as JSON-compatible data: the groups, the ranks, every test, and the sentences."""
    rows = []
    for g in groups:
        row: dict[str, Any] = {"label": g.label, "setting": g.setting, "seeds": g.seeds, "finished": g.finished}
        row |= {"status": g.status, "last_round": g.last_round, "mean": g.mean, "spread": g.spread}
        if target is not None:
            row["rounds_to"] = {f"{x:g}": rounds for x, rounds in rounds_to(g, target).items()}
        rows.append(row)
    tests = {measure: differences(groups, measure, against) for measure in HIGHER_IS_BETTER}
    return {
        "groups": rows,
        "ranks": rank_groups({g.label: g for g in groups}),
        "tests": [test.as_data() for of_measure in tests.values() for test in of_measure],
        "found": _sentences(groups, against, tests),
    }


def comparison_as_markdown(groups: list[Group]) -> str:
    """Return a Markdown table: accuracies in percent, mean±standard deviation over seeds; **best**, <u>second</u>."""
    places = rank_groups({g.label: g for g in groups})
    marks = {0: ("", ""), 1: ("**", "**"), 2: ("<u>", "</u>")}
    lines = [
        "| method | final | best | smoothed | forgetting | round forgetting | MB | runs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for g in groups:
        cells = []
        for measure, higher in HIGHER_IS_BETTER.items():
            scale, digits = (100, 1) if higher else (1, 3)
            before, after = marks[places[measure].get(g.label, 0)]
            cells.append(f"{before}{format_mean(g.mean[measure], g.spread[measure], digits, scale)}{after}")
        lines.append(f"| {g.label} | {' | '.join(cells)} | {g.mean['bytes'] / 1e6:.1f} | {len(g.runs)} |")
    return "\n".join(lines)


def sentences(groups: Sequence[Group], against: str | None = None) -> list[str]:
    """Return the result of the comparison in sentences."""
    return _sentences(groups, against, {measure: differences(groups, measure, against) for measure in MEASURE_NAMES})


def _sentences(groups: Sequence[Group], against: str | None, tests: Mapping[str, Sequence[Difference]]) -> list[str]:
    excluded = []
    for status, name in (("unfinished", "not finished"), ("diverged", "diverged")):
        if labels := [g.label for g in groups if g.status == status]:
            excluded.append(f"Excluded ({name}): {', '.join(labels)}.")
    results = []
    for measure, name in MEASURE_NAMES.items():
        if not tests[measure]:
            continue
        if against is None:
            results.append(_best_sentence(name, ordered(groups, measure), tests[measure]))
        else:
            results.append(_against_sentence(name, measure, tests[measure], group_named(groups, against)))
    if not results:
        among = "" if against is None else f", one of them {against}"
        return [*excluded, f"Nothing to compare: that needs two finished groups{among}."]
    return [*excluded, *results, *_test_notes([test for measure in MEASURE_NAMES for test in tests[measure]])]


def _paired(one: Group, other: Group, measure: str) -> tuple[list[int], np.ndarray]:
    """Return the common seeds of two groups, and the difference of the measure on each."""
    ours, theirs = ({run.seed: run.summary[measure] for run in g.runs} for g in (one, other))
    seeds = sorted(ours.keys() & theirs.keys())
    return seeds, np.array([ours[s] - theirs[s] for s in seeds])


def _best_sentence(name: str, order: Sequence[Group], tests: Sequence[Difference]) -> str:
    measure = tests[0].measure
    best, second = order[0], order[1]
    name = name if HIGHER_IS_BETTER[measure] else f"least {name}"
    values = [_format_value(measure, g.mean[measure]) for g in (best, second)]
    if best.mean[measure] == second.mean[measure]:
        text = f"{name.capitalize()}: {best.label} and {second.label} are best, both at {values[0]}."
    else:
        text = f"{name.capitalize()}: {best.label} is best ({values[0]}), {second.label} second ({values[1]})."
    of_best = {t.other: t for t in tests if t.one == best.label}
    lead = of_best.pop(second.label)
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
        text += f" {best.label} differs significantly from {join_names(different)}."
    if similar:
        text += f" No significant difference to {join_names(similar)}."
    return text


def _against_sentence(name: str, measure: str, tests: Sequence[Difference], base: Group) -> str:
    parts = []
    for t in tests:
        gap = f"{t.one} {_format_gap(measure, t.mean, signed=True)}"
        if t.tested:
            result = "significant" if t.significant else "not significant"
            parts.append(f"{gap} ({result}, p {_format_p_value(t.p_corrected)})")
        else:
            parts.append(f"{gap} (not tested: {len(t.seeds)} common seeds)")
    value = _format_value(measure, base.mean[measure])
    return f"{name.capitalize()} compared with {base.label} ({value}): {'; '.join(parts)}."


def _test_notes(tests: Sequence[Difference]) -> list[str]:
    """Return which tests were made and what they assume."""
    tested = [t for t in tests if t.tested]
    if not tested:
        return []
    number = len(tested) // len({t.measure for t in tested})
    text = "Tests: paired t-tests over common seeds"
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
