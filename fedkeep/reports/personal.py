"""The data of the report's section on personalised accuracy, for runs that recorded it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedkeep._util import arrays
from fedkeep.analysis.groups import Group
from fedkeep.analysis.personal import measured_groups, personal_columns

MAX_DOTS = 300  # of one row


def personal_data(groups: list[Group]) -> list[dict[str, Any]]:
    """Return a table for each way in which personalised accuracy was measured, with every client's accuracy.

    `clients` are those of all seeds, from the least to the most accurate, thinned to what a row can show.
    """
    labels = [group.label for group in groups]
    tables = []
    for measured in measured_groups(groups):
        columns = personal_columns(measured)
        rows = [
            {
                "index": labels.index(row.label),
                "label": row.label,
                "title": groups[labels.index(row.label)].title,
                "model": row.model_text,
                "cells": row.cells(columns),
                "mean": row.mean["mean"],
                "worst_tenth": row.mean["worst_tenth"],
                "number": len(row.clients),
                "clients": _thinned(row.clients).round(4),
            }
            for row in measured.rows
        ]
        about = {"title": measured.title, "caption": measured.caption, "columns": list(columns.values())}
        tables.append({**about, "rows": rows})
    return tables


def _thinned(values: tuple[float, ...]) -> np.ndarray:
    ordered = np.sort(np.array(values))
    return np.asarray(ordered[arrays.evenly_spaced(len(ordered), MAX_DOTS)])
