"""Running an experiment in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeep.data.federation_file import read_cohorts, read_unchecked_clients
from fedkeep.engine import distributed
from fedkeep.engine.cohorts import cohorts_fingerprint
from fedkeep.engine.simulate import make_simulation, start
from fedkeep.engine.simulation import Callback, Simulation
from fedkeep.errors import ConfigError
from fedkeep.experiments.build import build
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.own_parts import code_hashes, make_own_callbacks
from fedkeep.experiments.paths import is_data_file
from fedkeep.experiments.resume import load_finished, resume_experiment
from fedkeep.runs.files import EXPERIMENT, fingerprint
from fedkeep.runs.history import History, Record
from fedkeep.runs.reading import load_run, read_experiment, saved_round, was_stopped

_FILLED_IN = ("data.seed", "split.seed")  # their defaults depend on other keys, which say more


def run(
    experiment: Experiment, path: str | Path, callbacks: Iterable[Callback] = (), until: int | None = None
) -> History:
    """Run an experiment in a folder. If the folder already holds this experiment, resume it, or load it if finished.

    With `until`, the run stops after that round; if it had been stopped before it, it continues.
    """
    path = Path(path)
    callbacks = list(callbacks) if until is None else [*callbacks, StopAfter(until)]
    if not distributed.current_ranks().on_rank0(lambda: is_run_of(experiment, path)):
        callbacks += make_own_callbacks(experiment.callbacks)
        about = {**experiment.to_dict(), "made_by": {"code": code_hashes(experiment) or None}}
        return start(make_simulation(build(experiment, with_metrics=True), callbacks), path, about)
    if distributed.current_ranks().on_rank0(lambda: was_stopped(path) and (saved_round(path) or 0) >= (until or 0)):
        return load_finished(experiment, path)
    return resume_experiment(experiment, path, callbacks)


@dataclass(frozen=True)
class StopAfter:
    """A callback that stops a run after a round."""

    round: int

    def __call__(self, simulation: Simulation, record: Record) -> None:
        """Stop the run if this was the round."""
        if record["round"] >= self.round:
            simulation.stop()


def existing_run(experiment: Experiment, path: Path) -> History | None:
    """Return the history of this experiment's run in a folder, without weights; None if there is no run."""
    return load_run(path, weights=False) if is_run_of(experiment, path) else None


def is_run_of(experiment: Experiment, path: Path) -> bool:
    """Return whether a folder holds a run of this experiment; raise if it holds one of another experiment."""
    if not (path / EXPERIMENT).exists():
        return False
    require_same(experiment, read_experiment(path), f"{path} holds another experiment", "choose another folder")
    return True


def require_same(experiment: Experiment, recorded: dict[str, Any], what: str, advice: str) -> None:
    """Raise unless a run's experiment file is that of this experiment."""
    theirs = Experiment.from_dict(recorded).to_dict()
    # how often to save, how much to keep, the label and callbacks are not part of an experiment's identity
    no_part = ("checkpoint_every", "keep", "label", "callbacks")
    ours = {**experiment.to_dict(), **{key: theirs.get(key) for key in no_part}}
    _require_same_files(experiment, recorded.get("made_by", {}), what, advice)
    for section, key in (("split", "file"), ("train", "cohorts")):  # compared by their contents
        for tables in (ours, theirs):
            tables[section] = {**tables[section], **({key: "a file"} if tables[section].get(key) is not None else {})}
    for tables in (ours, theirs):
        if is_data_file(source := tables["data"]["source"]):  # runs of earlier versions have relative paths
            tables["data"] = {**tables["data"], "source": os.path.abspath(source)}
    differences = sorted(_differences(theirs, ours), key=lambda each: each[0] in _FILLED_IN)
    for key, there, here in differences:
        if key == "train.rounds" and there < here:
            advice = f"to extend it, use fedkeep resume with rounds={here}; or {advice}"
        raise ConfigError(
            f"{what}: {key} is {there!r} there and {here!r} here; {advice}",
            key=key,
            value=here,
        )


def _require_same_files(experiment: Experiment, made_by: dict[str, Any], what: str, advice: str) -> None:
    """Raise if the files of the split and the cohorts exist, and do not contain what the run was started with."""
    split, cohorts, found = experiment.split.get("file"), experiment.train.cohorts, {}
    if isinstance(split, str) and _exists(split):
        clients = read_unchecked_clients(split)
        found["split"] = "split.file", split, fingerprint(clients.indices, clients.offsets)
    if cohorts is not None and (not isinstance(cohorts, str) or _exists(cohorts)):
        given = read_cohorts(cohorts) if isinstance(cohorts, str) else cohorts
        value = cohorts if isinstance(cohorts, str) else "a list"
        found["cohorts"] = "train.cohorts", value, cohorts_fingerprint(given, experiment.train.rounds)
    for name, (key, file, contents) in found.items():
        if name in made_by and contents != made_by[name]:
            raise ConfigError(
                f"{what}: {key} = {file} does not contain what that run was started with; {advice}", key=key, value=file
            )


def _exists(file: str) -> bool:
    return Path(file).expanduser().exists()


def _differences(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield every key in which two experiments differ, with both values."""
    for key in dict.fromkeys([*a, *b]):
        one, other = a.get(key), b.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differences(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key}", one, other
