"""What is recorded of a trained round: what was sent, the clients' losses, and their local models' accuracy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.engine import privacy
from fedkeep.engine.round_trainer import RoundResult
from fedkeep.engine.settings import Settings
from fedkeep.runs.history import Record
from fedkeep.runs.packed import as_table


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


def make_private(record: Record, settings: Settings, past: Sequence[Record]) -> Record:
    """Return the record without what is not noised, and with epsilon after the past rounds and this one."""
    cohorts = [one["cohort"] for one in (*past, record) if "cohort" in one]
    return {**privacy.public_record(record), "epsilon": privacy.epsilon(settings, cohorts)}
