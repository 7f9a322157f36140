"""Run history: one record per round, final weights and derived measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedkeep import forgetting
from fedkeep._util.html import Html
from fedkeep._util.text import printable
from fedkeep.errors import FedkeepError
from fedkeep.runs.history_html import heat_map_html, history_html
from fedkeep.runs.round_metrics import RoundMetrics, hits_of, metrics_of
from fedkeep.tree import Tree

Record = dict[str, Any]


@dataclass(repr=False)
class History(RoundMetrics):
    """Run history: one record per round, final weights and derived measures.

    A record is a dict: `round`, `lr`, `cohort` (ids), `skipped` (sampled clients without examples),
    `train_loss`, `bytes_down`, `bytes_up`, `seconds`; if the global model was evaluated, `confusion` [true][predicted],
    `test_loss`, `auc` by class, `ece` and, if the owners of test examples are known, `sites` with counts by class,
    `auc` and `ece` of each; `metrics` of your own; if the local models were evaluated, `local`: `hits` by class (of
    `total`) and `label_counts` for every client; with differential privacy, `epsilon` so far. Tables of more than 1,024
    numbers are numpy arrays, others nested lists. Record 0 is the untrained model. Kept runs of tables
    (`fedkeep.reproduce.kept`) have `hits` and `total` by class instead of `confusion`, and no record 0.
    """

    method: str
    settings: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    params: Tree = field(default_factory=dict)
    build: Callable[[Tree], nn.Module] | None = None
    about: dict[str, Any] = field(default_factory=dict)  # the experiment file, if the run has one
    saved: int | None = None  # the round of the checkpoint that `params` were read from
    folder: Path | None = None  # the run folder that it was read from
    diverged: str | None = None  # the error message of a diverged run that was read from its folder
    ended: str | None = None  # why the run ended: "finished" at its last round, or "stopped" by a callback
    released: float | None = None  # epsilon of all releases of a private federation, also of rounds that were undone
    instruments: list[dict[str, Any]] = field(default_factory=list)  # what `instruments.Every` wrote into the folder
    class_names: tuple[str, ...] | None = None  # of class 0, 1, ..., where known
    client_names: dict[int, str] = field(default_factory=dict)  # of at most 200 clients, where known
    site_names: tuple[str, ...] = ()  # of the owners of the test examples, where they are recorded
    verified: bool = True  # whether every file that it was read from has a checksum; False for runs of format 1

    @property
    def finished(self) -> bool:
        """Whether the run ended: at its last round, or because a callback stopped it."""
        reached_last = bool(self.records) and self.records[-1]["round"] >= self.settings["rounds"]
        return self.ended is not None or reached_last

    @property
    def model(self) -> nn.Module:
        """The final global model, on the CPU, as a module of the class that was trained; a new one at each access."""
        if self.build is None:
            raise FedkeepError("this history has no model: read the run with fedkeep.load_run", key="model")
        return self.build(self.params)

    def class_name(self, c: int) -> str:
        """Return what a class is called: its name, or "class 3"."""
        return f"class {c}" if self.class_names is None else self.class_names[c]

    def client_name(self, k: int) -> str:
        """Return what a client is called: its name, or "client 3"."""
        return self.client_names.get(k, f"client {k}")

    @property
    def rounds(self) -> np.ndarray:
        """The evaluated rounds, without the untrained model."""
        return np.array([r["round"] for r in self._evaluated()], dtype=int)

    @property
    def cohorts(self) -> list[list[int]]:
        """The clients that each round sampled, also those without examples: a sequence for the setting `cohorts`."""
        rounds = self._with([r for r in self.records if r["round"]], "cohort", "cohorts")
        return [sorted([*r["cohort"], *r.get("skipped", ())]) for r in rounds]

    @property
    def confusion(self) -> np.ndarray:
        """[evaluated rounds, true class, predicted class] of the global model."""
        return np.array([r["confusion"] for r in self._with(self._evaluated(), "confusion", "confusion matrices")])

    @property
    def class_accuracy(self) -> np.ndarray:
        """[evaluated rounds, classes] of the global model; NaN for classes that are not in the test set."""
        return _divided(*self._hits())

    @property
    def accuracy(self) -> np.ndarray:
        """[evaluated rounds] of the global model."""
        hits, total = self._hits()
        return np.asarray(hits.sum(1) / total.sum(1))

    @property
    def epsilon(self) -> float | None:
        """Epsilon at the delta of the settings, spent so far; None without differential privacy.

        A federation has also spent what it released in rounds that were not recorded, or were undone.
        """
        recorded = self.records[-1].get("epsilon") if self.records else None
        return max((spent for spent in (recorded, self.released) if spent is not None), default=None)

    @property
    def initial_class_accuracy(self) -> np.ndarray:
        """[classes] of the untrained model."""
        first = self.records[0] if self.records else {}
        if first.get("round") != 0:
            raise FedkeepError("the untrained model was not evaluated", key="round", value=0)
        return forgetting.class_accuracy(first["confusion"])

    def local(self, round: int) -> dict[str, np.ndarray]:
        """Return the cohort's `ids` in a round, and `class_accuracy` and `label_counts` [K, C] of its local models."""
        for record in self.records:
            if record["round"] == round and "local" in record:
                total = np.array(record["local"]["total"], dtype=float)
                return {
                    "ids": np.array(record["cohort"]),
                    "class_accuracy": np.array(record["local"]["hits"]) / np.where(total > 0, total, np.nan),
                    "label_counts": np.array(record["local"]["label_counts"]),
                }
        raise FedkeepError(
            f"the local models of round {round} were not evaluated: see eval_local_every",
            key="eval_local_every",
            value=round,
        )

    @property
    def anatomy_rounds(self) -> list[int]:
        """The rounds that `anatomy` can return: local models evaluated, global model evaluated before and after."""
        evaluated = set(self._tested())
        return [r["round"] for r in self.records if "local" in r and {r["round"] - 1, r["round"]} <= evaluated]

    def anatomy(self, round: int) -> dict[str, np.ndarray]:
        """Return where a round forgot: accuracies `before` [C], of `clients` [K, C], `after` [C], and the losses.

        `ids` and `label_counts` are those of the clients. `local_forgetting` and `aggregation_forgetting` are [K, C],
        `round_forgetting` is [C]. The local models must have been evaluated, and the global one before and after.
        """
        local, tested = self.local(round), self._tested()
        missing = [r for r in (round - 1, round) if r not in tested]
        if missing:
            raise FedkeepError(
                f"the global model of round {missing[0]} was not evaluated: see eval_every",
                key="eval_every",
                value=missing[0],
            )
        before, after = (_divided(*hits_of(tested[r])) for r in (round - 1, round))
        clients = local["class_accuracy"]
        return {
            "ids": local["ids"],
            "label_counts": local["label_counts"],
            "before": before,
            "clients": clients,
            "after": after,
            "local_forgetting": forgetting.local_forgetting(before, clients),
            "aggregation_forgetting": forgetting.aggregation_forgetting(clients, after),
            "round_forgetting": np.maximum(0.0, before - after),
        }

    def summary(self) -> dict[str, float]:
        """Return final, best and smoothed accuracy, forgetting, mean round forgetting, bytes sent and seconds.

        Other metrics are those of the last evaluated round, your own too; see docs/metrics.md.
        """
        accuracy, classes, rounds = self.accuracy, self.class_accuracy, self.rounds
        last = metrics_of(self._evaluated()[-1:])
        every = len(rounds) > 1 and bool((np.diff(rounds) == 1).all()) and rounds[0] == 1
        return {
            "final": float(accuracy[-1]),
            "best": float(accuracy.max()),
            "smoothed": float(forgetting.smoothed(accuracy)[-1]),
            "forgetting": forgetting.forgetting(classes),
            "round_forgetting": float(forgetting.round_forgetting(classes).mean()) if every else float("nan"),
            "bytes": float(sum(r["bytes_down"] + r["bytes_up"] for r in self.records if r["round"])),
            "seconds": float(sum(r["seconds"] for r in self.records if r["round"])),
            **{key: float(value[-1]) for key, value in last.items() if key != "accuracy"},  # that is `final`
        }

    def to_pandas(self) -> Any:
        """Return a DataFrame, one row per evaluated round: accuracy, losses, bytes, each class's accuracy, metrics.

        The classes' columns are class_0, class_1, ...; `class_names` has their names, where known. Kept runs of tables
        have neither learning rates nor test losses.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise FedkeepError("to_pandas needs pandas: pip install pandas") from error
        keys = ("round", "lr", "train_loss", "test_loss", "bytes_down", "bytes_up", "seconds")
        frame = pd.DataFrame([{key: r[key] for key in keys if key in r} for r in self._evaluated()])
        frame.insert(1, "accuracy", self.accuracy)
        added = {f"class_{c}": column for c, column in enumerate(self.class_accuracy.T)}
        metrics = {name: values for name, values in self.metrics().items() if name != "accuracy"}
        for name, table in self.class_metrics().items():
            if name != "recall":  # that is the class accuracy
                metrics |= {f"{name}_{c}": column for c, column in enumerate(table.T)}
        added |= {name: values for name, values in metrics.items() if not np.isnan(values).all()}
        return pd.concat([frame, pd.DataFrame(added)], axis=1).set_index("round")

    def __repr__(self) -> str:
        reached = self.records[-1]["round"] if self.records else 0
        evaluated = any(self._tested())
        accuracy = f", accuracy {self.accuracy[-1]:.3f}" if evaluated else ""
        lost = forgetting.forgetting(self.class_accuracy) if evaluated else float("nan")
        forgot = "" if np.isnan(lost) else f", forgetting {lost:.3f}"
        return f"<History of {printable(self.method)}: {reached} rounds{accuracy}{forgot}>"

    def _repr_html_(self) -> str:
        return history_html(self)

    def heat_map(self) -> Html:
        """Return the accuracy of each class over rounds as a picture for a notebook: a drop is forgetting."""
        return Html(heat_map_html(self))

    def plot(self) -> Any:
        """Return a matplotlib figure with the accuracy over rounds, in all and of each class (needs extra `plots`)."""
        from fedkeep.plots.history import plot_history  # the one import upwards: docs/adr/0012-rooms-and-layers.md

        return plot_history(self)

    def _hits(self) -> tuple[np.ndarray, np.ndarray]:
        """Return [evaluated rounds, classes] how many test examples were right, and how many there are."""
        hits, total = zip(*map(hits_of, self._evaluated()), strict=True)
        return np.array(hits), np.array(total)

    def _with(self, records: list[Record], key: str, what: str) -> list[Record]:
        """Return records that all have a key; raise an error if one lacks it."""
        if any(key not in r for r in records):
            raise FedkeepError(f"a kept run of a table has no {what}, only class accuracies", key=key)
        return records

    def _tested(self) -> dict[int, Record]:
        """Return the records of the evaluated rounds and of the untrained model, by round."""
        return {r["round"]: r for r in self.records if "confusion" in r or "hits" in r}

    def _evaluated(self) -> list[Record]:
        evaluated = [r for number, r in self._tested().items() if number >= 1]
        if not evaluated:
            raise FedkeepError("no round has been evaluated yet", key="confusion")
        return evaluated


def _divided(hits: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return the accuracy of each class; NaN for classes without examples."""
    return np.asarray(np.divide(hits, total, out=np.full(hits.shape, np.nan), where=total > 0))
