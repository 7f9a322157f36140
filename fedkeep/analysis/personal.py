"""Personalised accuracy in recorded runs: of which model, on which data, over which clients, in which round.

Each line of `instruments.jsonl` with the study `personal` holds every client's accuracy on data like its own, with up
to three models. `fedkeep.instruments.personal` measures them; docs/personalisation.md has the definitions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedkeep._util.text import format_mean, join_names
from fedkeep.analysis.groups import Group
from fedkeep.runs.history import History

STUDY = "personal"
GLOBAL, OWN, TUNED, USED = "global", "own", "tuned", "used"
MODELS = (GLOBAL, OWN, TUNED)
NUMBERS = ("mean", "spread", "worst_tenth", "weighted", "took_part", "test_set", "best")
OWN_TEST, HELD_OUT, LABEL_SHARES = "own test examples", "held-out examples", "label shares"  # what is measured on
DATA = {
    OWN_TEST: "each client's own test examples",
    HELD_OUT: "each client's own held-out examples",
    LABEL_SHARES: "the test set, its classes weighted by each client's label shares",
}

Numbers = dict[str, float]


def summarize_clients(accuracy: Any, examples: Any, took_part: Any) -> Numbers:
    """Return the mean over clients, their standard deviation, the mean of the worst tenth, and two other means.

    The worst tenth is at least one client, rounded up. Every client counts equally, but in `weighted`, where it counts
    by its number of training examples. `took_part` is the mean over those that took part in a round. A client without
    an accuracy (NaN) is left out.

    >>> summarize_clients([0.5, 1.0, float("nan"), 0.0], [1, 2, 5, 1], [False, True, True, True])
    {'mean': 0.5, 'spread': 0.408..., 'worst_tenth': 0.0, 'weighted': 0.625, 'took_part': 0.5}
    """
    a, n, visited = np.asarray(accuracy, dtype=float), np.asarray(examples, dtype=float), np.asarray(took_part, bool)
    known = ~np.isnan(a)
    a, n, visited = a[known], n[known], visited[known]
    if not len(a):
        return dict.fromkeys(("mean", "spread", "worst_tenth", "weighted", "took_part"), math.nan)
    worst = np.sort(a)[: count_worst(len(a))]
    return {
        "mean": float(a.mean()),
        "spread": float(a.std()),
        "worst_tenth": float(worst.mean()),
        "weighted": float(a @ n / n.sum()),
        "took_part": float(a[visited].mean()) if visited.any() else math.nan,
    }


def count_worst(clients: int) -> int:
    """Return how many clients are the worst tenth.

    >>> count_worst(100), count_worst(11), count_worst(3)
    (10, 2, 1)
    """
    return -(-clients // 10)


def used_model(result: Mapping[str, Any]) -> str:
    """Return which model a client would use: the method's own, else the fine-tuned one, else the global one."""
    return next(model for model in (OWN, TUNED, GLOBAL) if model in result)


def with_best(analysis: dict[str, Any], earlier: Iterable[Mapping[str, Any]], after_round: int) -> dict[str, Any]:
    """Return an analysis with the best round of each model so far, and the numbers of the model that is used.

    Earlier rounds count if they were measured on the same data, with as many epochs of fine-tuning.
    """
    result = analysis.get(STUDY)
    if result is None:
        return analysis
    lines = [(line["after_round"], line[STUDY]) for line in earlier if STUDY in line]
    same = [(number, past) for number, past in lines if number < after_round and _is_like(past, result)]
    added = {}
    for model in (model for model in MODELS if model in result):
        means = [(number, past[model]["mean"]) for number, past in [*same, (after_round, result)] if model in past]
        best_round, best = max(means, key=lambda pair: -math.inf if pair[1] is None else pair[1])
        added[model] = {**result[model], "best": best, "best_round": best_round}
    used = used_model(result)
    added[USED] = {"model": used, **{key: value for key, value in added[used].items() if key != "clients"}}
    return {**analysis, STUDY: {**result, **added, "rounds": len(same) + 1}}


def last_result(history: History) -> tuple[int, dict[str, Any]] | None:
    """Return the last analysed round of a run and its result; None if the study was not recorded."""
    found = [(line["after_round"], line[STUDY]) for line in history.instruments if line.get(STUDY)]
    return found[-1] if found else None


def describe_model(model: str, epochs: int) -> str:
    """Return what a model is called in tables.

    >>> describe_model("tuned", 1), describe_model("own", 5), describe_model("global", 5)
    ('fine-tuned, 1 epoch', "method's own", 'global')
    """
    if model == TUNED:
        return f"fine-tuned, {epochs} epoch{'s' * (epochs != 1)}"
    return {GLOBAL: "global", OWN: "method's own"}[model]


def describe_clients(measured: int, left_out: int, never: tuple[int, int]) -> str:
    """Return which clients were measured; `never` is the fewest and the most, over seeds, that never took part.

    >>> describe_clients(20, 0, (0, 2)), describe_clients(18, 2, (0, 0))
    ('all 20 clients (0 to 2 of them never took part)', '18 clients (2 others have no examples; each took part)')
    """
    low, high = never
    number = f"{low}" if low == high else f"{low} to {high}"
    visits = f"{number} of them never took part" if high else "each took part"
    if left_out:
        return f"{measured} clients ({left_out} other{'s have' if left_out > 1 else ' has'} no examples; {visits})"
    return f"all {measured} clients ({visits})"


@dataclass(frozen=True)
class Row:
    """One model of one group: mean and standard deviation over seeds of what `summarize_clients` returns."""

    label: str
    model: str
    model_text: str
    used: bool  # whether it is the model that a client would use
    mean: Numbers
    std: Numbers
    seeds: int
    clients: tuple[float, ...]  # each client's accuracy, of all seeds

    @property
    def name(self) -> str:
        """What the row is called in a table."""
        return f"{self.label}: {self.model_text}"

    def cells(self, columns: Iterable[str]) -> list[str]:
        """Return the row's cells of a table with these columns: mean±standard deviation, in percent."""
        return [format_mean(self.mean[key], self.std[key], 1, scale=100) for key in columns]


@dataclass(frozen=True)
class Measured:
    """Rows that were measured in the same way, and how: this is what a table of them must say."""

    data: str
    after_round: int
    is_last: bool  # of the run
    clients: int
    left_out: int  # clients without training examples, or without the examples that others are measured on
    never: tuple[int, int]  # how many clients never took part; over seeds, fewest and most
    analysed: int  # rounds among which the best is
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """Which data, clients and round."""
        last = "the last" if self.is_last else "not the last"
        clients = describe_clients(self.clients, self.left_out, self.never)
        return f"Personalised accuracy after round {self.after_round} ({last}), of {clients}, on {DATA[self.data]}"

    @property
    def models(self) -> str:
        """Which model each group's clients would use, for tables that show no other."""
        labels: dict[str, dict[str, None]] = {}
        for row in self.rows:
            if row.used:
                labels.setdefault(row.model_text, {})[row.label] = None
        return "; ".join(f"{text} ({join_names(list(names))})" for text, names in labels.items())

    @property
    def caption(self) -> str:
        """What the columns are."""
        tenth = count_worst(self.clients)
        took_part = "took part: mean over the clients that took part; " if self.never[1] else ""
        best = f"best: highest mean among {self.analysed} analysed rounds; " if self.analysed > 1 else ""
        return (
            f"own data: mean over clients, each counts equally; spread: standard deviation over clients; worst tenth: "
            f"mean of the {tenth} least accurate client{'s' * (tenth > 1)}; {took_part}{best}test set: the same models "
            "on the whole test set"
        )

    def as_data(self) -> dict[str, Any]:
        """Return the rows as JSON-compatible data."""
        about = {"title": self.title, "data": self.data, "after_round": self.after_round, "is_last": self.is_last}
        about |= {"clients": self.clients, "left_out": self.left_out, "never_took_part": list(self.never)}
        fields = ("label", "model", "model_text", "used", "mean", "std", "seeds")
        return {**about, "rows": [{name: getattr(row, name) for name in fields} for row in self.rows]}


def personal_columns(measured: Measured) -> dict[str, str]:
    """Return the columns of a table and their headings; that of the best round if there are several, and so on."""
    columns = {"mean": "own data %", "spread": "spread", "worst_tenth": "worst tenth %"}
    if measured.never[1]:
        columns["took_part"] = "took part %"
    if measured.analysed > 1:
        columns["best"] = "best %"
    return {**columns, "test_set": "test set %"}


class _Way(NamedTuple):
    """What rows of one table have in common."""

    data: str
    after_round: int
    is_last: bool
    clients: int
    left_out: int


def measured_groups(groups: Sequence[Group]) -> list[Measured]:
    """Return what groups of runs recorded, together if it was measured in the same way."""
    return measured_runs((group, group.label, run.history) for group in groups for run in group.runs)


def measured_runs(runs: Iterable[tuple[Hashable, str, History]]) -> list[Measured]:
    """Return what runs recorded, together if it was measured in the same way.

    A run is given with what it shares with the same method's other seeds, and with the label of both.
    """
    found: dict[_Way, dict[tuple[Hashable, str], list[dict[str, Any]]]] = {}
    for group, label, history in runs:
        if last := last_result(history):
            number, result = last
            is_last = number == int(history.records[-1]["round"])
            way = _Way(result["data"], number, is_last, len(result["clients"]), result["left_out"])
            found.setdefault(way, {}).setdefault((group, label), []).append(result)
    return [_measured(way, members) for way, members in found.items()]


def _measured(way: _Way, members: dict[tuple[Hashable, str], list[dict[str, Any]]]) -> Measured:
    results = [result for several in members.values() for result in several]
    never = [len(result["never_took_part"]) for result in results]
    rows = [row for (_, label), several in members.items() for row in _rows(label, several)]
    analysed = max(result["rounds"] for result in results)
    return Measured(**way._asdict(), never=(min(never), max(never)), analysed=analysed, rows=tuple(rows))


def _rows(label: str, results: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for epochs in sorted({result["epochs"] for result in results}):
        same = [result for result in results if result["epochs"] == epochs]
        for model in (model for model in MODELS if model in same[0]):
            values = {key: _floats([result[model][key] for result in same]) for key in NUMBERS}
            mean = {key: float(several.mean()) for key, several in values.items()}
            several_seeds = len(same) > 1
            std = {key: float(v.std(ddof=1)) if several_seeds else math.nan for key, v in values.items()}
            text = describe_model(model, epochs)
            clients = _floats([value for result in same for value in result[model]["clients"]])
            known = tuple(clients[~np.isnan(clients)].tolist())
            rows.append(Row(label, model, text, used_model(same[0]) == model, mean, std, len(same), known))
    return rows


def _is_like(past: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    return all(past[key] == result[key] for key in ("data", "epochs"))


def _floats(values: Any) -> np.ndarray:
    return np.array(values, dtype=float)  # None, as JSON has it, becomes NaN
