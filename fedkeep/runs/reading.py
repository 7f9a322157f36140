"""Reading run folders: experiment files, records, checkpoints and whole histories."""

from __future__ import annotations

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
    """Turn paths into run folders: each one itself, or those directly below it."""
    found: list[Path] = []
    for path in map(Path, paths):
        if (path / EXPERIMENT).exists():
            found.append(path)
        elif path.is_dir() and (below := sorted(p.parent for p in path.glob(f"*/{EXPERIMENT}"))):
            found += below
        else:
            far = (p for depth in (2, 3, 4) for p in sorted(path.glob("*/" * depth + EXPERIMENT)))
            deeper = next((p.parent.parent for p in far), None)
            where = f"; there are some in {deeper}" if deeper else ""
            raise RunError(f"{path} is not a run folder and holds none{where}")
    return list(dict.fromkeys(found))


def read_instruments(run_dir: str | Path) -> list[dict[str, Any]]:
    """Read what `Every` kept in a run folder; nothing where there was none."""
    path = Path(run_dir) / INSTRUMENTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_experiment(path: Path) -> dict[str, Any]:
    """Read a run's experiment file; one of a newer format is refused."""
    file = path / EXPERIMENT
    try:
        about = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise RunError(f"{path} is not a run folder: it has no {EXPERIMENT}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    if about.get("format") != FORMAT:
        raise RunError(f"{file} has format {about.get('format')!r}; this fedkeep reads format {FORMAT}: update it")
    return about


def read_records(path: Path, upto: int | None = None) -> list[Record]:
    """Read the rounds' lines; with `upto`, exactly that many bytes; without, all that are complete."""
    data = path.read_bytes()
    if upto is not None:
        if len(data) < upto:
            raise RunError(f"{path} is truncated: {len(data)} bytes, where the checkpoint knows of {upto}")
        data = data[:upto]
    complete, _, _ = data.rpartition(b"\n")
    records = []
    for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise RunError(f"{path}, line {number} is damaged: {error}") from error
        if len(records) > 1 and records[-1]["round"] != records[-2]["round"] + 1:
            raise RunError(f"{path}, line {number}: round {records[-1]['round']} follows on {records[-2]['round']}")
    return records


def saved_round(path: Path) -> int | None:
    """Return the round of a run's checkpoint, or None before the first."""
    if not (path / CHECKPOINT).exists():
        return None
    return int(read_tree(path / CHECKPOINT)[1]["round"])


def load_run(path: str | Path, weights: bool = True) -> History:
    """Read what a run has left so far; it may still be going on, or have been interrupted.

    Without `weights` the checkpoint stays unread: a page or a table needs the rounds alone.
    """
    path = Path(path)
    about = read_experiment(path)
    records = read_records(path / ROUNDS) if (path / ROUNDS).exists() else []
    settings = {**about["train"], "seed": about["seed"]}
    if ran_with := about.get("made_by", {}).get("engine"):
        settings["engine"] = ran_with  # where `auto` was asked for
    history = History(about["method"]["name"], settings, records, about=about, folder=path)
    if (path / DIVERGED).exists():
        history.diverged = (path / DIVERGED).read_text(errors="replace").strip()
    if not weights:
        return history
    try:
        saved, checkpoint = read_tree(path / CHECKPOINT)
        history.params, history.saved = saved["server"]["params"], checkpoint["round"]
    except RunError as error:
        log.warning("%s: its weights are left out", error)
    return history
