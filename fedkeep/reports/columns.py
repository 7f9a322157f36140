"""The columns of the page's table: heading, meaning, and a cell for each group, to be shown, sorted and copied."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkeep._util.text import clip, format_megabytes, format_reached, printable
from fedkeep.analysis.compare import Difference, default_target, is_higher_better, rank_groups
from fedkeep.analysis.groups import Group, bytes_to
from fedkeep.analysis.measures import format_measure, heading
from fedkeep.analysis.metric_columns import format_cell, site_values
from fedkeep.errors import FedkeepError

MAX_SITES = 12  # that fit next to each other
NONE = "\N{EN DASH}"  # no value
Cell = dict[str, Any]  # text, value (to sort and export), spread (or None), best


@dataclass(frozen=True)
class Column:
    """A measure of `Group.mean` as a column."""

    key: str
    note: str = ""  # what it means, for the sentence above the table
    spread: bool = True
    named: str = ""  # its heading, if that is not the usual one

    @property
    def head(self) -> str:
        """The heading of the column."""
        return self.named or heading(self.key)


SUMMARY = (
    Column("final", "accuracy in the last round"),
    Column("best", "in the best round"),
    Column("smoothed", "moving average"),
    Column("forgetting", "best earlier minus final accuracy, mean over classes (FedNTD, eq. 5)"),
    Column("round_forgetting", "accuracy lost from one round to the next, gains ignored (Flashback)"),
)
METRICS = (  # of the last evaluated round, in a table of their own
    Column("balanced_accuracy", "mean of the classes' accuracies"),
    Column("macro_f1", "mean over classes"),
    Column("auc", "one class against the rest, mean over classes"),
    Column("ece", "expected calibration error"),
)
_NOT_SHOWN = {"macro_precision"}  # on the page; in `fedkeep compare --metrics` and exports it is
COSTS = (
    Column("bytes", "total communication", spread=False),
    Column("seconds", "per run", spread=False, named="seconds"),
)


def table_columns(
    groups: Sequence[Group], tests: Sequence[Difference], against: Group | None, target: float | None = None
) -> list[dict[str, Any]]:
    """Return the columns, each with a cell for every group, in their order.

    Measures that only some groups have are left out. Metrics of the last evaluated round and accuracies by site are
    tables of their own, the `part` of a column; the user's own metrics are shown as they are named.
    """
    ranks = rank_groups({group.label: group for group in groups})
    known = {column.key for column in (*SUMMARY, *METRICS, *COSTS)} | _NOT_SHOWN
    common = [key for key in groups[0].mean if all(key in group.mean for group in groups)]
    extra = [Column(key, named=clip(printable(key.replace("_", " ")), 24)) for key in common if key not in known]
    columns = []
    for column in SUMMARY:
        if column.key in common:
            columns.append(_measure_column(column, groups, ranks.get(column.key, {})))
            columns += _p_column(column.key, groups, tests, against)
    target = default_target(groups) if target is None else target
    columns += [_measure_column(column, groups, {}) for column in COSTS if column.key in common]
    columns += [_bytes_column(groups, target)] if target is not None else []
    runs = [{"text": f"{len(group.runs)}", "value": len(group.runs)} for group in groups]
    columns.append({"key": "runs", "head": "runs", "note": "", "down": True, "cells": runs})
    shown = [column for column in (*METRICS, *extra) if column.key in common and _says_more(column.key, groups)]
    columns += [{**_measure_column(column, groups, {}), "part": "metrics"} for column in shown]
    return [*columns, *_site_columns(groups)]


def _site_columns(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a column for each owner of test examples: the accuracy on these; none if owners are not known."""
    try:
        by_group = site_values(groups, "accuracy")
    except FedkeepError:
        return []
    sites = list(dict.fromkeys(site for of_group in by_group.values() for site in of_group))
    columns = []
    for number, site in enumerate(sites[:MAX_SITES]):
        cells: list[Cell] = []
        for group in groups:
            values = by_group.get(group.label, {}).get(site, np.array([]))
            text = format_cell("accuracy", values).replace("-", NONE)
            mean = float(values.mean()) if len(values) else math.nan
            cells.append({"text": text, "value": None if math.isnan(mean) else mean, "best": False})
        about = {"key": f"site_{number}", "head": clip(printable(site), 24), "note": "", "part": "sites"}
        columns.append({**about, "down": True, "cells": cells})
    return columns


def _says_more(key: str, groups: Sequence[Group]) -> bool:
    """Return whether a measure is known of some group, and is not the final accuracy under another name."""
    values = [group.mean[key] for group in groups]
    if key == "balanced_accuracy":  # nearly the same, if the test set has as many examples of each class
        return any(abs(value - group.mean["final"]) > 0.005 for value, group in zip(values, groups, strict=True))
    return not all(math.isnan(value) for value in values)


def _measure_column(column: Column, groups: Sequence[Group], ranks: dict[str, int]) -> dict[str, Any]:
    cells: list[Cell] = []
    for group in groups:
        mean, spread = group.mean[column.key], group.spread[column.key] if column.spread else None
        text = NONE if math.isnan(mean) else format_measure(column.key, mean, spread)
        cells.append({"text": text, "value": mean, "spread": spread, "best": ranks.get(group.label) == 1})
    about = {"key": column.key, "head": column.head, "note": column.note, "spread": column.spread}
    return {**about, "down": bool(is_higher_better(column.key)), "cells": cells}


def _p_column(
    measure: str, groups: Sequence[Group], tests: Sequence[Difference], against: Group | None
) -> list[dict[str, Any]]:
    """Return a column with the p-values against a group; none if no test was possible."""
    if against is None:
        return []
    found = {t.one if t.other == against.label else t.other: t for t in tests if _is_about(t, measure, against)}
    if not found:
        return []
    cells: list[Cell] = []
    for group in groups:
        test = found.get(group.label)
        text = "" if test is None else format_p(test.p_corrected)
        cells.append({"text": text, "value": None if test is None else test.p_corrected, "best": False})
    return [{"key": f"p_{measure}", "head": "p", "note": "", "down": False, "cells": cells}]


def _is_about(test: Difference, measure: str, against: Group) -> bool:
    return test.measure == measure and test.tested and against.label in (test.one, test.other)


def format_p(p: float) -> str:
    """Format a p-value for a narrow column.

    >>> format_p(0.0004), format_p(0.0331), format_p(0.8)
    ('<.001', '.033', '.80')
    """
    if p < 0.001:
        return "<.001"
    return f"{p:.3f}".lstrip("0") if p < 0.1 else f"{p:.2f}".removeprefix("0")


def _bytes_column(groups: Sequence[Group], target: float) -> dict[str, Any]:
    cells: list[Cell] = []
    for group in groups:
        needed = bytes_to(group, target)
        median = statistics.median(math.inf if value is None else value for value in needed)
        value = median if math.isfinite(median) else None
        cells.append({"text": format_reached(needed, format_megabytes).replace("-", NONE), "value": value})
    note = "sent until that accuracy is first reached, median over runs"
    return {"key": "bytes_to", "head": f"MB to {target:.1%}", "note": note, "down": False, "cells": cells}
