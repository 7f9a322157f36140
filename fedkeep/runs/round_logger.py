"""What all loggers share: the figures of a round as numbers by name, and a callback that writes every round once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedkeep import forgetting as fg
from fedkeep._util.json import flatten, without_nan
from fedkeep.errors import FedkeepError
from fedkeep.runs.history import Record
from fedkeep.runs.round_metrics import SCALARS, hits_of, metrics_of

if TYPE_CHECKING:
    from fedkeep.engine.simulation import Simulation

RoundRow = tuple[int, dict[str, float]]  # a round and its figures


class RoundFigures:
    """The figures of one round after another, as numbers by name; the record alone has neither accuracy nor forgetting.

    >>> figures = RoundFigures()
    >>> figures.add({"round": 1, "lr": 0.1, "confusion": [[9, 1], [10, 0]]})["test/accuracy"]
    0.45
    >>> later = figures.add({"round": 2, "lr": 0.1, "confusion": [[3, 7], [2, 8]]})
    >>> round(later["forgetting/so_far"], 3), later["class_accuracy/1"], later["round/lr"]
    (-0.1, 0.8, 0.1)
    """

    def __init__(self) -> None:
        self._best: np.ndarray | None = None  # [C] of the rounds before the last
        self._last: tuple[int, np.ndarray] | None = None  # the last evaluated round and its class accuracies [C]

    def add(self, record: Record) -> dict[str, float]:
        """Return the figures of the next round; those that do not exist (NaN) are left out."""
        figures = {f"round/{key}": float(value) for key, value in record.items() if _is_number(value)}
        for key in ("round", "ece"):  # the error is one of the metrics
            figures.pop(f"round/{key}", None)
        figures |= {f"metrics/{name}": value for name, value in _own_metrics(record)}
        if "confusion" in record or "hits" in record:
            figures |= self._tested(record)
        return {name: value for name, value in figures.items() if not math.isnan(value)}

    def _tested(self, record: Record) -> dict[str, float]:
        hits, total = hits_of(record)
        classes = np.divide(hits, total, out=np.full(len(total), np.nan), where=total > 0)
        metrics = metrics_of([record])
        figures = {f"test/{name}": float(metrics[name][0]) for name in SCALARS}
        figures |= {f"class_accuracy/{c}": float(a) for c, a in enumerate(classes)}
        if record["round"] == 0:
            return figures
        if self._last is not None:
            number, before = self._last
            if number == record["round"] - 1:
                figures["forgetting/round"] = float(fg.round_forgetting([before, classes])[0])
                figures["forgetting/consistency"] = float(fg.consistency([before, classes])[0])
            self._best = before if self._best is None else np.fmax(self._best, before)
            figures["forgetting/so_far"] = fg.forgetting([self._best, classes])
        self._last = record["round"], classes
        return figures


class RoundLogger(ABC):
    """A callback that writes the figures of every round to one place.

    A resumed run writes its earlier rounds too, unless the log has them already: every round is there once. So does a
    finished run that is resumed.
    """

    def __init__(self) -> None:
        self._figures: RoundFigures | None = None
        self._simulation: Simulation | None = None

    def __call__(self, simulation: Simulation, record: Record) -> None:
        """Write a round; at the first call, also the rounds before it."""
        if self._figures is not None and self._simulation is simulation:
            self._write(record["round"], self._figures.add(record))
            return
        self.close()
        self._figures, self._simulation = RoundFigures(), simulation
        earlier = [one for one in simulation.history.records if one["round"] < record["round"]]
        self._start(simulation, _rows([*earlier, record], self._figures))

    def write_recorded(self, simulation: Simulation) -> None:
        """Write all rounds of a run that is finished."""
        self(simulation, simulation.history.records[-1])

    def close(self) -> None:
        """End the log; the simulation calls this when the run ends, whatever ends it."""
        if self._simulation is not None:
            self._end(self._simulation.history.ended is not None)
        self._figures = self._simulation = None

    def _rounds(self, simulation: Simulation) -> list[RoundRow]:
        """Return all rounds so far with their figures."""
        return _rows(simulation.history.records, RoundFigures())

    @abstractmethod
    def _start(self, simulation: Simulation, rounds: list[RoundRow]) -> None:
        """Start the log with these rounds, or continue the one that a resumed run has."""

    @abstractmethod
    def _write(self, round: int, figures: dict[str, float]) -> None:
        """Write the figures of a round."""

    @abstractmethod
    def _end(self, finished: bool) -> None:
        """Close the log; `finished` is False if an error or a signal ended the run."""


def _rows(records: Iterable[Record], figures: RoundFigures) -> list[RoundRow]:
    return [(record["round"], figures.add(record)) for record in records]


def default_path(simulation: Simulation, given: str | Path | None, name: str, option: str, logger: str) -> Path:
    """Return the given path, or by default this name in the run folder; raise if there is neither."""
    if given is not None:
        return Path(given)
    if simulation.folder is None:
        raise FedkeepError(f"{logger} has nowhere to write to: set its {option}, or run_dir", key=option)
    return simulation.folder.path / name


def describe_run(simulation: Simulation) -> dict[str, Any]:
    """Return what defines a run as flat data, as trackers show it: method, data, model, number of clients, settings."""
    model = simulation.task.module(simulation.task.init)
    about = {
        "method": simulation.method.to_dict(),
        "model": type(model).__name__,
        "data": simulation.data.name,
        "clients": len(simulation.clients),
        "train": simulation.history.settings,
    }
    return {key: value for key, value in flatten(without_nan(about)).items() if value is not None}


def _own_metrics(record: Record) -> Iterator[tuple[str, float]]:
    """Yield the user's metrics, those of classes as NAME_CLASS."""
    for name, value in record.get("metrics", {}).items():
        if _is_number(value):
            yield name, float(value)
        elif isinstance(value, list):
            yield from ((f"{name}_{c}", float(one)) for c, one in enumerate(value) if one is not None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
