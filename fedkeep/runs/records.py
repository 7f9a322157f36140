"""Records of a run: the lines of `rounds.jsonl`, one per round, each sealed and chained to the line before."""

from __future__ import annotations

import itertools
import json
import numbers
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.errors import RunError
from fedkeep.runs.experiment_file import ExperimentFile, read_experiment_file
from fedkeep.runs.files import read_bytes
from fedkeep.runs.history import Record
from fedkeep.runs.packed import LARGEST_LIST, as_table, pack, unpack
from fedkeep.runs.seals import damaged, parse_json, seal_json, unseal_json


@dataclass(frozen=True)
class Lines:
    """The complete lines of rounds.jsonl: their records, the checksum of each (format 2), and where each ends."""

    records: list[Record] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # bytes from the file's start


def format_record(record: Record, run: str | None, previous: str) -> tuple[bytes, str]:
    """Return a record as a line, and its checksum, which covers that of the line before. Format 1 has none."""
    if run is None:
        return json.dumps(record, default=pack).encode() + b"\n", ""
    line, check = seal_json(record, run, previous, default=pack)
    return line + b"\n", check


def read_records(path: Path) -> list[Record]:
    """Return the records of a run's rounds.jsonl: those of all complete lines."""
    return read_lines(path, read_experiment_file(path.parent)).records


def read_lines(path: Path, experiment: ExperimentFile, n_bytes: int | None = None) -> Lines:
    """Return the complete lines of rounds.jsonl, or those of its first `n_bytes` bytes; raise if one is damaged."""
    data = read_bytes(path)
    if n_bytes is not None:
        if len(data) < n_bytes:
            raise RunError(
                f"{path} is truncated: it has {len(data)} bytes, the checkpoint was written after {n_bytes}",
                key=path.name,
                value=len(data),
                valid=[n_bytes],
            )
        data = data[:n_bytes]
    complete, _, _ = data.rpartition(b"\n")
    lines, check, end = Lines(), experiment.checksum, 0
    for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
        expected = lines.records[-1]["round"] + 1 if lines.records else None
        record, check = _parse(path, number, line, experiment.run, check, expected)
        end += len(line) + 1
        lines.records.append(record)
        lines.checks.append(check)
        lines.ends.append(end)
    return lines


def _parse(
    path: Path, number: int, line: bytes, run: str | None, previous: str, expected: int | None
) -> tuple[Record, str]:
    where, name = f"{path}, line {number}", path.name
    try:
        if run is None:
            record, check = parse_json(where, name, line, number), ""
            if "check" in record:
                raise damaged(where, name, "it has a checksum, but the experiment file has none", number)
        else:
            record, check = unseal_json(where, name, line, run, previous, number)
    except RunError:
        _require_round(where, name, _round_of(line), expected)  # a missing line is reported as such
        raise
    record = _unpacked(where, name, record, number)
    _require_round(where, name, record["round"], expected)
    return record, check


def _round_of(line: bytes) -> Any:
    try:
        return json.loads(line)["round"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def _require_round(where: str, name: str, number: Any, expected: int | None) -> None:
    if isinstance(number, int) and expected is not None and number != expected:
        raise RunError(f"{where} is of round {number} instead of {expected}", key=name, value=number, valid=[expected])


def _unpacked(where: str, name: str, record: Record, number: int) -> Record:
    """Return a record with its tables unpacked; raise if it is not what `History` can read."""
    try:
        if "confusion" in record:
            record["confusion"] = _table(record["confusion"])
        if isinstance(local := record.get("local"), dict):
            record["local"] = {key: _table(value) for key, value in local.items()}
        if isinstance(sites := record.get("sites"), dict):
            record["sites"] = {key: _table(value) for key, value in sites.items()}
        _require_record(record)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(where, name, f"its record is incomplete or invalid ({error})", number) from error
    return record


def _table(value: Any) -> Any:
    value = unpack(value)
    large = isinstance(value, list) and len(value) * (len(value[0]) if value and isinstance(value[0], list) else 1)
    return as_table(value) if large > LARGEST_LIST else value


def _require_record(record: Record) -> None:
    number = record["round"]
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"round {number!r}")
    for key in ("bytes_down", "bytes_up", "seconds") if number else ():
        if not isinstance(record[key], numbers.Real):
            raise ValueError(f"{key} is {record[key]!r}")
    classes = _shape(record["confusion"], 2)[0] if "confusion" in record else None
    if classes is not None and (_shape(record["confusion"], 2) != (classes, classes) or not classes):
        raise ValueError("the confusion matrix is not square")
    _require_metrics(record, classes)
    if "local" in record:
        local, clients = record["local"], len(record["cohort"])
        total = _shape(local["total"], 1)
        for key in ("hits", "label_counts"):
            if _shape(local[key], 2) != (clients, *total):
                raise ValueError(f"local.{key} has another shape")


def _require_metrics(record: Record, classes: int | None) -> None:
    """Raise unless the metrics of a record are numbers, or None where there is none."""
    own = record.get("metrics", {})
    numbers_by_class = [value for value in own.values() if isinstance(value, list)]
    _require_numbers("ece", [record.get("ece")], 1)
    _require_numbers("metrics", [value for value in own.values() if not isinstance(value, list)])
    for values in numbers_by_class:
        _require_numbers("metrics", values)
    if record.get("auc") is not None:
        _require_numbers("auc", record["auc"], classes)
    if "sites" in record:
        sites, shape = record["sites"], _shape(record["sites"]["examples"], 2)
        if any(_shape(sites[key], 2) != shape for key in ("predicted", "right")) or shape[1] != classes:
            raise ValueError("the tables of sites have another shape")
        for key in ("auc", "ece"):
            _require_numbers(f"sites.{key}", sites[key], shape[0])


def _require_numbers(key: str, values: Any, length: int | None = None) -> None:
    valid = isinstance(values, list) and all(v is None or isinstance(v, numbers.Real) for v in values)
    if not valid or (length is not None and len(values) != length):
        raise ValueError(f"{key} is not a list of {'' if length is None else f'{length} '}numbers")


def _shape(table: Any, axes: int) -> tuple[int, ...]:
    """Return the shape of a table of numbers; raise if it is anything else."""
    if isinstance(table, np.ndarray):
        return tuple(table.shape)
    rows = table if axes == 2 else [table]
    lengths = {len(row) for row in rows}
    if len(lengths) > 1 or not set(map(type, itertools.chain.from_iterable(rows))) <= {int, float, bool}:
        raise ValueError("a table is ragged or holds something else than numbers")
    width = lengths.pop() if lengths else 0
    return (len(rows), width) if axes == 2 else (width,)
