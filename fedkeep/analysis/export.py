"""Tables as files: CSV, or Parquet with the extra `data`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedkeep import forgetting as fg
from fedkeep._util.optional import require_extra
from fedkeep._util.text import did_you_mean
from fedkeep.errors import FedkeepError
from fedkeep.runs.files import write_atomic
from fedkeep.runs.history import History, Record
from fedkeep.runs.reading import load_run, read_instruments

SUFFIXES = (".csv", ".parquet")
_TEXT = ("run", "method", "measure")
_WHOLE = ("seed", "round", "class", "client")


def require_table_file(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is read."""
    if path.suffix.lower() not in SUFFIXES:
        raise FedkeepError(f"{path.name} is neither CSV nor Parquet: {did_you_mean(path.suffix.lower(), SUFFIXES)}")
    if not path.parent.is_dir():
        raise FedkeepError(f"there is no folder {path.parent} to write {path.name} in")
    if path.suffix.lower() == ".parquet":
        require_extra("pyarrow.parquet", "data", "Parquet")


def write_table(path: str | Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> int:
    """Write rows into a file, whole or not at all, and return how many there were."""
    path = Path(path)
    require_table_file(path)
    rows = list(rows)
    buffer = io.BytesIO()
    if path.suffix.lower() == ".csv":
        text = io.TextIOWrapper(buffer, encoding="utf-8", newline="")
        write_csv(text, columns, rows)
        text.flush()
    else:
        _parquet(buffer, columns, rows)
    write_atomic(path, buffer.getvalue())
    return len(rows)


def write_csv(file: IO[str], columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as CSV into an open file; what a row lacks is empty. Return how many there were."""
    out = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    out.writeheader()
    number = 0
    for row in rows:
        out.writerow(row)
        number += 1
    return number


def _parquet(buffer: io.BytesIO, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    arrow, parquet = require_extra("pyarrow", "data", "Parquet"), require_extra("pyarrow.parquet", "data", "Parquet")

    def kind(name: str) -> Any:
        return arrow.string() if name in _TEXT else arrow.int64() if name in _WHOLE else arrow.float64()

    arrays = [arrow.array([row.get(name) for row in rows], kind(name)) for name in columns]
    parquet.write_table(arrow.table(arrays, names=list(columns)), buffer)


"""Every per-round figure of a run as rows of one table.

Long, the default: a row is one number, `run, method, seed, round, measure, class, client, value`; class and client are
empty where a measure has none. Wide: a row is one round, with a column per measure, and per measure and class; what
belongs to single clients is left out. Numbers that do not exist (a class that the test set lacks) have no row.
"""


COLUMNS = ("run", "method", "seed", "round", "measure", "class", "client", "value")
Row = dict[str, Any]
_PLAIN = ("lr", "train_loss", "test_loss", "bytes_down", "bytes_up", "seconds")


def long_table(paths: Iterable[str | Path]) -> Iterator[Row]:
    """Yield a row per number, run after run."""
    for path in map(Path, paths):
        history = load_run(path, weights=False)
        seed = history.about.get("seed")
        for found in _figures(history, path):
            if np.isfinite(found["value"]):
                yield {"run": path.name, "method": history.method, "seed": seed, "class": None, "client": None, **found}


def wide_table(paths: Iterable[str | Path]) -> tuple[list[str], list[Row]]:
    """Return (columns, a row per run and round)."""
    rows: dict[tuple[Any, ...], Row] = {}
    columns = dict.fromkeys(("run", "method", "seed", "round"))
    for found in long_table(paths):
        if found["client"] is not None:
            continue
        key = tuple(found[name] for name in ("run", "method", "seed", "round"))
        row = rows.setdefault(key, dict(zip(("run", "method", "seed", "round"), key, strict=True)))
        name = found["measure"] if found["class"] is None else f"{found['measure']}_{found['class']}"
        columns[name] = None
        row[name] = found["value"]
    return list(columns), list(rows.values())


def _figures(history: History, path: Path) -> Iterator[Row]:
    seen: list[tuple[int, np.ndarray]] = []  # the evaluated rounds from 1 on
    for record in history.records:
        yield from _plain(record)
        if "confusion" in record:
            yield from _of_global(record, seen)
        if "local" in record:
            yield from _of_local(history, record["round"])
    for study in read_instruments(path):
        yield from _of_study(study)


def _plain(record: Record) -> Iterator[Row]:
    for name in _PLAIN:
        if record.get(name) is not None:
            yield {"round": record["round"], "measure": name, "value": float(record[name])}


def _of_global(record: Record, seen: list[tuple[int, np.ndarray]]) -> Iterator[Row]:
    """What one evaluation says, alone and beside those before it."""
    number, classes = record["round"], fg.class_accuracy(record["confusion"])

    def row(measure: str, value: Any, c: int | None = None) -> Row:
        return {"round": number, "measure": measure, "class": c, "value": float(value)}

    yield row("accuracy", fg.accuracy(record["confusion"]))
    yield from (row("class_accuracy", a, c) for c, a in enumerate(classes))
    if number == 0:
        return
    if seen and seen[-1][0] == number - 1:
        pair = np.stack([seen[-1][1], classes])
        yield row("round_forgetting", fg.round_forgetting(pair)[0])
        yield row("consistency", fg.consistency(pair)[0])
    seen.append((number, classes))
    yield row("forgetting", fg.forgetting(np.stack([a for _, a in seen])))


def _of_local(history: History, number: int) -> Iterator[Row]:
    """What became of each client's own model."""
    local = history.local(number)
    by_class = {"local_class_accuracy": local["class_accuracy"], "label_count": local["label_counts"]}
    evaluated = {r["round"] for r in history.records if "confusion" in r}
    if {number - 1, number} <= evaluated:
        anatomy = history.anatomy(number)
        by_class |= {name: anatomy[name] for name in ("local_forgetting", "aggregation_forgetting")}
        by_class["forgetting_degree"] = fg.forgetting_degree(anatomy["before"], anatomy["clients"])
    by_client = {
        "personalised": fg.personalised(local["class_accuracy"], local["label_counts"]),
        "out_local": fg.out_local(local["class_accuracy"], local["label_counts"]),
    }
    for k, client in enumerate(local["ids"].tolist()):
        for measure, values in by_client.items():
            yield {"round": number, "measure": measure, "client": client, "value": float(values[k])}
        for measure, table in by_class.items():
            for c, value in enumerate(table[k]):
                yield {"round": number, "measure": measure, "client": client, "class": c, "value": float(value)}


def _of_study(study: dict[str, Any]) -> Iterator[Row]:
    """What `instruments.Every` kept, as far as it is numbers by round, or by round and client."""
    number, clients = study["round"], study["clients"]

    def each(measure: str, values: Iterable[Any]) -> Iterator[Row]:
        for client, value in zip(clients, values, strict=True):
            if value is not None:
                yield {"round": number, "measure": measure, "client": client, "value": float(value)}

    def one(measure: str, value: Any) -> Iterator[Row]:
        if value is not None:
            yield {"round": number, "measure": measure, "value": float(value)}

    if "divergence" in study:
        yield from each("weight_divergence", study["divergence"]["weight_divergence"])
        yield from each("distribution_distance", study["divergence"]["distribution_distance"])
    if "gradients" in study:
        yield from one("gradient_diversity", study["gradients"]["diversity"])
    if "losses" in study:
        yield from each("local_test_loss", study["losses"]["clients"])
    for layer, found in study.get("alignment", {}).get("layers", {}).items():
        yield from each(f"alignment_{layer}", found["clients"])
        yield from one(f"alignment_after_{layer}", found["after"])
