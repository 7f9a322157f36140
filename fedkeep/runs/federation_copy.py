"""Federation files: writing one, and the copy in a run folder, so that a run resumes when the original has changed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkeep.data.client_indices import Partition
from fedkeep.data.federation_file import check_cohorts, format_federation
from fedkeep.errors import FedkeepError
from fedkeep.runs.extension import read_extension
from fedkeep.runs.files import FEDERATION, is_there, write_atomic
from fedkeep.runs.seals import seal_json


def save_federation(
    path: str | Path,
    clients: Partition | Iterable[Any] | None = None,
    cohorts: Sequence[Iterable[int]] | None = None,
    y: Any = None,
) -> None:
    """Write a split, a sequence of cohorts, or both as a federation file.

    `y` are the labels of the training data that the split divides; with them, reading it for other data is an error.
    `fk.data.partition.from_file` and `[split] file` read the split, the setting `cohorts` reads the cohorts.
    """
    if clients is None and cohorts is None:
        raise FedkeepError("there is nothing to save: pass clients, cohorts, or both", key="clients")
    split = None if clients is None else Partition.of(clients, 2**31 if y is None else len(y))
    text = format_federation(split, None if cohorts is None else check_cohorts(cohorts), y)
    write_atomic(Path(path), text.encode())


def write_federation_copy(
    folder: Path, clients: Partition, cohorts: Sequence[Sequence[int]] | None, run: str | None
) -> None:
    """Write a run's split, if it was read from a file, and its cohorts, if they were given, unless they are there."""
    split = clients if clients.file is not None else None
    if (split is None and cohorts is None) or is_there(file := folder / FEDERATION):
        return
    text = format_federation(split, cohorts)
    write_atomic(file, text.encode() if run is None else seal_json(json.loads(text), run, FEDERATION)[0])


def with_own_files(about: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a run's tables with the run folder's copy in place of the files of its split and its cohorts.

    The number of rounds is the one that the run was extended to, if it was.
    """
    tables, made_by = dict(about), about.get("made_by")
    run = made_by.get("run") if isinstance(made_by, dict) else None
    if (rounds := read_extension(folder, run)) is not None and isinstance(tables.get("train"), dict):
        tables["train"] = {**tables["train"], "rounds": rounds}
    if not is_there(file := folder / FEDERATION):
        return tables
    split, train = tables.get("split"), tables.get("train")
    if isinstance(split, dict) and split.get("kind") == "file":
        tables["split"] = {**split, "file": str(file)}
    if isinstance(train, dict) and train.get("cohorts") is not None:
        tables["train"] = {**train, "cohorts": str(file)}
    return tables
