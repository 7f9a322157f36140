"""Reading run folders: experiment files, records, checkpoints and whole histories."""

from __future__ import annotations

import difflib
import json
import logging
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedkeep.errors import RunError
from fedkeep.runs.files import CHECKPOINT, DIVERGED, EXPERIMENT, FORMAT, INSTRUMENTS, ROUNDS, read_tree
from fedkeep.runs.history import History, Record

log = logging.getLogger("fedkeep")


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Return the run folders that paths name: each path itself, or the run folders directly below it."""
    runs: list[Path] = []
    for path in map(Path, paths):
        require_folder(path)
        if (path / EXPERIMENT).exists():
            runs.append(path)
        elif path.is_dir() and (below := sorted(p.parent for p in path.glob(f"*/{EXPERIMENT}"))):
            runs += below
        else:
            deeper = (p.parent.parent for depth in (2, 3, 4) for p in sorted(path.glob("*/" * depth + EXPERIMENT)))
            nearest = next(deeper, None)
            hint = f"; there are some in {nearest}" if nearest else ""
            raise RunError(
                f"{path} is not a run folder and contains none{hint}",
                key="run",
                value=str(path),
                valid=[str(nearest)] if nearest else None,
            )
    return list(dict.fromkeys(runs))


def require_folder(path: Path) -> None:
    """Raise if a folder does not exist, and suggest the closest name."""
    if path.exists():
        return
    siblings = sorted(p.name for p in path.parent.iterdir() if p.is_dir()) if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f": did you mean {path.parent / close[0]}?" if close else ""
    raise RunError(f"there is no folder {path}{hint}", key="run", value=str(path), valid=siblings)


def read_instruments(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the results that `Every` wrote into a run folder; an empty list if there are none."""
    path = Path(run_dir) / INSTRUMENTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_experiment(path: Path) -> dict[str, Any]:
    """Return a run's experiment file as a dict; raise if it is of a newer format."""
    require_folder(path)
    if path.is_file():
        raise RunError(f"{path} is a file, not a run folder", key="run", value=str(path))
    file = path / EXPERIMENT
    try:
        about = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise RunError(f"{path} is not a run folder: it has no {EXPERIMENT}", key="run", value=str(path)) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RunError(f"{file} cannot be read: {error}", key=EXPERIMENT, value=str(file)) from error
    if (version := about.get("format")) != FORMAT:
        raise RunError(
            f"{file} has format {version!r}; this version of fedkeep reads format {FORMAT}: update fedkeep",
            key="format",
            value=version,
            valid=[FORMAT],
        )
    return about


def read_records(path: Path, n_bytes: int | None = None) -> list[Record]:
    """Return the records of rounds.jsonl: those of its first `n_bytes` bytes, or by default all complete lines."""
    data = path.read_bytes()
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
    records: list[Record] = []
    for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise RunError(f"{path}, line {number} is damaged: {error}", key=path.name, value=number) from error
        if len(records) > 1 and records[-1]["round"] != (expected := records[-2]["round"] + 1):
            raise RunError(
                f"{path}, line {number} is of round {records[-1]['round']} instead of {expected}",
                key=path.name,
                value=records[-1]["round"],
                valid=[expected],
            )
    return records


def saved_round(path: Path) -> int | None:
    """Return the round of a run's checkpoint, or None if there is none yet."""
    if not (path / CHECKPOINT).exists():
        return None
    return int(read_tree(path / CHECKPOINT)[1]["round"])


def load_run(path: str | Path, weights: bool = True) -> History:
    """Return the history of a run as far as it has come. The run may be finished, running or interrupted.

    With `weights=False` the checkpoint is not read, which is faster.
    """
    path = Path(path)
    about = read_experiment(path)
    records = read_records(path / ROUNDS) if (path / ROUNDS).exists() else []
    settings = {**about["train"], "seed": about["seed"]}
    if ran_with := about.get("made_by", {}).get("engine"):
        settings["engine"] = ran_with  # instead of "auto"
    history = History(about["method"]["name"], settings, records, about=about, folder=path)
    if (path / DIVERGED).exists():
        history.diverged = (path / DIVERGED).read_text(errors="replace").strip()
    if not weights:
        return history
    try:
        saved, checkpoint = read_tree(path / CHECKPOINT)
        history.params, history.saved = saved["server"]["params"], checkpoint["round"]
    except RunError as error:
        log.warning("%s; the history is loaded without weights", error)
    return history
