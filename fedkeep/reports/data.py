"""The data of the report page.

Class accuracies are large: they are stored as bytes in base64, in steps of half a percent, and long runs are thinned to
the rounds that a screen can show. Everything else is plain JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep import forgetting
from fedkeep._util import arrays
from fedkeep._util.json import flatten, without_nan
from fedkeep._util.text import printable, short_name
from fedkeep._util.version import __version__
from fedkeep.analysis.anatomy import Anatomy
from fedkeep.analysis.compare import default_against, differences, group_named, ordered
from fedkeep.analysis.groups import Group, Problem, Run
from fedkeep.analysis.labels import data_name
from fedkeep.analysis.run_set import RunSet
from fedkeep.analysis.sentences import list_names
from fedkeep.data import partition
from fedkeep.reports.about import MAX_NAME, class_names, facts, typical_seed
from fedkeep.reports.columns import table_columns
from fedkeep.reports.personal import personal_data
from fedkeep.reports.recoverable import recoverable_data
from fedkeep.reports.verdict import reference, verdict
from fedkeep.runs import label_counts

STEPS, ABSENT = 200, 255  # accuracy 1.0 and "no such class", as bytes
MAX_POINTS = 400  # of a curve, or columns of a heat map
MAX_CLIENTS = 40  # of one round's anatomy
HEAT_BYTES, ANATOMY_BYTES = 1_000_000, 2_000_000  # of the whole page, before base64
SPLIT_CELLS = 200_000  # of the whole page
BINS = 40


def page_data(runs: RunSet, target: float | None = None) -> dict[str, Any]:
    """Return everything that the page shows of these runs, problem by problem, as JSON-compatible data.

    `target` is the accuracy of the column "MB to"; by default the final one of FedAvg.
    """
    budget = _Budget.of(runs.groups)
    problems = [_problem_data(problem, budget, target) for problem in runs.problems]
    data = {
        "made_by": f"fedkeep {__version__}",
        "verdict": _page_verdict(problems, runs),
        "problems": problems,
        "left_out": runs.left_out_as_data(),
    }
    return without_nan(data)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Budget:
    """How much of every run fits on the page."""

    columns: int  # of a heat map
    anatomies: int
    clients: int  # of a split

    @classmethod
    def of(cls, groups: list[Group]) -> _Budget:
        runs = [run for group in groups for run in group.runs]
        classes = [run.class_accuracy.shape[1] for run in runs]
        means = [group.runs[0].class_accuracy.shape[1] for group in groups if len(group.runs) > 1]
        seeds = len({(group.setting.get("data", {}).get("source"), run.seed) for group in groups for run in group.runs})
        return cls(
            _rounds_within(HEAT_BYTES, [*classes, *means]),
            _rounds_within(ANATOMY_BYTES, [_anatomy_bytes(run) for run in runs]),
            max(2, SPLIT_CELLS // max(1, max(classes, default=1) * seeds)),
        )


def _page_verdict(problems: list[dict[str, Any]], runs: RunSet) -> dict[str, Any]:
    """Return the verdict on the only problem; of several, that they are not compared with each other."""
    names = [Path(entry["run"]).name for entry in runs.left_out_as_data()]
    left_out = [f"Left out: {list_names(names)}."] if names else []
    if len(problems) == 1:
        [only] = problems
        return {"headline": only["verdict"]["headline"], "details": [*only["verdict"]["details"], *left_out]}
    headline = f"These runs solve {len(problems)} different problems, which are not compared with each other."
    return {"headline": headline, "details": left_out}


def _problem_data(problem: Problem, budget: _Budget, target: float | None) -> dict[str, Any]:
    groups = _by_rank(problem.groups)
    comparable = [group for group in groups if np.isfinite(group.mean["forgetting"])]
    finished = [group for group in comparable if group.finished]
    base = reference(finished or comparable) if comparable else groups[0]
    chosen = default_against(groups)
    tests = [test for measure in ("final", "forgetting") for test in differences(groups, measure, chosen)]
    against = group_named(groups, chosen) if chosen else base
    result = verdict(groups, [test for test in tests if test.measure == "forgetting"])
    splits: dict[str, dict[str, Any]] = {}
    edges = _bin_edges(groups)
    return {
        "title": problem.title,
        "facts": facts(problem),
        "class_names": class_names(groups),
        "verdict": {"headline": result.headline, "details": result.details},
        "reference": groups.index(base),
        "seed": typical_seed([groups[0], base]),
        "tests": {"against": against.title, "number": sum(t.tested for t in tests if t.measure == "final")},
        "columns": table_columns(groups, tests, against, target),
        "drop_edges": edges,
        "groups": [_group_data(group, edges, budget, splits) for group in groups],
        "personal": personal_data(groups),
        "splits": list(splits.values()),
        "shared": _shared_settings(groups),
    }


def _by_rank(groups: list[Group]) -> list[Group]:
    """Return the groups as the page orders them: those that forget least first, those that are not finished last."""
    ranked = ordered(groups, "forgetting")
    return [*ranked, *sorted((g for g in groups if g not in ranked), key=lambda g: not g.finished)]


def pack(accuracy: Any) -> str:
    """Encode accuracies as bytes, in steps of half a percent, in base64; NaN is 255.

    >>> list(base64.b64decode(pack([0.0, 0.5, 1.0, float("nan")])))
    [0, 100, 200, 255]
    """
    a = np.asarray(accuracy, dtype=float)
    coded = np.where(np.isnan(a), ABSENT, a * STEPS)
    return base64.b64encode(coded.round().astype(np.uint8).tobytes()).decode()


def _rounds_within(budget: int, bytes_per_round: list[int]) -> int:
    """Return how many rounds of every run fit into the budget, given the bytes per round of each run."""
    return max(2, min(MAX_POINTS, budget // max(1, sum(bytes_per_round))))


def _anatomy_bytes(run: Run) -> int:
    if not run.anatomies:
        return 0
    return max(2 * (min(len(a.ids), MAX_CLIENTS) + 2) * len(a.before) for a in run.anatomies)


def _group_data(group: Group, edges: np.ndarray, budget: _Budget, splits: dict[str, dict[str, Any]]) -> dict[str, Any]:
    runs = sorted(group.runs, key=lambda run: run.seed)
    return {
        "label": group.label,
        "title": group.title,
        "method": printable(group.setting["method"]["name"]),
        "status": group.status,
        "classes": runs[0].class_accuracy.shape[1],
        "mean": group.mean,
        "spread": group.spread,
        "class_forgetting": group.class_forgetting.round(4),
        "where": group.loss_by_phase,
        "curve": _curve(runs),
        "mean_map": _mean_map(runs, budget.columns),
        "drops": _drops(group, edges),
        "setting": _texts(group.setting),
        "runs": [_run_data(run, budget, splits) for run in runs],
    }


def _curve(runs: list[Run]) -> dict[str, Any]:
    """Return the mean accuracy over seeds and its standard deviation, in the rounds that all runs evaluated."""
    rounds = _common_rounds(runs)
    runs = runs if len(rounds) else runs[:1]  # a callback may have stopped one run before the next's first round
    rounds = rounds if len(rounds) else runs[0].rounds
    shown = arrays.evenly_spaced(len(rounds), MAX_POINTS)
    accuracy = np.stack([run.accuracy[np.isin(run.rounds, rounds)] for run in runs])[:, shown]
    spread = accuracy.std(0, ddof=1) if len(accuracy) > 1 else np.zeros(len(shown))
    return {"rounds": rounds[shown], "mean": accuracy.mean(0).round(4), "spread": spread.round(4)}


def _common_rounds(runs: list[Run]) -> np.ndarray:
    """Return the rounds that all runs evaluated."""
    return np.array(sorted(set.intersection(*(set(run.rounds.tolist()) for run in runs))), dtype=int)


def _mean_map(runs: list[Run], most: int) -> dict[str, Any] | None:
    """Return the class accuracies of several seeds, mean over them; None for a single one."""
    rounds = _common_rounds(runs)
    if len(runs) < 2 or not len(rounds):
        return None
    shown = arrays.evenly_spaced(len(rounds), most)
    accuracy = np.mean([run.class_accuracy[np.isin(run.rounds, rounds)][shown] for run in runs], axis=0)
    return {"rounds": rounds[shown], "class_accuracy": pack(accuracy)}


def _round_forgetting(group: Group) -> np.ndarray:
    """Return the round forgetting of every evaluated round of every run."""
    return np.concatenate([forgetting.round_forgetting(run.class_accuracy) for run in group.runs])


def _bin_edges(groups: list[Group]) -> np.ndarray:
    """Return bins for the round forgetting of all groups; the last one also holds the few rounds far above it."""
    high = [float(np.quantile(lost, 0.98)) for lost in map(_round_forgetting, groups) if len(lost)]
    return np.linspace(0, max([0.01, *high]), BINS + 1).round(5)


def _drops(group: Group, edges: np.ndarray) -> dict[str, Any]:
    lost = _round_forgetting(group)
    counts, _ = np.histogram(np.minimum(lost, edges[-1]), edges)
    quartiles = np.quantile(lost, [0.25, 0.5, 0.75]).round(4) if len(lost) else np.full(3, np.nan)
    return {"counts": counts, "quartiles": quartiles, "largest": lost.max(initial=0), "number": len(lost)}


def _run_data(run: Run, budget: _Budget, splits: dict[str, dict[str, Any]]) -> dict[str, Any]:
    shown = arrays.evenly_spaced(len(run.rounds), budget.columns)
    about = run.history.about
    return {
        "seed": run.seed,
        "folder": printable(run.history.folder.name) if run.history.folder else "",
        "reached": run.last_round,
        "planned": run.planned_rounds,
        "summary": run.summary,
        "rounds": run.rounds[shown],
        "class_accuracy": pack(run.class_accuracy[shown]),
        "below_best": run.below_best.round(4),
        "anatomy": _anatomy_data(run.anatomies, budget.anatomies),
        "recoverable": _recoverable_data(run, budget.columns),
        "split": _split_index(run, splits, budget.clients),
        "made_by": _texts({k: v for k, v in about.get("made_by", {}).items() if k not in ("layers", "inputs")}),
    }


def _recoverable_data(run: Run, most: int) -> dict[str, Any] | None:
    data = recoverable_data(run, most)
    return None if data is None else {**data, "bias": pack(data["bias"])}


def _anatomy_data(anatomies: list[Anatomy], most: int) -> dict[str, Any] | None:
    """Concatenate the models of each round: the global model before, the clients, the global model after.

    `shares` is the share of each class among a client's examples.
    """
    if not anatomies:
        return None
    chosen = [anatomies[i] for i in arrays.evenly_spaced(len(anatomies), most)]
    return {
        "rounds": [a.round for a in chosen],
        "ids": [a.ids[:MAX_CLIENTS] for a in chosen],
        "clients": [len(a.ids) for a in chosen],
        "models": [pack(np.concatenate([a.before, *a.clients[:MAX_CLIENTS], a.after])) for a in chosen],
        "shares": [pack(_label_shares(a.label_counts[:MAX_CLIENTS])) for a in chosen],
        "local": [pack(a.lost_locally) for a in chosen],
        "aggregation": [pack(a.lost_in_aggregation) for a in chosen],
    }


def _label_shares(counts: np.ndarray) -> np.ndarray:
    """Return the shares of a client's examples, rounded up, so that one example among many is still visible."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return np.asarray(np.ceil(shares * STEPS) / STEPS)


def _split_index(run: Run, splits: dict[str, dict[str, Any]], most: int) -> int | None:
    """Add the run's split to `splits` and return its index there; methods with the same seed share one."""
    split = label_counts.label_counts_of(run.history)
    counts = np.array(split["counts"]) if split else np.zeros((0, 0))
    if split is None or not counts.any():
        return None
    about = run.history.about
    options = ", ".join(f"{key} {value}" for key, value in about["split"].items() if key not in ("kind", "n_clients"))
    title = f"{data_name(about['data'])}: {about['split'].get('kind', 'own split')}"
    title = f"{title} ({options})" if options else title
    shown = arrays.evenly_spaced(len(counts), most)
    ids = [split["ids"][k] for k in shown]
    named = run.history.client_names
    split = {
        "clients": split["clients"],
        "ids": ids,
        "names": [short_name(run.history.client_name(k), MAX_NAME) for k in ids] if named else None,
        "counts": counts[shown].tolist(),
        "title": printable(title),
        "summary": partition.summarize_label_counts(counts),
        "heterogeneity": partition.heterogeneity(counts),
    }
    key = repr(split)
    splits.setdefault(key, split)
    return list(splits).index(key)


def _shared_settings(groups: list[Group]) -> dict[str, str]:
    """Return the settings that all groups have in common."""
    tables = [_texts(group.setting) for group in groups]
    return {key: value for key, value in tables[0].items() if all(table.get(key) == value for table in tables)}


def _texts(table: Mapping[str, Any]) -> dict[str, str]:
    """Flatten nested settings and convert the values to text, without characters that cannot be shown."""
    return {printable(key): printable(value) for key, value in flatten(table).items()}
