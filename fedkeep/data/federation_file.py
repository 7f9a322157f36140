"""Federation files: the examples of each client, the cohort of each round, or both, as JSON.

    {
      "examples": 8,                     optional: how many training examples the split was made for
      "labels": "0fa3c2d1",              optional: a checksum of their labels, in order
      "clients": [[0, 5, 7], [1, 2]],    the training examples of client 0, of client 1, ...
      "cohorts": [[0, 1], [1], [0]]      the clients of round 1, of round 2, ...
    }

Examples are numbered from 0 in the order of the training data, clients from 0. A client may have no examples; a cohort
has at least one client, each once. The order of clients within a cohort has no effect.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep._util.text import did_you_mean, format_value, one_line
from fedkeep.data.client_indices import Partition
from fedkeep.errors import FedkeepError, PartitionError

Cohorts = tuple[tuple[int, ...], ...]

KEYS = ("examples", "labels", "clients", "cohorts")
_SEAL = ("run", "check")  # of the copy in a run folder
_MOST_ID = 2**31 - 1


def checksum_of_labels(y: Any) -> str:
    """Return a checksum of labels: the same only for the same labels in the same order.

    >>> checksum_of_labels([0, 1]) == checksum_of_labels([1, 0])
    False
    """
    return f"{zlib.crc32(np.asarray(y, dtype='<i8').tobytes()):08x}"


def format_federation(
    clients: Partition | None = None, cohorts: Sequence[Iterable[int]] | None = None, y: Any = None
) -> str:
    """Return the text of a federation file, one client or round per line.

    >>> print(format_federation(cohorts=[[0, 1], [1]]), end="")
    {
    "cohorts": [
    [0, 1],
    [1]
    ]
    }
    """
    parts: list[tuple[str, Iterable[list[int]]]] = []
    if clients is not None:
        parts.append(("clients", (own.tolist() for own in clients)))
    if cohorts is not None:
        parts.append(("cohorts", (list(cohort) for cohort in cohorts)))
    tables = [] if y is None else [f'"examples": {len(y)}', f'"labels": "{checksum_of_labels(y)}"']
    tables += [f'"{key}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]" for key, rows in parts]
    return "{\n" + ",\n".join(tables) + "\n}\n"


def read_clients(path: str | os.PathLike[str], y: Any, overlap: bool = False) -> Partition:
    """Return the split in a federation file, checked against the labels of the training data.

    An example may be there once, unless `overlap` allows that several clients hold it, or one client several times.
    """
    clients, value = _clients_and_file(path)
    n_examples = len(y)
    if (examples := value.get("examples", n_examples)) != n_examples:
        raise PartitionError(
            f"{path} divides {format_value(examples)} training examples, but the data has {n_examples}",
            key="file",
            value=examples,
        )
    if value.get("labels", checksum := checksum_of_labels(y)) != checksum:
        raise PartitionError(
            f"{path} was made for other training data: the labels differ. With a public set, data.seed decides which "
            "examples remain for training: set it to that of the split",
            key="file",
            value=str(path),
        )
    indices = clients.indices
    if indices.max() >= n_examples:
        example, owner = int(indices.max()), _owners(clients, int(indices.max()))[0]
        raise PartitionError(
            f"{path}: client {owner} has example {example}, but the training examples are 0 to {n_examples - 1}",
            key="file",
            value=example,
        )
    counts = np.bincount(indices, minlength=n_examples)
    if not overlap and counts.max() > 1:
        example = int(counts.argmax())
        owners = _owners(clients, example)
        raise PartitionError(
            f"{path}: example {example} is there {counts[example]} times, of clients {owners[0]} and {owners[1]}; "
            "overlap = true allows that",
            key="file",
            value=example,
        )
    return clients


def read_unchecked_clients(path: str | os.PathLike[str]) -> Partition:
    """Return the split in a federation file, not checked against any data, to compare it with another."""
    return _clients_and_file(path)[0]


def _clients_and_file(path: str | os.PathLike[str]) -> tuple[Partition, dict[str, Any]]:
    value = _read(path, "clients", "file", PartitionError)
    parts = [
        _whole_numbers(f"{path}, client {k}", row, "file", PartitionError) for k, row in enumerate(value["clients"])
    ]
    if not any(map(len, parts)):
        raise PartitionError(f"{path}: no client has any example", key="file", value=str(path))
    split = Partition.from_parts(parts)
    return Partition(split.indices, split.offsets, file=str(path)), value


def _owners(clients: Partition, example: int) -> list[int]:
    """Return the clients that have an example, as often as they have it."""
    return [k for k, own in enumerate(clients) for _ in range(int((own == example).sum()))]


def read_cohorts(path: str | os.PathLike[str]) -> Cohorts:
    """Return the cohorts in a federation file."""
    return check_cohorts(_read(path, "cohorts", "cohorts", FedkeepError)["cohorts"], f"{path}, ")


def check_cohorts(cohorts: Any, where: str = "cohorts: ") -> Cohorts:
    """Return one tuple of client ids per round, in increasing order; raise if they are anything else.

    >>> check_cohorts([[2, 0], [1]])
    ((0, 2), (1,))
    """
    try:
        rows = [np.asarray(row).tolist() for row in cohorts]
    except (TypeError, ValueError) as error:
        raise FedkeepError(
            f"cohorts must be a file or one list of client ids per round: {one_line(error)}",
            key="cohorts",
            value=cohorts,
        ) from error
    checked = []
    for number, row in enumerate(rows, start=1):
        ids = _whole_numbers(f"{where}round {number}", row, "cohorts", FedkeepError)
        cohort = tuple(sorted(ids.tolist()))
        if not cohort:
            raise FedkeepError(f"{where}round {number} has no clients", key="cohorts", value=number)
        if twice := [k for k, following in itertools.pairwise(cohort) if k == following]:
            raise FedkeepError(
                f"{where}round {number} has client {twice[0]} more than once", key="cohorts", value=twice[0]
            )
        checked.append(cohort)
    if not checked:
        raise FedkeepError(f"{where}there are no rounds", key="cohorts", value=[])
    return tuple(checked)


def _read(path: str | os.PathLike[str], wanted: str, key: str, error: type[FedkeepError]) -> dict[str, Any]:
    """Return a federation file that has the wanted table; `key` is the key of errors."""
    value = _parse(Path(path).expanduser(), key, error)
    if not isinstance(value, dict):
        raise error(f'{path} must be a JSON object such as {{"{wanted}": [[0, 1], [2]]}}', key=key, value=str(path))
    for name in value:
        if name not in (*KEYS, *_SEAL):
            raise error(f"{path}: unknown key {name!r}: {did_you_mean(name, KEYS)}", key=key, value=name, valid=KEYS)
    if wanted not in value:
        raise error(
            f"{path} has no {wanted}, only {', '.join(k for k in KEYS if k in value) or 'an empty object'}",
            key=key,
            value=str(path),
        )
    rows = value[wanted]
    if not isinstance(rows, list) or not rows:
        raise error(f"{path}: {wanted} must be a list of lists, not {format_value(rows)}", key=key, value=rows)
    return value


def _parse(path: Path, key: str, error: type[FedkeepError]) -> Any:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would wait forever
            raise error(f"{key} = {path} is not a file", key=key, value=str(path))
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise error(f"{key} = {path}: there is no such file", key=key, value=str(path)) from None
    except OSError as reason:
        raise error(f"{key} = {path} cannot be read: {reason.strerror}", key=key, value=str(path)) from None
    except (ValueError, RecursionError) as reason:
        raise error(f"{key} = {path} is not JSON: {one_line(reason)}", key=key, value=str(path)) from None


def _whole_numbers(where: str, row: Any, key: str, error: type[FedkeepError]) -> np.ndarray:
    """Return a list of whole numbers from 0 to _MOST_ID as an array."""
    if not isinstance(row, list):
        raise error(f"{where} must be a list of whole numbers, not {format_value(row)}", key=key, value=row)
    for value in row:
        if type(value) is not int or not 0 <= value <= _MOST_ID:
            raise error(
                f"{where} has {format_value(value)}, which is not a whole number from 0 to {_MOST_ID}",
                key=key,
                value=value,
            )
    return np.array(row, dtype=np.int64)
