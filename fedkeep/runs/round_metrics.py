"""Metrics of a run's rounds, by round, by class and by site, read from its records."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedkeep._util.text import format_value
from fedkeep.errors import FedkeepError
from fedkeep.metrics import ClassCounts, macro

Record = dict[str, Any]

SCALARS = ("accuracy", "balanced_accuracy", "macro_precision", "macro_f1", "auc", "ece")
BY_CLASS = ("precision", "recall", "f1", "class_auc")
OF_SITE = ("examples", "accuracy", "balanced_accuracy", "macro_precision", "macro_f1", "auc", "ece")
# columns and rows of summaries and exports have these names already
_OTHERS = (
    *("final", "best", "smoothed", "forgetting", "round_forgetting", "consistency", "class_accuracy", "label_count"),
    *("lr", "train_loss", "test_loss", "epsilon", "bytes", "bytes_down", "bytes_up", "seconds", "macro_recall"),
    *("run", "method", "seed", "round", "measure", "class", "client", "site", "value"),
)
RESERVED_NAMES = frozenset((*SCALARS, *BY_CLASS, *OF_SITE, *_OTHERS))
_NAME = re.compile(r"[^\W\d]\w*")


def require_metric_name(name: Any) -> str:
    """Return the name of a user's metric; raise if it cannot be a column, or is that of a built-in number."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FedkeepError(
            f"metrics: {format_value(name)} cannot be a metric's name: use letters, digits and _, as in a dict "
            "{'specificity': function}",
            key="metrics",
            value=name,
        )
    if name in RESERVED_NAMES or name.removeprefix("macro_") in RESERVED_NAMES:
        message = f"metrics.{name}: every run has a number of that name, so choose another"
        raise FedkeepError(message, key=f"metrics.{name}", value=name)
    return name


def to_metric_value(value: Any, n_classes: int | None = None) -> float | list[float | None] | None:
    """Return a metric as a record holds it: a number, or a list with one for each class; None for NaN and infinity.

    Anything else raises a `TypeError` that says what it is; so does a list of another length, if `n_classes` is given.

    >>> to_metric_value(np.float32(0.5)), to_metric_value([1, float("nan")])
    (0.5, [1.0, None])
    """
    if value is None or isinstance(value, numbers.Real):
        return None if value is None or not math.isfinite(value) else float(value)
    try:
        array: np.ndarray = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except ValueError:  # lists of unequal length
        raise TypeError(format_value(value, most=60)) from None
    if array.ndim == 1 and array.dtype == object:  # None among numbers
        array = np.asarray([math.nan if number is None else number for number in array])
    if array.dtype.kind not in "fiub" or array.ndim > 1:
        raise TypeError(f"an array of shape {array.shape}" if array.ndim else format_value(value, most=60))
    if array.ndim == 0:
        return to_metric_value(array.item())
    if n_classes not in (None, len(array)):
        raise TypeError(f"{len(array)} numbers")
    return [to_metric_value(float(one)) for one in array]  # type: ignore[misc]


class RoundMetrics:
    """Metrics of the evaluated rounds of a history: [T] over rounds, [T, C] by class; NaN where not recorded."""

    site_names: tuple[str, ...]
    client_names: dict[int, str]

    def _evaluated(self) -> list[Record]:
        raise NotImplementedError

    @property
    def precision(self) -> np.ndarray:
        """[evaluated rounds, classes] how many of the examples predicted as a class are of it."""
        return self.class_metrics()["precision"]

    @property
    def recall(self) -> np.ndarray:
        """[evaluated rounds, classes] how many of a class's examples are predicted as it: the class accuracy."""
        return self.class_metrics()["recall"]

    @property
    def f1(self) -> np.ndarray:
        """[evaluated rounds, classes] harmonic mean of precision and recall."""
        return self.class_metrics()["f1"]

    @property
    def class_auc(self) -> np.ndarray:
        """[evaluated rounds, classes] area under the ROC curve of each class against the others."""
        return self.class_metrics()["class_auc"]

    @property
    def macro_f1(self) -> np.ndarray:
        """[evaluated rounds] mean F1 of the classes."""
        return self.metrics()["macro_f1"]

    @property
    def balanced_accuracy(self) -> np.ndarray:
        """[evaluated rounds] mean recall of the classes in the test set."""
        return self.metrics()["balanced_accuracy"]

    @property
    def auc(self) -> np.ndarray:
        """[evaluated rounds] mean over classes of `class_auc`."""
        return self.metrics()["auc"]

    @property
    def ece(self) -> np.ndarray:
        """[evaluated rounds] expected calibration error."""
        return self.metrics()["ece"]

    def metrics(self) -> dict[str, np.ndarray]:
        """Return every metric with one number per round, [evaluated rounds] each, the user's own too.

        The mean over classes of a metric of your own that has a number per class is called macro_NAME.
        """
        return metrics_of(self._evaluated())

    def class_metrics(self) -> dict[str, np.ndarray]:
        """Return every metric with one number per class, [evaluated rounds, classes] each, the user's own too."""
        return class_metrics_of(self._evaluated())

    def site_metrics(self, round: int | None = None) -> list[dict[str, Any]]:
        """Return a row for every site, the owners of the test examples, of a round; by default of the last.

        A row has `site`, `client` (the client of that name; None if there is none), `examples`, and the metrics of the
        global model on the site's test examples. By class, `precision`, `recall` and `f1` are arrays.
        """
        evaluated = {record["round"]: record for record in self._evaluated()}
        number = max(evaluated) if round is None else round
        if "sites" not in evaluated.get(number, {}):
            raise FedkeepError(
                f"round {number} has no metrics by site: the data needs test_ids, the owners of the test examples, at "
                "most 200 of them",
                key="test_ids",
                value=number,
            )
        return site_rows(evaluated[number], self.site_names, self.client_names)


def metrics_of(records: Sequence[Record]) -> dict[str, np.ndarray]:
    """Return the metrics with one number per record, [T] each."""
    by_class = class_metrics_of(records)
    hits, total = (np.array(each) for each in zip(*map(hits_of, records), strict=True))
    values = {
        "accuracy": np.asarray(hits.sum(1) / total.sum(1)),
        "balanced_accuracy": macro(by_class["recall"]),
        "macro_precision": macro(by_class["precision"]),
        "macro_f1": macro(by_class["f1"]),
        "auc": macro(by_class["class_auc"]),
        "ece": _column([record.get("ece") for record in records]),
    }
    for name in user_metric_names(records):
        column = [record.get("metrics", {}).get(name) for record in records]
        if any(isinstance(value, list) for value in column):
            values[f"macro_{name}"] = macro(by_class[name])
        else:
            values[name] = _column(column)
    return values


def class_metrics_of(records: Sequence[Record]) -> dict[str, np.ndarray]:
    """Return the metrics with one number per class, [T, C] each."""
    hits, total = (np.array(each) for each in zip(*map(hits_of, records), strict=True))
    unknown = np.full(hits.shape, np.nan)
    values = {"precision": unknown, "recall": ClassCounts(total, total, hits).recall(), "f1": unknown}
    if all("confusion" in record for record in records):
        counts = ClassCounts.of(np.array([record["confusion"] for record in records]))
        values |= {"precision": counts.precision(), "f1": counts.f1()}
    values["class_auc"] = _rows([record.get("auc") for record in records], unknown)
    for name in user_metric_names(records):
        column = [record.get("metrics", {}).get(name) for record in records]
        if any(isinstance(value, list) for value in column):
            values[name] = _rows(column, unknown)
    return values


def site_rows(record: Record, site_names: Sequence[str], client_names: dict[int, str]) -> list[dict[str, Any]]:
    """Return the metrics of every site in a record, a row each."""
    sites = record["sites"]
    counts = ClassCounts(*(np.asarray(sites[key]) for key in ("examples", "predicted", "right")))
    scalars = {
        "examples": counts.true.sum(-1),
        "accuracy": counts.accuracy(),
        "balanced_accuracy": macro(counts.recall()),
        "macro_precision": macro(counts.precision()),
        "macro_f1": macro(counts.f1()),
        "auc": _column(sites["auc"]),
        "ece": _column(sites["ece"]),
    }
    by_class = {"precision": counts.precision(), "recall": counts.recall(), "f1": counts.f1()}
    clients = {name: k for k, name in client_names.items()}
    return [
        {
            "site": name,
            "client": clients.get(name),
            **{key: column[i].item() for key, column in scalars.items()},
            **{key: table[i] for key, table in by_class.items()},
        }
        for i, name in enumerate(names_of_sites(site_names, len(counts.true)))
    ]


def names_of_sites(site_names: Sequence[str], n: int) -> list[str]:
    """Return the names of n sites; where they are not known, "site 0" and so on."""
    return list(site_names) if len(site_names) == n else [f"site {i}" for i in range(n)]


def user_metric_names(records: Iterable[Record]) -> list[str]:
    """Return the names of the user's metrics in these records."""
    return list(dict.fromkeys(name for record in records for name in record.get("metrics", {})))


def hits_of(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """Return how many test examples of each class were right in a record, and how many there are, [C] each.

    A record has the confusion matrix, or only its `hits` and their `total`.

    >>> hits_of({"confusion": [[3, 1], [0, 4]]})
    (array([3, 4]), array([4, 4]))
    """
    if "hits" in record:
        return np.asarray(record["hits"]), np.asarray(record["total"])
    confusion = np.asarray(record["confusion"])
    return np.diagonal(confusion), confusion.sum(-1)


def _column(values: Iterable[Any]) -> np.ndarray:
    """Return numbers as an array; NaN for None and for what is no number."""
    return np.array([value if isinstance(value, int | float) else math.nan for value in values], dtype=float)


def _rows(values: Sequence[Any], unknown: np.ndarray) -> np.ndarray:
    """Return lists of one number per class as a table; NaN for other values."""
    width = unknown.shape[1]
    return np.array(
        [_column(v) if isinstance(v, list) and len(v) == width else unknown[0] for v in values], dtype=float
    ).reshape(unknown.shape)
