"""What the page shows, as plain numbers.

Class accuracies are many: they travel as bytes in base64, in steps of half a percent, and long runs are thinned to
the rounds that a screen can show. Everything else is JSON as it stands.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedkeep import forgetting
from fedkeep._util import arrays
from fedkeep._util.version import __version__
from fedkeep.analysis.anatomy import Anatomy
from fedkeep.analysis.groups import Group
from fedkeep.analysis.measured import Measured, Run, measure
from fedkeep.data import partition
from fedkeep.reports.verdict import reference, verdict
from fedkeep.runs import label_counts

STEPS, ABSENT = 200, 255  # accuracy 1.0 and "no such class", as bytes
MOST_POINTS = 400  # of a curve, or columns of a heat map
MOST_CLIENTS = 40  # of one round's anatomy
HEAT_BYTES, ANATOMY_BYTES = 1_000_000, 2_000_000  # of the whole page, before base64
BINS = 40


def page_data(groups: Iterable[Group]) -> dict[str, Any]:
    """Gather everything that the page shows of these groups of runs."""
    measured = [measure(group) for group in groups]
    runs = [run for group in measured for run in group.runs]
    known = [group for group in measured if np.isfinite(group.mean["forgetting"])]
    said = verdict(measured)
    kept: dict[str, dict[str, Any]] = {}
    columns = _share(HEAT_BYTES, [run.class_accuracy.shape[1] for run in runs], MOST_POINTS)
    rounds = _share(ANATOMY_BYTES, [_weight(run) for run in runs], MOST_POINTS)
    edges = _edges(measured)
    data = {
        "made_by": f"fedkeep {__version__}",
        "verdict": {"headline": said.headline, "details": said.details},
        "reference": measured.index(reference(known)) if known else 0,
        "drop_edges": edges,
        "groups": [_group(group, edges, columns, rounds, kept) for group in measured],
        "splits": list(kept.values()),
        "shared": _shared([group.setting for group in measured]),
    }
    return finite(data)  # type: ignore[no-any-return]


def pack(accuracy: Any) -> str:
    """Write accuracies as bytes, in steps of half a percent, in base64; NaN is 255.

    >>> list(base64.b64decode(pack([0.0, 0.5, 1.0, float("nan")])))
    [0, 100, 200, 255]
    """
    a = np.asarray(accuracy, dtype=float)
    coded = np.where(np.isnan(a), ABSENT, np.nan_to_num(a) * STEPS)
    return base64.b64encode(coded.round().astype(np.uint8).tobytes()).decode()


def finite(value: Any) -> Any:
    """Make plain values of arrays and numpy's numbers, and None of numbers that are not finite.

    >>> finite({"a": np.array([1.0, np.nan])})
    {'a': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return finite(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _share(budget: int, weights: list[int], most: int) -> int:
    """Say how many rounds of every run fit into the budget, given the bytes that a round of each run takes."""
    return max(2, min(most, budget // max(1, sum(weights))))


def _weight(run: Run) -> int:
    if not run.anatomies:
        return 0
    return max(2 * (min(len(a.ids), MOST_CLIENTS) + 2) * len(a.before) for a in run.anatomies)


def _group(
    group: Measured, edges: np.ndarray, columns: int, rounds: int, kept: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    return {
        "label": group.label,
        "method": group.setting["method"]["name"],
        "classes": group.runs[0].class_accuracy.shape[1],
        "mean": group.mean,
        "spread": group.spread,
        "class_forgetting": group.class_forgetting.round(4),
        "where": group.where,
        "curve": _curve(group),
        "drops": _drops(group, edges),
        "setting": flat(group.setting),
        "runs": [_run(run, columns, rounds, kept) for run in group.runs],
    }


def _curve(group: Measured) -> dict[str, Any]:
    """The mean accuracy over seeds, and how far they spread around it."""
    shown = arrays.evenly_spaced(len(group.runs[0].rounds), MOST_POINTS)
    accuracy = np.stack([run.accuracy for run in group.runs])[:, shown]
    spread = accuracy.std(0, ddof=1) if len(accuracy) > 1 else np.zeros(len(shown))
    return {"rounds": group.runs[0].rounds[shown], "mean": accuracy.mean(0).round(4), "spread": spread.round(4)}


def _lost_from_round_to_round(group: Measured) -> np.ndarray:
    """What the classes lost, on average, from each evaluated round to the next, of all runs."""
    return np.concatenate([forgetting.round_forgetting(run.class_accuracy) for run in group.runs])


def _edges(groups: list[Measured]) -> np.ndarray:
    """Bins for the round forgetting of all groups; the last one also takes the few rounds that lost far more."""
    usual = [float(np.quantile(lost, 0.98)) for lost in map(_lost_from_round_to_round, groups) if len(lost)]
    return np.linspace(0, max([0.01, *usual]), BINS + 1).round(5)


def _drops(group: Measured, edges: np.ndarray) -> dict[str, Any]:
    lost = _lost_from_round_to_round(group)
    counts, _ = np.histogram(np.minimum(lost, edges[-1]), edges)
    quartiles = np.quantile(lost, [0.25, 0.5, 0.75]).round(4) if len(lost) else np.full(3, np.nan)
    return {"counts": counts, "quartiles": quartiles, "largest": lost.max(initial=0), "number": len(lost)}


def _run(run: Run, columns: int, rounds: int, kept: dict[str, dict[str, Any]]) -> dict[str, Any]:
    shown = arrays.evenly_spaced(len(run.rounds), columns)
    about = run.history.about
    return {
        "seed": run.seed,
        "folder": run.history.folder.name if run.history.folder else "",
        "reached": run.history.records[-1]["round"],
        "planned": about["train"]["rounds"],
        "summary": run.summary,
        "rounds": run.rounds[shown],
        "class_accuracy": pack(run.class_accuracy[shown]),
        "below_best": run.below_best.round(4),
        "anatomy": _anatomy(run.anatomies, rounds),
        "split": _split(run, kept),
        "made_by": flat(about.get("made_by", {})),
    }


def _anatomy(found: list[Anatomy], rounds: int) -> dict[str, Any] | None:
    """Lay the rounds' models end to end: the global model before, the clients, the global model after.

    Beside them, what share of a client's examples is of each class.
    """
    if not found:
        return None
    chosen = [found[i] for i in arrays.evenly_spaced(len(found), rounds)]
    return {
        "rounds": [a.round for a in chosen],
        "ids": [a.ids[:MOST_CLIENTS] for a in chosen],
        "clients": [len(a.ids) for a in chosen],
        "models": [pack(np.concatenate([a.before, *a.clients[:MOST_CLIENTS], a.after])) for a in chosen],
        "shares": [pack(_shares(a.label_counts[:MOST_CLIENTS])) for a in chosen],
        "local": [pack(a.lost_locally) for a in chosen],
        "aggregation": [pack(a.lost_in_aggregation) for a in chosen],
    }


def _shares(label_counts: np.ndarray) -> np.ndarray:
    """Shares of a client's examples, rounded up, so that one example among many still shows."""
    shares = label_counts / np.maximum(label_counts.sum(1, keepdims=True), 1)
    return np.asarray(np.ceil(shares * STEPS) / STEPS)


def _split(run: Run, kept: dict[str, dict[str, Any]]) -> int | None:
    """Name the run's split by its place among those that are kept; methods on one seed share theirs."""
    found = label_counts.label_counts_of(run.history)
    counts = np.array(found["counts"]) if found else np.zeros((0, 0))
    if found is None or not counts.any():
        return None
    about = run.history.about
    said = ", ".join(f"{key} {value}" for key, value in about["split"].items() if key not in ("kind", "n_clients"))
    kind = f"{about['data'].get('source', 'data')}: {about['split'].get('kind', 'own split')}"
    found = {**found, "title": f"{kind} ({said})" if said else kind, "words": partition.summarize_label_counts(counts)}
    kept.setdefault(repr(found), found)
    return list(kept).index(repr(found))


def _shared(settings: list[dict[str, Any]]) -> dict[str, str]:
    """What all groups have in common."""
    tables = [flat(setting) for setting in settings]
    return {key: value for key, value in tables[0].items() if all(table.get(key) == value for table in tables)}


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Write a table of tables as one, in words.

    >>> flat({"method": {"name": "fedntd", "beta": 1.0}, "seed": 0})
    {'method.name': 'fedntd', 'method.beta': '1.0', 'seed': '0'}
    """
    out: dict[str, str] = {}
    for key, value in table.items():
        out.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": str(value)})
    return out
