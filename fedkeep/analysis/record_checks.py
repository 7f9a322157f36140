"""Checks of a run's records: whatever passes can be compared, plotted and shown."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedkeep.errors import RunError
from fedkeep.runs.files import ROUNDS
from fedkeep.runs.history import History


def check_records(history: History) -> None:
    """Raise unless all tables of the records are counts, and all of the same number of classes."""
    classes: int | None = None
    for record in history.records:
        if "confusion" in record:
            matrix = _counts(record, record["confusion"], axes=2)
            classes = classes or matrix.shape[1]
            _require(record, matrix.shape == (classes, classes) and matrix.sum() > 0)
        if "local" in record:
            local, cohort = record["local"], _counts(record, record["cohort"], axes=1)
            total = _counts(record, local["total"], axes=1)
            classes = classes or len(total)
            _require(record, len(total) == classes)
            for key in ("hits", "label_counts"):
                shape = (len(cohort), classes) if len(cohort) else (0,)
                table = _counts(record, local[key], axes=len(shape))
                _require(record, table.shape == shape)


def _counts(record: dict[str, Any], table: Any, axes: int) -> np.ndarray:
    counts = np.asarray(table)
    right = counts.ndim == axes and (counts.dtype.kind in "iuf" or not counts.size)
    _require(record, right and (not counts.size or (counts.min() >= 0 and counts.max() < 2**62)))
    return counts


def _require(record: dict[str, Any], right: Any) -> None:
    if not right:
        number = record.get("round")
        raise RunError(f"{ROUNDS} is damaged: the tables of round {number} are invalid", key=ROUNDS, value=number)
