"""Many runs: one after another, or several at a time in separate processes."""

from __future__ import annotations

import re
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from fedkeep.engine.distributed import current_ranks
from fedkeep.engine.simulation import Simulation
from fedkeep.errors import FedkeepError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.failure import as_failure, remove_traceback
from fedkeep.experiments.jobs import Jobs, resolve_jobs
from fedkeep.experiments.run import run
from fedkeep.experiments.workers import MakeCallbacks, run_in_processes
from fedkeep.runs.history import History, Record
from fedkeep.runs.reading import load_run

Outcome = History | FedkeepError


class Progress(Protocol):
    """What shows the progress of runs. It is also a callback: called after every round."""

    def start_run(self, name: str) -> None:
        """Show which run is running now."""

    def finish_run(self, name: str, history: History, rounds: int) -> None:
        """Show a run's result; `rounds` is the number of rounds that were planned."""

    def fail_run(self, name: str, error: FedkeepError, rounds: int) -> None:
        """Show a run's error; `rounds` is the number of rounds that were planned."""

    def __call__(self, simulation: Simulation, record: Record) -> None:
        """Count a round."""


def folder_name(base: Any, overrides: Sequence[str]) -> str:
    """Build a folder name from the overrides; a long name is truncated and ends in a hash."""
    if not isinstance(base, str) or base in ("", ".", ".."):
        raise FedkeepError(f"{base!r} cannot be the name of a run folder", key="name", value=base)
    whole = re.sub(r"[^\w.=+-]+", "-", "-".join([base, *overrides]))
    return whole if len(whole.encode()) <= 120 else f"{whole[:60]}-{zlib.crc32(whole.encode()):08x}"


def run_all(
    experiments: Mapping[str, Experiment],
    folder: Path,
    jobs: Jobs,
    progress: Progress,
    make_callbacks: MakeCallbacks = list,
    until: int | None = None,
) -> Generator[tuple[str, Outcome]]:
    """Run experiments, each in the folder of its name, and yield each result. A failed run does not stop the others.

    `jobs` of them run at a time, each in its own process. With `until`, runs stop after that round.
    Whatever a run raises is its own failure. With several jobs, so is the death of its process. Close the generator if
    it is not used up: then the processes end.
    """
    number = resolve_jobs(jobs, experiments.values())
    outcomes = _one_by_one if number == 1 else _in_processes
    with closing(outcomes(experiments, folder, number, progress, make_callbacks, until)) as results:
        for label, outcome in results:
            rounds = experiments[label].train.rounds
            planned = rounds if until is None else min(until, rounds)
            if isinstance(outcome, FedkeepError):
                progress.fail_run(label, outcome, planned)
            else:
                progress.finish_run(label, outcome, planned)
            yield label, outcome


def _one_by_one(
    experiments: Mapping[str, Experiment],
    folder: Path,
    jobs: int,
    progress: Progress,
    make_callbacks: MakeCallbacks,
    until: int | None,
) -> Generator[tuple[str, Outcome]]:
    for label, experiment in experiments.items():
        progress.start_run(label)
        path = folder / label
        remove_traceback(path)
        try:
            outcome: Outcome = run(experiment, path, (progress, *make_callbacks()), until)
        except FedkeepError as error:
            outcome = error
        except Exception as error:
            if current_ranks().size > 1:  # the other processes do not know of it
                raise
            outcome = as_failure(error, path)
        yield label, outcome


def _in_processes(
    experiments: Mapping[str, Experiment],
    folder: Path,
    jobs: int,
    progress: Progress,
    make_callbacks: MakeCallbacks,
    until: int | None,
) -> Generator[tuple[str, Outcome]]:
    with closing(run_in_processes(experiments, folder, jobs, make_callbacks, until)) as results:
        for label, failure in results:
            progress.start_run(label)
            outcome: Outcome = failure if failure is not None else _load(folder / label)
            yield label, outcome


def _load(path: Path) -> Outcome:
    try:
        return load_run(path)
    except Exception as error:
        return as_failure(error, path)
