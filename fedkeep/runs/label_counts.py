"""Label counts of a run: how many examples of each class a client holds, stored as `split.json`.

A table is `{"clients": N, "ids": [...], "counts": [[examples of each class], ...]}`. Of many clients it holds some,
evenly spaced; `ids` are theirs, one for each row of `counts`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep._util.arrays import evenly_spaced
from fedkeep.data.partition import Partition
from fedkeep.runs.files import SPLIT, write_atomic
from fedkeep.runs.history import History, Record

MAX_CLIENTS = 200


def write_label_counts(folder: Path, clients: Partition, y: Any, n_classes: int) -> None:
    """Write the label counts into a run folder unless they are there already."""
    if not (file := folder / SPLIT).exists():
        write_atomic(file, json.dumps(count_labels(clients, y, n_classes)).encode())


def count_labels(clients: Partition, y: Any, n_classes: int, most: int = MAX_CLIENTS) -> dict[str, Any]:
    """Return the label counts of the clients; of more than `most`, those of evenly spaced ones.

    >>> count_labels(Partition(np.arange(4), np.array([0, 2, 4])), [0, 0, 0, 1], 2)
    {'clients': 2, 'ids': [0, 1], 'counts': [[2, 0], [1, 1]]}
    """
    y = np.asarray(y)
    ids = evenly_spaced(len(clients), most).tolist()
    counts = [np.bincount(y[clients[k]], minlength=n_classes).tolist() for k in ids]
    return {"clients": len(clients), "ids": ids, "counts": counts}


def label_counts_of(history: History) -> dict[str, Any] | None:
    """Return the label counts of a run: from its split.json, otherwise from its records, otherwise None."""
    return (_read(history.folder) if history.folder else None) or _from_records(history.records)


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        table = json.loads((folder / SPLIT).read_text())
        counts = np.asarray(table["counts"], dtype=int)
        if counts.ndim != 2 or len(counts) != len(table["ids"]):
            return None
        return {"clients": int(table["clients"]), "ids": [int(k) for k in table["ids"]], "counts": counts.tolist()}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _from_records(records: Iterable[Record]) -> dict[str, Any] | None:
    """Return the label counts of the clients whose local models were evaluated."""
    counts: dict[int, list[int]] = {}
    for record in records:
        if "local" in record:
            counts.update(zip(record["cohort"], record["local"]["label_counts"], strict=True))
    if not counts:
        return None
    ids = sorted(counts)
    shown = [ids[i] for i in evenly_spaced(len(ids), MAX_CLIENTS)]
    return {"clients": len(ids), "ids": shown, "counts": [counts[k] for k in shown]}
