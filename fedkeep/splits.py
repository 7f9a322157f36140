"""Who holds which classes, kept with a run: `split.json`, with some of the clients where there are many.

A record is `{"clients": N, "ids": [...], "counts": [[examples of each class], ...]}`; ids are those that are shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.data.partition import Partition
from fedkeep.history import History, Record
from fedkeep.store import write_atomic

SPLIT, MOST = "split.json", 200


def keep(folder: Path, clients: Partition, y: Any, n_classes: int) -> None:
    """Write the split into a run's folder, if it is not there."""
    if not (file := folder / SPLIT).exists():
        write_atomic(file, json.dumps(describe(clients, y, n_classes)).encode())


def describe(clients: Partition, y: Any, n_classes: int, most: int = MOST) -> dict[str, Any]:
    """Count each client's labels; of many clients, those at even distances.

    >>> describe(Partition(np.arange(4), np.array([0, 2, 4])), [0, 0, 0, 1], 2)
    {'clients': 2, 'ids': [0, 1], 'counts': [[2, 0], [1, 1]]}
    """
    y = np.asarray(y)
    ids = evenly(len(clients), most).tolist()
    counts = [np.bincount(y[clients[k]], minlength=n_classes).tolist() for k in ids]
    return {"clients": len(clients), "ids": ids, "counts": counts}


def evenly(n: int, most: int) -> np.ndarray:
    """Choose at most so many of n places, at even distances, the first and the last among them.

    >>> evenly(10, 4).tolist(), evenly(3, 4).tolist()
    ([0, 3, 6, 9], [0, 1, 2])
    """
    return np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(int))


def of(history: History) -> dict[str, Any] | None:
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
    shown = [ids[i] for i in evenly(len(ids), MOST)]
    return {"clients": len(ids), "ids": shown, "counts": [seen[k] for k in shown]}
