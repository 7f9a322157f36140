"""The experiment file of a run folder: `experiment.toml`, sealed with the run's id and a checksum."""

from __future__ import annotations

import difflib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeep._util.toml import parse_toml
from fedkeep.errors import ConfigError, RunError
from fedkeep.runs.extension import read_extension
from fedkeep.runs.files import EXPERIMENT, FORMAT, READABLE_FORMATS, is_there, read_bytes, to_toml, write_atomic
from fedkeep.runs.seals import checksum, damaged, seal_text, unseal_text

OBSERVED = "flower-app"  # the engine of a run that fedkeep records and does not train: a user's own Flower app
_TABLES = ("method", "train", "data", "split", "model", "made_by")


@dataclass(frozen=True)
class ExperimentFile:
    """A run's experiment file that was read and verified."""

    about: dict[str, Any]  # `train.rounds` are those that the run was extended to, if it was
    run: str | None  # the run's id; None in format 1, whose files have no checksums
    checksum: str  # of the whole file; the records and the checkpoints refer to it

    @property
    def verified(self) -> bool:
        """Whether the run's files have checksums."""
        return self.run is not None


def write_experiment(path: Path, about: dict[str, Any]) -> ExperimentFile:
    """Write a run's experiment file into its folder. The run gets an id, unless `about` has one in `made_by`."""
    made_by = {"run": secrets.token_hex(16), **about.get("made_by", {})}
    data = seal_text(EXPERIMENT, to_toml({"format": FORMAT, **about, "made_by": made_by}), made_by["run"])
    write_atomic(path / EXPERIMENT, data)
    return read_experiment_file(path)


def read_experiment(path: Path) -> dict[str, Any]:
    """Return a run's experiment file as a dict; raise if it is damaged or of a newer format."""
    return read_experiment_file(path).about


def refuse_observed(path: Path, about: dict[str, Any]) -> None:
    """Raise if a run is the record of a user's own Flower app, which fedkeep cannot train."""
    if about.get("made_by", {}).get("engine") == OBSERVED:
        raise ConfigError(
            f"{path} is the record of a Flower app: only that app can continue it (resume=True of "
            "fedkeep.flower.forgetting); compare, report, plot and export can read it",
            key="run_dir",
            value=str(path),
        )


def read_experiment_file(path: Path) -> ExperimentFile:
    """Return the experiment file of a run folder; raise if it is damaged or of a newer format."""
    require_folder(path)
    if not path.is_dir():
        raise RunError(f"{path} is a file, not a run folder", key="run", value=str(path))
    file = path / EXPERIMENT
    if not is_there(file):
        raise RunError(f"{path} is not a run folder: it has no {EXPERIMENT}", key="run", value=str(path))
    data = read_bytes(file)
    body, run = unseal_text(file, data)
    try:
        about = parse_toml(body.decode())
    except ValueError as error:
        raise RunError(f"{file} cannot be read: {error}", key=EXPERIMENT, value=str(file)) from error
    version = about.get("format")
    if version not in READABLE_FORMATS or isinstance(version, bool):
        raise RunError(
            f"{file} has format {version!r}; this version of fedkeep reads formats 1 and {FORMAT}: update fedkeep",
            key="format",
            value=version,
            valid=READABLE_FORMATS,
        )
    if version == FORMAT and run is None:
        raise damaged(str(file), EXPERIMENT, "its last line, with the checksum, is missing or was changed")
    run = run if version == FORMAT else None
    if (rounds := read_extension(path, run)) is not None and isinstance(about.get("train"), dict):
        about["train"]["rounds"] = rounds
    return ExperimentFile(about, run, checksum(data))


def require_settings(path: Path, about: dict[str, Any]) -> None:
    """Raise if a run's experiment file lacks a part that every run has."""
    file = str(path / EXPERIMENT)
    for key in _TABLES:
        if not isinstance(about.get(key, {} if key == "made_by" else None), dict):
            raise damaged(file, EXPERIMENT, f"its table [{key}] is missing")
    if not isinstance(about["method"].get("name"), str):
        raise damaged(file, EXPERIMENT, "method.name is missing")
    for name, value in (("seed", about.get("seed")), ("train.rounds", about["train"].get("rounds"))):
        if not isinstance(value, int) or isinstance(value, bool):
            raise damaged(file, EXPERIMENT, f"{name} is missing or not a whole number", value)


def require_folder(path: Path) -> None:
    """Raise if a folder does not exist, and suggest the closest name."""
    try:
        if path.exists():
            return
        siblings = sorted(p.name for p in path.parent.iterdir() if p.is_dir()) if path.parent.is_dir() else []
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}", key="run", value=str(path)) from error
    close = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f": did you mean {path.parent / close[0]}?" if close else ""
    raise RunError(f"there is no folder {path}{hint}", key="run", value=str(path), valid=siblings)
