"""Kept runs: what a table needs of its runs, all of them in one small compressed file.

A line is one run as JSON: its name (column/row-seed-n), its experiment file, and for every evaluated round how many
test examples of each class were right. That is enough for accuracies and forgetting; confusion matrices, weights and
most cohorts are not kept. The same counts of local models are, where they were evaluated, and of what instruments
recorded, the last round's small studies. A run of 200 rounds takes about 5 kB, and half a kB for each round's local
models.
"""

from __future__ import annotations

import functools
import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedkeep._util.validate import first_error
from fedkeep.errors import FedkeepError, RunError
from fedkeep.reproduce.recorded import kept_studies
from fedkeep.runs.experiment_file import require_settings
from fedkeep.runs.files import write_atomic
from fedkeep.runs.history import History
from fedkeep.runs.reading import settings_of
from fedkeep.runs.round_metrics import hits_of

SUFFIX = ".jsonl.gz"
_MAX_BYTES = 256 << 20  # of an uncompressed file
_DIGITS = {"seconds": 3, "train_loss": 4}  # that are kept


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Local(_Part):
    """The local models of one round; rows are clients, columns are classes."""

    round: int
    cohort: list[int]
    hits: list[list[int]]
    label_counts: list[list[int]]


class _Kept(_Part):
    """One line."""

    run: str = Field(min_length=1, max_length=200)
    experiment: dict[str, Any]
    total: list[int]  # test examples of each class; empty if the run diverged before its first evaluated round
    rounds: list[int]
    hits: list[list[int]]  # by round and class
    bytes_down: list[int]
    bytes_up: list[int]
    seconds: list[float]
    train_loss: list[float | None]
    ended: str | None = None
    diverged: str | None = None
    instruments: dict[str, Any] | None = None  # of the last analysed round
    local: list[_Local] | None = None

    @model_validator(mode="after")
    def _require_one_value_per_round(self) -> _Kept:
        lengths = {len(one) for one in (self.rounds, self.hits, *(getattr(self, key) for key in _PER_ROUND))}
        counts = [row for row in self.hits if len(row) != len(self.total) or not row or min(row) < 0]
        if lengths != {len(self.rounds)} or counts or self.rounds != sorted(set(self.rounds)):
            raise ValueError("there must be one value per round, and one count per class")
        if any(hit > total for row in self.hits for hit, total in zip(row, self.total, strict=True)):
            raise ValueError("there are more hits than examples")
        return self

    @model_validator(mode="after")
    def _require_one_row_per_client(self) -> _Kept:
        for local in self.local or ():
            shape = len(local.cohort), {len(self.total)}
            if any((len(rows), {len(row) for row in rows}) != shape for rows in (local.hits, local.label_counts)):
                raise ValueError(f"round {local.round}: there must be one row per client, and one count per class")
        return self


_PER_ROUND = ("bytes_down", "bytes_up", "seconds", "train_loss")


def read(path: Path) -> dict[str, History]:
    """Return the runs in a file by name, none if there is no file; raise a RunError if it is damaged."""
    found = _read(path, path.stat().st_mtime_ns) if path.exists() else {}
    if isinstance(found, RunError):
        raise found.with_traceback(None)
    return found


@functools.lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> dict[str, History] | RunError:
    """Return the runs, or the error if the file is damaged, so that it too is read once."""
    try:
        with gzip.open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES >> 20} MiB")
        kept = [_Kept.model_validate_json(line) for line in text.splitlines()]
        return {one.run: _to_history(path, one) for one in kept}
    except ValidationError as error:
        return RunError(f"{path} is damaged: {first_error('', error)}", key=path.name)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        return RunError(f"{path} is damaged: {error}", key=path.name)


def write(path: Path, runs: Mapping[str, History]) -> None:
    """Add finished or diverged runs to a file, or replace those of the same name. The order is that of the names.

    Several processes may add to one file: a lock beside it lets one follow the other.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        _write(path, runs)


def _write(path: Path, runs: Mapping[str, History]) -> None:
    lines = {name: _from_history(name, history) for name, history in {**read(path), **runs}.items()}
    text = "".join(lines[name].model_dump_json(exclude_none=True) + "\n" for name in sorted(lines))
    write_atomic(path, gzip.compress(text.encode(), mtime=0))
    _read.cache_clear()  # two writes can have the same time


def _to_history(path: Path, kept: _Kept) -> History:
    about = kept.experiment
    require_settings(path, about)
    columns = {key: getattr(kept, key) for key in _PER_ROUND}
    records = [
        {"round": number, "hits": kept.hits[t], "total": kept.total, **{key: one[t] for key, one in columns.items()}}
        for t, number in enumerate(kept.rounds)
    ]
    local = {one.round: one.model_dump(exclude={"round", "cohort"}) for one in kept.local or ()}
    cohorts = {one.round: one.cohort for one in kept.local or ()}
    for record in records:
        if record["round"] in local:
            record |= {"cohort": cohorts[record["round"]], "local": {**local[record["round"]], "total": kept.total}}
    history = History(
        about["method"]["name"], settings_of(about), records, about=about, ended=kept.ended, diverged=kept.diverged
    )
    history.instruments = [] if kept.instruments is None else [kept.instruments]
    return history


def _from_history(name: str, history: History) -> _Kept:
    if not (history.finished or history.diverged):
        raise FedkeepError(f"{name} is not finished; only finished and diverged runs are kept", key="run", value=name)
    rows: dict[str, list[Any]] = {key: [] for key in ("rounds", "hits", *_PER_ROUND)}
    total: list[int] = []
    carried = dict.fromkeys(_PER_ROUND[:3], 0.0)  # of rounds that were not evaluated, for the next one that was
    for record in history.records:
        if not record["round"]:
            continue
        carried = {key: carried[key] + record.get(key, 0) for key in carried}
        if "confusion" not in record and "hits" not in record:
            continue
        hits, counts = hits_of(record)
        total = counts.tolist()
        row = {"rounds": record["round"], "hits": hits.tolist(), "train_loss": record.get("train_loss"), **carried}
        for key, value in row.items():
            rows[key].append(round(value, _DIGITS[key]) if key in _DIGITS and value is not None else value)
        carried = dict.fromkeys(carried, 0.0)
    for key in ("bytes_down", "bytes_up"):
        rows[key] = [int(value) for value in rows[key]]
    return _Kept(
        run=name,
        experiment=json.loads(json.dumps(history.about)),
        total=total,
        ended=history.ended,
        diverged=history.diverged,
        instruments=_last_studies(history),
        local=_local_models(history, rows["rounds"]) or None,
        **rows,
    )


def _local_models(history: History, evaluated: list[int]) -> list[_Local]:
    """Return the hits of the local models in the evaluated rounds."""
    return [
        _Local(
            round=record["round"],
            cohort=record["cohort"],
            **{key: np.asarray(record["local"][key]).tolist() for key in ("hits", "label_counts")},
        )
        for record in history.records
        if "local" in record and record["round"] in evaluated
    ]


def _last_studies(history: History) -> dict[str, Any] | None:
    """Return the small studies of the last analysed round; None if there are none."""
    last = history.instruments[-1] if history.instruments else {}
    small = kept_studies(last)
    return {key: value for key, value in last.items() if key in {"after_round", *small}} if small else None
