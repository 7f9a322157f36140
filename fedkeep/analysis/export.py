"""Export of runs as one table, written as CSV, or as Parquet with the extra `data`.

Long, the default: a row is one number, `run, method, seed, round, measure, class, client, value, class_name,
client_name, site`; class, client and site are empty where a measure has none, and names where they are not known. Wide:
a row is one round, with a column per measure, and per measure and class; measures of single clients and sites are
omitted. Numbers that do not exist (a class that the test set lacks) have no row.
"""

from __future__ import annotations

import csv
import io
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedkeep import forgetting as fg
from fedkeep._util.optional import require_extra
from fedkeep._util.text import did_you_mean, one_line, printable
from fedkeep.analysis import personal
from fedkeep.analysis.anatomy import anatomy_of
from fedkeep.analysis.record_checks import check_records
from fedkeep.analysis.recoverable import HALF_KEY, PUBLIC, SIDES, STUDY
from fedkeep.errors import FedkeepError, RunError
from fedkeep.runs.files import ROUNDS, write_atomic
from fedkeep.runs.history import History, Record
from fedkeep.runs.reading import load_run, read_instruments
from fedkeep.runs.round_metrics import BY_CLASS, OF_SITE, SCALARS, class_metrics_of, metrics_of, site_rows

log = logging.getLogger("fedkeep")

Row = dict[str, Any]
COLUMNS = ("run", "method", "seed", "round", "measure", "class", "client", "value", "class_name", "client_name", "site")
SUFFIXES = (".csv", ".parquet")
_TEXT_COLUMNS = ("run", "method", "measure", "class_name", "client_name", "site")
_INTEGER_COLUMNS = ("seed", "round", "class", "client")
_SCALARS = ("lr", "train_loss", "test_loss", "epsilon", "bytes_down", "bytes_up", "seconds")


def require_table_file(path: Path) -> None:
    """Raise an error unless the file can be written as CSV or Parquet; called before any run is read."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise FedkeepError(
            f"{path.name} is neither CSV nor Parquet: {did_you_mean(suffix, SUFFIXES)}",
            key="output",
            value=str(path),
            valid=SUFFIXES,
        )
    if not path.parent.is_dir():
        raise FedkeepError(
            f"the folder {path.parent} does not exist: {path.name} cannot be written", key="output", value=str(path)
        )
    if suffix == ".parquet":
        require_extra("pyarrow.parquet", "data", "Parquet")


def write_table(path: str | Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> int:
    """Write rows into a file atomically and return their number."""
    path = Path(path)
    require_table_file(path)
    rows = list(rows)
    buffer = io.BytesIO()
    if path.suffix.lower() == ".csv":
        text = io.TextIOWrapper(buffer, encoding="utf-8", newline="")
        write_csv(text, columns, rows)
        text.flush()
    else:
        _write_parquet(buffer, columns, rows)
    write_atomic(path, buffer.getvalue())
    return len(rows)


def write_csv(file: IO[str], columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as CSV into an open file and return their number; missing values are empty."""
    out = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    out.writeheader()
    number = 0
    for row in rows:
        out.writerow(row)
        number += 1
    return number


def _write_parquet(buffer: io.BytesIO, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    arrow, parquet = require_extra("pyarrow", "data", "Parquet"), require_extra("pyarrow.parquet", "data", "Parquet")

    def column_type(name: str) -> Any:
        if name in _TEXT_COLUMNS:
            return arrow.string()
        return arrow.int64() if name in _INTEGER_COLUMNS else arrow.float64()

    arrays = [arrow.array([row.get(name) for row in rows], column_type(name)) for name in columns]
    parquet.write_table(arrow.table(arrays, names=list(columns)), buffer)


def long_table(paths: Iterable[str | Path], left_out: dict[Path, str] | None = None) -> Iterator[Row]:
    """Yield a row per number, run after run.

    A run that cannot be read raises; with `left_out` it is added there with the reason, and the others are exported.
    Runs whose folders have the same name are named by their paths.
    """
    folders = [Path(path) for path in paths]
    names = Counter(path.name for path in folders)
    for path in folders:
        try:
            rows = _rows_of_run(path, path.name if names[path.name] == 1 else str(path))
        except Exception as error:
            if left_out is None:
                raise
            left_out[path] = one_line(error)
            log.warning("%s is left out: %s", printable(path), left_out[path])
        else:
            yield from rows


def _rows_of_run(path: Path, name: str) -> list[Row]:
    """Return all rows of a run; raise if it has no rounds."""
    history = load_run(path, weights=False)
    if not history.records:
        raise RunError(f"{path / ROUNDS} is missing or empty: there is nothing to export", key=ROUNDS, value=str(path))
    check_records(history)
    about = {"run": name, "method": history.method, "seed": history.about.get("seed")}
    empty = dict.fromkeys(("class", "client", "site"))
    rows = ({**about, **empty, **row} for row in _rows(history, path) if np.isfinite(row["value"]))
    return [{**row, **_names(history, row)} for row in rows]


def _names(history: History, row: Row) -> Row:
    """Return the names of a row's class and client, None where they are not known."""
    names, c = history.class_names, row["class"]
    return {
        "class_name": None if names is None or c is None else names[c],
        "client_name": history.client_names.get(row["client"]),
    }


def wide_table(paths: Iterable[str | Path], left_out: dict[Path, str] | None = None) -> tuple[list[str], list[Row]]:
    """Return (columns, a row per run and round); `left_out` is that of `long_table`."""
    rows: dict[tuple[Any, ...], Row] = {}
    columns = dict.fromkeys(("run", "method", "seed", "round"))
    for number in long_table(paths, left_out):
        if number["client"] is not None or number["site"] is not None:
            continue
        key = tuple(number[name] for name in ("run", "method", "seed", "round"))
        row = rows.setdefault(key, dict(zip(("run", "method", "seed", "round"), key, strict=True)))
        name = number["measure"] if number["class"] is None else f"{number['measure']}_{number['class']}"
        columns[name] = None
        row[name] = number["value"]
    return list(columns), list(rows.values())


def _rows(history: History, path: Path) -> Iterator[Row]:
    earlier: list[tuple[int, np.ndarray]] = []  # the evaluated rounds from 1 on, and their class accuracies
    with_anatomy = set(history.anatomy_rounds)
    for record in history.records:
        yield from _scalar_rows(record)
        if "confusion" in record:
            yield from _global_rows(record, earlier)
            yield from _metric_rows(record)
        yield from _own_metric_rows(record)
        if "sites" in record:
            yield from _site_rows(record, history)
        if "local" in record:
            yield from _local_rows(history, record["round"], record["round"] in with_anatomy)
    for study in read_instruments(path):
        yield from _study_rows(study)


def _scalar_rows(record: Record) -> Iterator[Row]:
    for name in _SCALARS:
        if record.get(name) is not None:
            yield {"round": record["round"], "measure": name, "value": float(record[name])}


def _global_rows(record: Record, earlier: list[tuple[int, np.ndarray]]) -> Iterator[Row]:
    """Yield the measures of one evaluation of the global model, and of its change since earlier ones."""
    number, classes = record["round"], fg.class_accuracy(record["confusion"])

    def row(measure: str, value: Any, c: int | None = None) -> Row:
        return {"round": number, "measure": measure, "class": c, "value": float(value)}

    yield row("accuracy", fg.accuracy(record["confusion"]))
    yield from (row("class_accuracy", a, c) for c, a in enumerate(classes))
    if number == 0:
        return
    if earlier and earlier[-1][0] == number - 1:
        pair = np.stack([earlier[-1][1], classes])
        yield row("round_forgetting", fg.round_forgetting(pair)[0])
        yield row("consistency", fg.consistency(pair)[0])
    earlier.append((number, classes))
    yield row("forgetting", fg.forgetting(np.stack([a for _, a in earlier])))


def _metric_rows(record: Record) -> Iterator[Row]:
    """Yield the metrics of one evaluation of the global model, except the accuracies."""
    number = record["round"]
    scalars, by_class = metrics_of([record]), class_metrics_of([record])
    for measure in SCALARS:
        if measure != "accuracy":
            yield {"round": number, "measure": measure, "value": float(scalars[measure][0])}
    for measure in BY_CLASS:
        if measure != "recall":  # that is the class accuracy
            for c, value in enumerate(by_class[measure][0]):
                yield {"round": number, "measure": measure, "class": c, "value": float(value)}


def _own_metric_rows(record: Record) -> Iterator[Row]:
    """Yield the user's metrics, also those that callbacks added to a round that was not evaluated."""
    for measure, value in record.get("metrics", {}).items():
        for c, one in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if one is not None:
                yield {"round": record["round"], "measure": measure, "class": c, "value": float(one)}


def _site_rows(record: Record, history: History) -> Iterator[Row]:
    """Yield the metrics of the global model on each site's test examples."""
    for row in site_rows(record, history.site_names, history.client_names):
        where = {"round": record["round"], "client": row["client"], "site": row["site"]}
        yield from ({**where, "measure": f"site_{measure}", "value": float(row[measure])} for measure in OF_SITE)
        for measure in ("precision", "recall", "f1"):
            for c, value in enumerate(row[measure]):
                yield {**where, "measure": f"site_{measure}", "class": c, "value": float(value)}


def _local_rows(history: History, number: int, with_anatomy: bool) -> Iterator[Row]:
    """Yield the measures of each client's local model."""
    local = history.local(number)
    by_class = {"local_class_accuracy": local["class_accuracy"], "label_count": local["label_counts"]}
    if with_anatomy:
        anatomy = anatomy_of(history, number)
        by_class["local_forgetting"] = anatomy.local_forgetting
        by_class["aggregation_forgetting"] = anatomy.aggregation_forgetting
        by_class["forgetting_degree"] = fg.forgetting_degree(anatomy.before, anatomy.clients)
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


def _study_rows(study: dict[str, Any]) -> Iterator[Row]:
    """Yield the numbers by round, or by round and client, that `instruments.Every` wrote."""
    number, clients = study["round"], study["clients"]

    def per_client(measure: str, values: Iterable[Any]) -> Iterator[Row]:
        for client, value in zip(clients, values, strict=True):
            if value is not None:
                yield {"round": number, "measure": measure, "client": client, "value": float(value)}

    def per_round(measure: str, value: Any) -> Iterator[Row]:
        if value is not None:
            yield {"round": number, "measure": measure, "value": float(value)}

    if "divergence" in study:
        yield from per_client("weight_divergence", study["divergence"]["weight_divergence"])
        yield from per_client("distribution_distance", study["divergence"]["distribution_distance"])
    if "gradients" in study:
        yield from per_round("gradient_diversity", study["gradients"]["diversity"])
    if study.get(STUDY, {}).get("fitted_on"):
        yield from _recoverable_rows(study["after_round"], study[STUDY])
    if personal.STUDY in study:
        yield from _personal_rows(study["after_round"], study[personal.STUDY])
    if "losses" in study:
        yield from per_client("local_test_loss", study["losses"]["clients"])
    for layer, alignment in study.get("alignment", {}).get("layers", {}).items():
        yield from per_client(f"alignment_{layer}", alignment["clients"])
        yield from per_round(f"alignment_after_{layer}", alignment["after"])


def _personal_rows(number: int, result: dict[str, Any]) -> Iterator[Row]:
    """Yield the accuracy of each client with each model on data like its own, and the numbers over clients."""
    for model in (model for model in personal.MODELS if model in result):
        for client, value in zip(result["clients"], result[model]["clients"], strict=True):
            if value is not None:
                yield {"round": number, "measure": f"personal_{model}", "client": client, "value": float(value)}
        for key in personal.NUMBERS:
            if (value := result[model][key]) is not None:
                yield {"round": number, "measure": f"personal_{model}_{key}", "value": float(value)}


def _recoverable_rows(number: int, result: dict[str, Any]) -> Iterator[Row]:
    """Yield what a bias per class recovers of a global model; `test_half` if measured on half of the test set."""
    start = STUDY if result["fitted_on"] == PUBLIC else f"{STUDY}_{HALF_KEY}"
    by_class = {f"{start}_bias": result["bias"], **{f"{start}_class_accuracy_{side}": result[side] for side in SIDES}}
    for measure, values in by_class.items():
        for c, value in enumerate(values):
            if value is not None:
                yield {"round": number, "measure": measure, "class": c, "value": float(value)}
    numbers = {
        **{f"{start}_accuracy_{side}": result["accuracy"][side] for side in SIDES},
        **{f"{start}_forgetting_{side}": result["forgetting"][side] for side in SIDES},
        f"{start}_share": result["share"],
    }
    for measure, value in numbers.items():
        if value is not None:
            yield {"round": number, "measure": measure, "value": float(value)}
