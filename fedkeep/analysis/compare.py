"""What a comparison found: who is best, who is second, whether the difference is more than chance, in words."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedkeep._util.text import did_you_mean, join_names
from fedkeep.analysis.groups import Group, rounds_to
from fedkeep.analysis.significance import FEWEST, holm, paired_t, sign_flip
from fedkeep.errors import FedkeepError

LEVEL = 0.05
HIGHER_IS_BETTER = {"final": True, "best": True, "smoothed": True, "forgetting": False, "round_forgetting": False}
MEASURE_NAMES = {"final": "final accuracy", "forgetting": "forgetting"}  # the measures that are put into words


@dataclass(frozen=True)
class Difference:
    """Two groups on one measure, over the seeds that both were run with."""

    measure: str
    one: str
    other: str
    seeds: tuple[int, ...]
    mean: float  # one minus other
    p: float  # paired t-test
    p_corrected: float  # the same, corrected for all comparisons on this measure
    p_sign_flip: float

    @property
    def told_apart(self) -> bool:
        """Whether the difference is more than chance."""
        return self.p_corrected < LEVEL


def ranks(values: Mapping[str, float], higher: bool) -> dict[str, int]:
    """Say who is best (1) and second best (2); equals share their place, and what is not a number has none.

    >>> ranks({"a": 0.5, "b": 0.9, "c": 0.7, "d": 0.9}, higher=True)
    {'b': 1, 'd': 1}
    >>> ranks({"a": 0.5, "b": 0.9, "c": 0.7}, higher=False)
    {'a': 1, 'c': 2}
    """
    known = {name: value if higher else -value for name, value in values.items() if not np.isnan(value)}
    if len(known) < 2:
        return {}
    place = {name: 1 + sum(other > value for other in known.values()) for name, value in known.items()}
    return {name: place[name] for name in known if place[name] <= 2}


def ranked(groups: Sequence[Group], measure: str) -> list[Group]:
    """Order groups by a measure, best first; those that have not come to their end, or lack it, are left out."""
    means = {g.label: g.mean()[measure] for g in groups if g.finished}
    known = [g for g in groups if g.label in means and not np.isnan(means[g.label])]
    return sorted(known, key=lambda g: -means[g.label] if HIGHER_IS_BETTER[measure] else means[g.label])


def differences(groups: Sequence[Group], measure: str, against: str | None = None) -> list[Difference]:
    """Test all pairs of groups, or each against one; p-values are corrected for the number of these comparisons.

    All pairs, because which one is best was not known before looking.
    """
    order = ranked(groups, measure)
    if against is None:
        pairs = list(itertools.combinations(order, 2))
    else:
        base = group_named(groups, against)
        pairs = [(g, base) for g in order if g is not base and base in order]
    raw = [_paired(one, other, measure) for one, other in pairs]
    p_values = [paired_t(d) for _, d in raw]
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
        for (one, other), (seeds, d), p, corrected in zip(pairs, raw, p_values, holm(p_values), strict=True)
    ]


def group_named(groups: Sequence[Group], name: str) -> Group:
    """Return the group of this label, or of this method where it has but one."""
    of_method = [g for g in groups if g.setting["method"]["name"] == name]
    found = [g for g in groups if g.label == name] or (of_method if len(of_method) == 1 else [])
    if not found:
        raise FedkeepError(f"no group is labelled {name!r}: {did_you_mean(name, [g.label for g in groups])}")
    return found[0]


def sentences(groups: Sequence[Group], against: str | None = None) -> list[str]:
    """Say in sentences what a comparison found."""
    unfinished = [g.label for g in groups if not g.finished]
    left_out = [f"Left out of what follows, because not at its end: {'; '.join(unfinished)}."] if unfinished else []
    said = []
    for measure, name in MEASURE_NAMES.items():
        order = ranked(groups, measure)
        if len(order) < 2:
            continue
        tests = differences(groups, measure, against)
        said.append(
            _against(name, measure, tests, group_named(groups, against)) if against else _best(name, order, tests)
        )
    if not said:
        few = "Nothing has come to its end" if len(unfinished) == len(groups) else "There is one setting only"
        return [*left_out, f"{few}: nothing to compare."]
    return [*left_out, *said, *_about_the_tests(groups, against)]


def tests_as_data(tests: Sequence[Difference]) -> list[dict[str, Any]]:
    """Return the tests as plain data."""
    return [{**asdict(t), "seeds": list(t.seeds), "told_apart": t.told_apart} for t in tests]


def _paired(one: Group, other: Group, measure: str) -> tuple[list[int], np.ndarray]:
    ours, theirs = (dict(zip(g.seeds, (s[measure] for s in g.summaries()), strict=True)) for g in (one, other))
    seeds = sorted(ours.keys() & theirs.keys())
    return seeds, np.array([ours[s] - theirs[s] for s in seeds])


def _best(name: str, order: Sequence[Group], tests: Sequence[Difference]) -> str:
    measure = tests[0].measure
    best, second = order[0], order[1]
    name = name if HIGHER_IS_BETTER[measure] else f"least {name}"
    values = [_value(measure, g.mean()[measure]) for g in (best, second)]
    if best.mean()[measure] == second.mean()[measure]:
        start = f"{name.capitalize()}: {best.label} and {second.label} are best, both at {values[0]}."
    else:
        start = f"{name.capitalize()}: {best.label} is best ({values[0]}), {second.label} second ({values[1]})."
    mine = {t.other: t for t in tests if t.one == best.label}
    lead = mine[second.label]
    if len(lead.seeds) < FEWEST:
        return f"{start} {_untested(lead)}"
    verdict = "is more than chance" if lead.told_apart else "cannot be told from chance"
    said = f"{start} The difference between them, {_gap(measure, lead.mean)}, {verdict} ({_p(lead)})."
    apart = [t.other for t in mine.values() if t.told_apart and t is not lead]
    alike = [t.other for t in mine.values() if not t.told_apart and t is not lead]
    if apart:
        said += f" {best.label} is told apart from {join_names(apart)}" + (" too." if lead.told_apart else ".")
    if alike:
        said += f" It cannot be told from {join_names(alike)}" + ("." if lead.told_apart else " either.")
    return said


def _against(name: str, measure: str, tests: Sequence[Difference], base: Group) -> str:
    value = _value(measure, base.mean()[measure])
    told = []
    for t in tests:
        if len(t.seeds) < FEWEST:
            told.append(f"{t.one} {_gap(measure, t.mean, signed=True)} (not tested: {len(t.seeds)} common seeds)")
        else:
            verdict = "more than chance" if t.told_apart else "perhaps chance"
            told.append(f"{t.one} {_gap(measure, t.mean, signed=True)} ({verdict}, p = {_round(t.p_corrected)})")
    return f"{name.capitalize()}, against {base.label} ({value}): {'; '.join(told)}."


def _about_the_tests(groups: Sequence[Group], against: str | None) -> list[str]:
    tests = [t for measure in MEASURE_NAMES for t in differences(groups, measure, against)]
    tested = [t for t in tests if len(t.seeds) >= FEWEST]
    if not tested:
        return []
    said = f"Tested: paired t-tests over common seeds, corrected for {len(tested) // len({t.measure for t in tested})}"
    said += " comparisons a measure (Holm)" if len(tested) > len(MEASURE_NAMES) else " comparison a measure"
    fewest = min(len(t.seeds) for t in tested)
    if fewest < 6:
        said += (
            f"; they assume normally distributed differences. The sign-flip test, which assumes nothing, cannot go "
            f"below p = {2 / 2**fewest:g} with {fewest} seeds: run six or more to use it"
        )
    return [said + "."]


def _untested(t: Difference) -> str:
    common = {0: "no seed", 1: "one seed"}.get(len(t.seeds), f"{len(t.seeds)} seeds")
    return f"They have {common} in common: with fewer than {FEWEST} nothing can be tested."


def _p(t: Difference) -> str:
    return f"{len(t.seeds)} seeds, p = {_round(t.p_corrected)}; sign-flip test p = {_round(t.p_sign_flip)}"


def _value(measure: str, value: float) -> str:
    return f"{value:.1%}" if HIGHER_IS_BETTER[measure] else f"{value:.3f}"


def _gap(measure: str, value: float, signed: bool = False) -> str:
    sign = "+" if signed else ""
    value = value if signed else abs(value)
    return f"{100 * value:{sign}.1f} points" if HIGHER_IS_BETTER[measure] else f"{value:{sign}.3f}"


def _round(p: float) -> str:
    return "below 0.001" if p < 0.001 else f"{p:.2g}"


def comparison_as_data(groups: list[Group], against: str | None = None, target: float | None = None) -> dict[str, Any]:
    """Return the comparison as plain data: the groups, every test, and what it found in words."""
    from fedkeep.analysis import compare

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
            key: compare.ranks({label: mean[key] for label, mean in means.items()}, higher)
            for key, higher in compare.HIGHER_IS_BETTER.items()
        },
        "tests": [
            t
            for key in compare.HIGHER_IS_BETTER
            for t in compare.tests_as_data(compare.differences(groups, key, against))
        ],
        "found": compare.sentences(groups, against),
    }


def comparison_as_markdown(groups: list[Group]) -> str:
    """Write the table in Markdown: accuracies in percent, mean±standard deviation over seeds; **best**, <u>next</u>."""
    from fedkeep.analysis.compare import HIGHER_IS_BETTER, ranks

    places = {
        key: ranks({g.label: g.mean()[key] for g in groups if g.finished}, up) for key, up in HIGHER_IS_BETTER.items()
    }
    around = {0: ("", ""), 1: ("**", "**"), 2: ("<u>", "</u>")}
    lines = [
        "| method | final | best | smoothed | forgetting | round forgetting | MB | runs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for g in groups:
        mean, spread = g.mean(), g.spread()
        several = len(g.histories) > 1

        cells = []
        for key, higher in HIGHER_IS_BETTER.items():
            scale, digits = (100, 1) if higher else (1, 3)
            number = f"{mean[key] * scale:.{digits}f}" + (f"±{spread[key] * scale:.{digits}f}" if several else "")
            before, after = around[places[key].get(g.label, 0)]
            cells.append(f"{before}{number}{after}")
        lines.append(f"| {g.label} | {' | '.join(cells)} | {mean['bytes'] / 1e6:.1f} | {len(g.histories)} |")
    return "\n".join(lines)
