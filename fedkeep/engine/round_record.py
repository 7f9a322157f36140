"""What is recorded of a trained round: what was sent, the clients' losses, and their local models' accuracy."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.json import without_nan
from fedkeep._util.text import one_line
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


def keep_added(record: Record, known: Collection[str], saved: bool) -> None:
    """Check what callbacks added to a record with these known keys, and put it in the form in which it is saved.

    `metrics` hold numbers by name, for tables and exports. Other values are for the user's own use; in a run without a
    folder they may be anything.
    """
    record["metrics"] = {require_metric_name(name): _metric(name, value) for name, value in record["metrics"].items()}
    if not record["metrics"]:
        del record["metrics"]
    for key in [key for key in record if key not in known] if saved else []:
        try:
            record[key] = json.loads(json.dumps(without_nan(record[key]), default=pack), object_hook=unpack)
        except (TypeError, ValueError) as error:
            raise FedkeepError(
                f"a callback added {key} to the record, which a run folder cannot hold: {one_line(error)}; numbers "
                f'belong in record["metrics"]',
                key=key,
                value=type(record[key]).__name__,
            ) from error


def _metric(name: str, value: Any) -> Any:
    try:
        return to_metric_value(value)
    except TypeError as error:
        message = f'record["metrics"]["{name}"] must be a number or one number per class, not {error}'
        raise FedkeepError(message, key=f"metrics.{name}", value=value) from None


def make_private(record: Record, settings: Settings, past: Sequence[Record]) -> Record:
    """Return the record without what is not noised, and with epsilon after the past rounds and this one."""
    cohorts = [one["cohort"] for one in (*past, record) if "cohort" in one]
    return {**privacy.public_record(record), "epsilon": privacy.epsilon(settings, cohorts)}
