"""What is recorded of a trained round: what was sent, the clients' losses, and their local models' accuracy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.json import without_nan
from fedkeep._util.text import format_value, one_line
from fedkeep.engine import privacy
from fedkeep.engine.round_trainer import RoundResult
from fedkeep.engine.settings import Settings
from fedkeep.errors import FedkeepError
from fedkeep.runs.history import Record
from fedkeep.runs.packed import as_table, pack, unpack
from fedkeep.runs.round_metrics import require_metric_name, to_metric_value


def record_plan(result: RoundResult) -> Record:
    """Return the record of a round in which nobody has uploaded anything."""
    plan = result.plan
    return {
        "round": plan.round,
        "lr": result.lr,
        "cohort": plan.cohort,
        "skipped": plan.skipped,
        "bytes_down": tree.nbytes(result.shared) * len(plan.cohort) + result.bytes_sent,
        "bytes_up": 0,
        "train_loss": None,
    }


def record_cohort(result: RoundResult, y_test: Tensor, n_classes: int) -> Record:
    """Return the cohort's part of the record; waits for the device."""
    clients = result.clients
    record: Record = {"train_loss": float(clients["loss"].mean()), "bytes_up": result.bytes_up}
    if "hits" in clients:
        total = torch.bincount(y_test, minlength=n_classes)
        tables = {"hits": clients["hits"], "total": total, "label_counts": clients["label_counts"]}
        record["local"] = {key: as_table(table.cpu()) for key, table in tables.items()}
    return record


def keep_added(record: Record, measured: Record, n_classes: int, saved: bool) -> None:
    """Check what a callback did to a record, and put what it added in the form in which it is saved.

    It may not change what was `measured`. `metrics` hold numbers by name, for tables and exports. Other values are for
    the user's own use; in a run without a folder they may be anything.
    """
    for key in (key for key in measured if key != "metrics"):
        if key not in record or record[key] is not measured[key]:
            verb = "changed" if key in record else "removed"
            message = f'a callback {verb} {key} of the record; it may add other keys, and numbers to record["metrics"]'
            raise FedkeepError(message, key=key, value=type(record.get(key)).__name__)
    if not isinstance(metrics := record.get("metrics"), Mapping):
        found = format_value(metrics, most=60) if "metrics" in record else "removed"
        message = f'a callback must leave record["metrics"] a dict of numbers by name; it is {found}'
        raise FedkeepError(message, key="metrics", value=metrics)
    record["metrics"] = {require_metric_name(name): _metric(name, value, n_classes) for name, value in metrics.items()}
    for key in [key for key in record if key not in measured and key != "metrics"] if saved else []:
        record[key] = _as_saved(key, record[key])


def _as_saved(key: Any, value: Any) -> Any:
    """Return a value as it is read from a run folder; raise if that cannot hold it."""
    if not isinstance(key, str) or key == "run":  # every line of a run folder has the id of its run
        message = f"a callback added {format_value(key)} to the record: the key must be a text other than 'run'"
        raise FedkeepError(message, key=str(key), value=key)
    try:
        return json.loads(json.dumps(without_nan(value), default=pack), object_hook=unpack)
    except (TypeError, ValueError) as error:
        raise FedkeepError(
            f"a callback added {key} to the record, which a run folder cannot hold: {one_line(error)}; numbers "
            f'belong in record["metrics"]',
            key=key,
            value=type(value).__name__,
        ) from error


def _metric(name: str, value: Any, n_classes: int) -> Any:
    try:
        return to_metric_value(value, n_classes)
    except TypeError as error:
        message = f'record["metrics"]["{name}"] must be a number or one number for each of {n_classes} classes'
        raise FedkeepError(f"{message}, not {error}", key=f"metrics.{name}", value=value) from None


def make_private(record: Record, settings: Settings, past: Sequence[Record]) -> Record:
    """Return the record without what is not noised, and with epsilon after the past rounds and this one."""
    cohorts = [one["cohort"] for one in (*past, record) if "cohort" in one]
    return {**privacy.public_record(record), "epsilon": privacy.epsilon(settings, cohorts)}
