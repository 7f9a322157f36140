"""Who holds which classes, kept with a run: `split.json`, with some of the clients where there are many.

A record is `{"clients": N, "ids": [...], "counts": [[examples of each class], ...]}`; ids are those that are shown.
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
    """Write the split into a run's folder, if it is not there."""
    if not (file := folder / SPLIT).exists():
        write_atomic(file, json.dumps(count_labels(clients, y, n_classes)).encode())


def count_labels(clients: Partition, y: Any, n_classes: int, most: int = MAX_CLIENTS) -> dict[str, Any]:
    """Count each client's labels; of many clients, those at even distances.

    >>> count_labels(Partition(np.arange(4), np.array([0, 2, 4])), [0, 0, 0, 1], 2)
    {'clients': 2, 'ids': [0, 1], 'counts': [[2, 0], [1, 1]]}
    """
    y = np.asarray(y)
    ids = evenly_spaced(len(clients), most).tolist()
    counts = [np.bincount(y[clients[k]], minlength=n_classes).tolist() for k in ids]
    return {"clients": len(clients), "ids": ids, "counts": counts}


def label_counts_of(history: History) -> dict[str, Any] | None:
    """Return a run's split: as it was kept, or else as far as its rounds tell of it, or None."""
    return (_kept(history.folder) if history.folder else None) or _seen(history.records)


def _kept(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / SPLIT).read_text())
        counts = np.asarray(found["counts"], dtype=int)
        if counts.ndim != 2 or len(counts) != len(found["ids"]):
            return None
        return {"clients": int(found["clients"]), "ids": [int(k) for k in found["ids"]], "counts": counts.tolist()}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _seen(records: Iterable[Record]) -> dict[str, Any] | None:
    """Gather the label counts of the clients whose local models were evaluated."""
    seen: dict[int, list[int]] = {}
    for record in records:
        if "local" in record:
            seen.update(zip(record["cohort"], record["local"]["label_counts"], strict=True))
    if not seen:
        return None
    ids = sorted(seen)
    shown = [ids[i] for i in evenly_spaced(len(ids), MAX_CLIENTS)]
    return {"clients": len(ids), "ids": shown, "counts": [seen[k] for k in shown]}
