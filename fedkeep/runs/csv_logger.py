"""CSV log of a run, written round by round.

fk.simulate(..., callbacks=[fk.CSVLogger("log.csv")])
"""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fedkeep.errors import RunError
from fedkeep.runs.files import LOG_CSV, open_to_append, write_all, write_atomic
from fedkeep.runs.round_logger import RoundLogger, RoundRow, default_path

if TYPE_CHECKING:
    from fedkeep.engine.simulation import Simulation

_COLUMNS = {
    "test/accuracy": "accuracy",
    "forgetting/so_far": "forgetting",
    "forgetting/round": "round_forgetting",
    "forgetting/consistency": "consistency",
}


class CSVLogger(RoundLogger):
    """A callback that writes a CSV file with one row per round, row 0 being the untrained model.

    The columns are round, accuracy, forgetting, round_forgetting, consistency, the record's numbers (lr, train_loss,
    test_loss, bytes_down, ...), the accuracy of each class, class_0, class_1, ..., and the other metrics (macro_f1,
    auc, ...), your own too. Cells without a value are empty. When a round has a number that no round before it had, the
    file is replaced by one with a column for it.
    `file` is by default `log.csv` in the run folder. An existing file is replaced when the run starts or is resumed; a
    resumed run writes its earlier rounds again.
    """

    def __init__(self, file: str | Path | None = None) -> None:
        super().__init__()
        self.file = None if file is None else Path(file)
        self._path, self._columns, self._handle = Path(), dict[str, str](), -1

    def _start(self, simulation: Simulation, rounds: list[RoundRow]) -> None:
        self._path = default_path(simulation, self.file, LOG_CSV, "file", "CSVLogger")
        self._columns = {
            **_COLUMNS,
            **{name: name.partition("/")[2] for _, figures in rounds for name in _numbers(figures)},
            **{f"class_accuracy/{c}": f"class_{c}" for c in range(simulation.task.n_classes)},
        }
        write_atomic(self._path, _as_csv([["round", *self._columns.values()], *(self._row(*one) for one in rounds)]))
        self._handle = open_to_append(self._path)

    def _write(self, round: int, figures: dict[str, float]) -> None:
        if self._simulation is not None and not self._columns.keys() >= set(_numbers(figures)):
            self._end(finished=False)
            self._start(self._simulation, self._rounds(self._simulation))
            return
        try:
            write_all(self._handle, _as_csv([self._row(round, figures)]))
        except OSError as error:
            raise RunError(f"{self._path} could not be written ({error.strerror})", key=self._path.name) from error

    def _row(self, round: int, figures: dict[str, float]) -> list[str]:
        return [str(round), *(_format(figures[name]) if name in figures else "" for name in self._columns)]

    def _end(self, finished: bool) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1


def _numbers(figures: dict[str, float]) -> list[str]:
    """Return the names of the figures that have a column if some round has them."""
    return [name for name in figures if name.startswith(("test/", "round/", "metrics/"))]


def _as_csv(rows: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _format(value: float) -> str:
    """Return a number as the shortest text that reads back as the same; whole ones without a decimal point.

    >>> _format(123456.0), _format(0.1)
    ('123456', '0.1')
    """
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
