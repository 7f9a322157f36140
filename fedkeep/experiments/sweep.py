"""Many runs: one after another, or several at a time in separate processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol

import torch

from fedkeep._util.private_apis import terminate_workers
from fedkeep.engine.distributed import current_ranks
from fedkeep.engine.simulation import Callback, Simulation
from fedkeep.errors import FedkeepError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.run import run
from fedkeep.runs.history import History, Record
from fedkeep.runs.reading import load_run

MakeCallbacks = Callable[[], list[Callback]]  # called once per run; with several processes it must be picklable
Outcome = History | FedkeepError


class Progress(Protocol):
    """What shows the progress of runs. It is also a callback: called after every round."""

    def start_run(self, name: str) -> None:
        """Show which run is running now."""

    def finish_run(self, name: str, history: History) -> None:
        """Show a run's result."""

    def fail_run(self, name: str, error: FedkeepError, rounds: int) -> None:
        """Show a run's error; `rounds` is the number of rounds it should have run."""

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
    jobs: int,
    progress: Progress,
    make_callbacks: MakeCallbacks = list,
) -> Iterator[tuple[str, Outcome]]:
    """Run experiments, each in the folder of its name, and yield each result. A failed run does not stop the others."""
    if jobs > 1 and current_ranks().size > 1:
        raise FedkeepError(
            "several runs at a time (--jobs) and several processes per run (torchrun) cannot be combined",
            key="jobs",
            value=jobs,
        )
    outcomes = _one_by_one if jobs == 1 else _in_processes
    for label, outcome in outcomes(experiments, folder, jobs, progress, make_callbacks):
        if isinstance(outcome, FedkeepError):
            progress.fail_run(label, outcome, experiments[label].train.rounds)
        else:
            progress.finish_run(label, outcome)
        yield label, outcome


def _one_by_one(
    experiments: Mapping[str, Experiment], folder: Path, jobs: int, progress: Progress, make_callbacks: MakeCallbacks
) -> Iterator[tuple[str, Outcome]]:
    for label, experiment in experiments.items():
        progress.start_run(label)
        try:
            yield label, run(experiment, folder / label, (progress, *make_callbacks()))
        except FedkeepError as error:
            yield label, error


def _in_processes(
    experiments: Mapping[str, Experiment], folder: Path, jobs: int, progress: Progress, make_callbacks: MakeCallbacks
) -> Iterator[tuple[str, Outcome]]:
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(threads,))
    try:
        waiting = {
            pool.submit(_run, experiment.to_dict(), folder / label, make_callbacks): label
            for label, experiment in experiments.items()
        }
        for future in as_completed(waiting):
            label = waiting[future]
            progress.start_run(label)
            error = future.result()
            yield label, load_run(folder / label) if error is None else error
        pool.shutdown()
    except BaseException:  # Ctrl-C too: running processes end now, waiting runs never start
        terminate_workers(pool)
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _run(experiment: dict[str, Any], path: Path, make_callbacks: MakeCallbacks) -> FedkeepError | None:
    """Run one experiment in this process; the history stays in its folder, only an error is returned."""
    try:
        run(Experiment.from_dict(experiment), path, make_callbacks())
    except FedkeepError as error:
        return error
    return None
