"""Comparison of the groups of one problem: ranks and significance tests, as data and as a Markdown table."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedkeep._util.text import did_you_mean, format_megabytes, format_reached, printable
from fedkeep.analysis.groups import Group, bytes_to, rounds_to
from fedkeep.analysis.measures import format_measure, heading
from fedkeep.analysis.personal import Measured, measured_groups, personal_columns
from fedkeep.analysis.significance import MIN_SEEDS, holm, paired_t, sign_flip
from fedkeep.errors import FedkeepError

LEVEL = 0.05
EQUAL = 1e-9  # means closer than this are equal: they differ by rounding only
MAX_PAIRWISE = 5  # of more groups, each is tested against one, not against every other
HIGHER_IS_BETTER = {"final": True, "best": True, "smoothed": True, "forgetting": False, "round_forgetting": False}
_OTHER_METRICS = {  # that comparisons show only if they are chosen
    **dict.fromkeys(("accuracy", "balanced_accuracy", "macro_precision", "macro_f1", "auc"), True),
    **dict.fromkeys(("precision", "recall", "f1", "class_auc"), True),
    **dict.fromkeys(("ece", "bytes", "seconds"), False),
}


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
        return {**asdict(self), "seeds": list(self.seeds), "significant": self.significant}


def ranks(values: Mapping[str, float], higher: bool) -> dict[str, int]:
    """Return who is best (1) and second best (2); equal values share a rank. NaN has none; nor if all are equal.

    >>> ranks({"a": 0.5, "b": 0.9, "c": 0.7, "d": 0.9}, higher=True)
    {'b': 1, 'd': 1}
    >>> ranks({"a": 0.5, "b": 0.9, "c": 0.7}, higher=False)
    {'a': 1, 'c': 2}
    >>> ranks({"a": 0.5, "b": 0.5}, higher=True)
    {}
    """
    scores = {name: value if higher else -value for name, value in values.items() if not np.isnan(value)}
    if len(scores) < 2:
        return {}
    rank = {name: 1 + sum(other > score + EQUAL for other in scores.values()) for name, score in scores.items()}
    return {name: rank[name] for name in scores if rank[name] <= 2 and len(set(rank.values())) > 1}


def rank_groups(groups: Mapping[str, Group]) -> dict[str, dict[str, int]]:
    """Return the ranks of the finished groups by measure; the keys are the names to use. Without learning, no ranks."""
    if not any(g.learned for g in groups.values() if g.finished):
        return {measure: {} for measure in HIGHER_IS_BETTER}
    return {
        measure: ranks({n: g.mean[measure] for n, g in groups.items() if _is_comparable(g, measure)}, higher)
        for measure, higher in HIGHER_IS_BETTER.items()
    }


def is_higher_better(metric: str) -> bool | None:
    """Return whether more of a metric is better; None for one of the user's own.

    >>> is_higher_better("macro_f1"), is_higher_better("ece"), is_higher_better("mine")
    (True, False, None)
    """
    return {**_OTHER_METRICS, **HIGHER_IS_BETTER}.get(metric)


def ordered(groups: Sequence[Group], measure: str) -> list[Group]:
    """Return the finished groups that have the measure, best first."""
    usable = [g for g in groups if _is_comparable(g, measure)]
    return sorted(usable, key=lambda g: -g.mean[measure] if HIGHER_IS_BETTER[measure] else g.mean[measure])


def _is_comparable(group: Group, measure: str) -> bool:
    """Return whether a group can be ranked by a measure; what was never learned cannot be forgotten."""
    learned = HIGHER_IS_BETTER[measure] or group.learned
    return group.finished and learned and not np.isnan(group.mean[measure])


def baseline(groups: Sequence[Group]) -> Group | None:
    """Return the group that others are tested against by default: FedAvg, otherwise the first by name.

    It must not depend on the results. None if no group is finished.
    """
    finished = sorted((g for g in groups if g.finished), key=lambda g: g.label)
    fedavg = [g for g in finished if g.setting.get("method", {}).get("name", "").lower() == "fedavg"]
    return max(fedavg, key=lambda g: len(g.runs)) if fedavg else next(iter(finished), None)


def default_against(groups: Sequence[Group]) -> str | None:
    """Return the label of the baseline if there are too many groups to test all pairs."""
    base = baseline(groups) if sum(g.finished for g in groups) > MAX_PAIRWISE else None
    return base.label if base else None


def most_accurate_first(groups: Sequence[Group]) -> list[Group]:
    """Return the groups in the order of a table: by final accuracy, those that are not ranked at the end."""
    order = ordered(groups, "final")
    return [*order, *(g for g in groups if g not in order)]


def default_target(groups: Sequence[Group]) -> float | None:
    """Return the accuracy at which costs are compared by default: the baseline's final one, mean over seeds.

    None if there is nothing to compare, or the baseline learned nothing.
    """
    base = baseline(groups) if sum(g.finished for g in groups) > 1 else None
    return base.mean["final"] if base is not None and base.learned else None


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
    """Return the comparison of one problem as JSON-compatible data: the groups, the ranks, and every test.

    `bytes_to` is for the target accuracy or the default one; `rounds_to` only for a given target.
    """
    rows, common = [], default_target(groups) if target is None else target
    for g in groups:
        row: dict[str, Any] = {"label": g.label, "setting": g.setting, "seeds": g.seeds, "finished": g.finished}
        row |= {"status": g.status, "last_round": g.last_round, "mean": g.mean, "spread": g.spread}
        row |= {"learned": g.learned, "notes": g.notes, "runs": [printable(run.name) for run in g.runs]}
        if target is not None:
            row["rounds_to"] = {f"{x:g}": rounds for x, rounds in rounds_to(g, target).items()}
        if common is not None:
            row["bytes_to"] = bytes_to(g, common)
        rows.append(row)
    against = against or default_against(groups)
    personal = [measured.as_data() for measured in measured_groups(groups)]
    tests = {measure: differences(groups, measure, against) for measure in HIGHER_IS_BETTER}
    return {
        "groups": rows,
        "ranks": rank_groups({g.label: g for g in groups}),
        "against": against,
        "target": common,
        "personal": personal,
        "tests": [test.as_data() for of_measure in tests.values() for test in of_measure],
    }


def comparison_as_markdown(groups: list[Group], target: float | None = None) -> str:
    """Return a Markdown table: accuracies in percent, mean±standard deviation over seeds; **best**, <u>second</u>.

    The last column but one has the bytes until the target accuracy, or the default one, is reached.
    """
    target = default_target(groups) if target is None else target
    to_target = "" if target is None else f" MB to {target:.1%} |"
    places = rank_groups({g.label: g for g in groups})
    marks = {0: ("", ""), 1: ("**", "**"), 2: ("<u>", "</u>")}
    heads = " | ".join(heading(measure) for measure in (*HIGHER_IS_BETTER, "bytes"))
    lines = [f"| method | {heads} |{to_target} runs |", f"|---|---|---|---|---|---|---|---|{'---|' * bool(to_target)}"]
    for g in groups:
        cells = []
        for measure in HIGHER_IS_BETTER:
            before, after = marks[places[measure].get(g.label, 0)]
            cells.append(f"{before}{format_measure(measure, g.mean[measure], g.spread[measure])}{after}")
        name = markdown_text(g.label)
        cells.append(format_measure("bytes", g.mean["bytes"]))
        if target is not None:
            cells.append(format_reached(bytes_to(g, target), format_megabytes))
        lines.append(f"| {name} | {' | '.join(cells)} | {len(g.runs)} |")
    return "\n\n".join(["\n".join(lines), *map(_personal_as_markdown, measured_groups(groups))])


def _personal_as_markdown(measured: Measured) -> str:
    columns = personal_columns(measured)
    lines = [f"| method | model | {' | '.join(columns.values())} |", "|---|---" + "|---" * len(columns) + "|"]
    for row in measured.rows:
        lines.append(f"| {markdown_text(row.label)} | {row.model_text} | {' | '.join(row.cells(columns))} |")
    return f"{measured.title}; {measured.caption}.\n\n" + "\n".join(lines)


def _paired(one: Group, other: Group, measure: str) -> tuple[list[int], np.ndarray]:
    """Return the common seeds of two groups, and the difference of the measure on each."""
    ours, theirs = ({run.seed: run.summary[measure] for run in g.runs} for g in (one, other))
    seeds = sorted(ours.keys() & theirs.keys())
    return seeds, np.array([ours[s] - theirs[s] for s in seeds])


def markdown_text(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
