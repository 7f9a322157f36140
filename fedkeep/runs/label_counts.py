"""Label counts of a run: how many examples of each class a client holds, stored as `split.json`.

A table is `{"clients": N, "ids": [...], "counts": [[examples of each class], ...]}`. Of many clients it holds some,
evenly spaced; `ids` are theirs, one for each row of `counts`. Where they are known, `class_names` has the name of each
class, and `client_names` that of each client in `ids`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep._util.arrays import evenly_spaced
from fedkeep.data.dataset import Dataset
from fedkeep.data.partition import Partition
from fedkeep.errors import RunError
from fedkeep.runs.experiment_file import ExperimentFile, read_experiment_file
from fedkeep.runs.files import SPLIT, is_there, read_bytes, write_atomic
from fedkeep.runs.history import History, Record
from fedkeep.runs.seals import damaged, parse_json, seal_json, unseal_json

MAX_CLIENTS = 200


def write_label_counts(folder: Path, clients: Partition, data: Dataset, run: str | None = None) -> None:
    """Write the label counts into a run folder unless they are there already; sealed, if the run has an id."""
    if not is_there(file := folder / SPLIT):
        counts = count_labels(clients, data.y_train, data.n_classes)
        if data.class_names is not None:
            counts["class_names"] = list(data.class_names)
        if clients.owners is not None:
            counts["client_names"] = list(shown_names(clients).values())
        write_atomic(file, json.dumps(counts).encode() if run is None else seal_json(counts, run, SPLIT)[0])


def count_labels(clients: Partition, y: Any, n_classes: int, most: int = MAX_CLIENTS) -> dict[str, Any]:
    """Return the label counts of the clients; of more than `most`, those of evenly spaced ones.

    >>> count_labels(Partition(np.arange(4), np.array([0, 2, 4])), [0, 0, 0, 1], 2)
    {'clients': 2, 'ids': [0, 1], 'counts': [[2, 0], [1, 1]]}
    """
    y = np.asarray(y)
    ids = evenly_spaced(len(clients), most).tolist()
    counts = [np.bincount(y[clients[k]], minlength=n_classes).tolist() for k in ids]
    return {"clients": len(clients), "ids": ids, "counts": counts}


def shown_names(clients: Partition) -> dict[int, str]:
    """Return the names of the clients whose label counts are stored, by client; empty if clients have no names."""
    if clients.owners is None:
        return {}
    return {k: clients.name(k) for k in evenly_spaced(len(clients), MAX_CLIENTS).tolist()}


def label_counts_of(history: History) -> dict[str, Any] | None:
    """Return the label counts of a run: from its split.json, otherwise from its records, otherwise None."""
    return (read_label_counts(history.folder) if history.folder else None) or _from_records(history.records)


def read_label_counts(folder: Path, experiment: ExperimentFile | None = None) -> dict[str, Any] | None:
    """Return the label counts in a run folder, or None; raise if they are damaged or of another run.

    In a run of format 1, damaged label counts count as missing.
    """
    if not is_there(file := folder / SPLIT):
        return None
    run = (experiment or read_experiment_file(folder)).run
    try:
        data = read_bytes(file)
        table = (
            parse_json(str(file), SPLIT, data) if run is None else unseal_json(str(file), SPLIT, data, run, SPLIT)[0]
        )
        counts = np.asarray(table["counts"], dtype=int)
        if counts.ndim != 2 or len(counts) != len(table["ids"]):
            raise damaged(str(file), SPLIT, "its counts have another shape")
        ids, names = [int(k) for k in table["ids"]], {}
        for key, number in (("class_names", counts.shape[1]), ("client_names", len(counts))):
            if key in table:
                names[key] = [str(name) for name in table[key]]
                if len(names[key]) != number:
                    raise damaged(str(file), SPLIT, f"it has {len(names[key])} {key} for {number} counts")
        return {"clients": int(table["clients"]), "ids": ids, "counts": counts.tolist(), **names}
    except (RunError, ValueError, KeyError, TypeError, OverflowError) as error:
        if run is None:
            return None
        raise error if isinstance(error, RunError) else damaged(str(file), SPLIT, str(error)) from error


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
    return {"clients": len(ids), "ids": shown, "counts": [np.asarray(counts[k]).tolist() for k in shown]}
