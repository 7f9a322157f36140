"""Many runs: one after another, or several at a time in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedkeep.config import Experiment
from fedkeep.engine import ranks
from fedkeep.engine.rounds import Callback
from fedkeep.errors import FedkeepError
from fedkeep.history import History
from fedkeep.instruments import Every
from fedkeep.runs import load_run
from fedkeep.tensorboard import TensorBoard
from fedkeep.terminal import Bar


@dataclass(frozen=True)
class Extras:
    """What is to be kept beside the rounds; plain values, so that other processes can be told."""

    tensorboard: bool = False
    instruments: tuple[str, ...] = ()
    every: int = 10

    def callbacks(self) -> list[Callback]:
        """Make the callbacks of one run."""
        made: list[Callback] = [Every(self.every, self.instruments)] if self.instruments else []
        return [*made, TensorBoard()] if self.tensorboard else made


def folder_name(base: Any, said: Sequence[str]) -> str:
    """Make a folder's name of what was said; a long one ends in a few letters that tell it from others."""
    if not isinstance(base, str) or base in ("", ".", ".."):
        raise FedkeepError(f"{base!r} is no name for a run's folder")
    whole = re.sub(r"[^\w.=+-]+", "-", "-".join([base, *said]))
    return whole if len(whole.encode()) <= 120 else f"{whole[:60]}-{zlib.crc32(whole.encode()):08x}"


def run_all(
    experiments: Mapping[str, Experiment], folder: Path, jobs: int, progress: Bar, extras: Extras | None = None
) -> Iterator[tuple[str, History | FedkeepError]]:
    """Run experiments into folders of their names, and yield each when it is done; one may fail, the rest go on."""
    if jobs > 1 and ranks.here().size > 1:
        raise FedkeepError("several runs at a time (--jobs) and several processes a run (torchrun) exclude each other")
    extras = extras or Extras()
    one_by_one = _in_turn(experiments, folder, progress, extras)
    for label, outcome in one_by_one if jobs == 1 else _side_by_side(experiments, folder, jobs, progress, extras):
        if isinstance(outcome, FedkeepError):
            progress.say(f"{label}: {outcome}")
        else:
            progress.end(label, outcome)
        yield label, outcome


def _in_turn(
    experiments: Mapping[str, Experiment], folder: Path, progress: Bar, extras: Extras
) -> Iterator[tuple[str, History | FedkeepError]]:
    for label, experiment in experiments.items():
        progress.begin(label)
        try:
            yield label, experiment.run(folder / label, (progress, *extras.callbacks()))
        except FedkeepError as error:
            yield label, error


def _side_by_side(
    experiments: Mapping[str, Experiment], folder: Path, jobs: int, progress: Bar, extras: Extras
) -> Iterator[tuple[str, History | FedkeepError]]:
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(threads,))
    try:
        waiting = {
            pool.submit(_run, experiment.to_dict(), folder / label, extras): label
            for label, experiment in experiments.items()
        }
        for future in as_completed(waiting):
            label = waiting[future]
            progress.begin(label)
            failed = future.result()
            progress.advance(experiments[label].train.rounds)
            yield label, load_run(folder / label) if failed is None else failed
        pool.shutdown()
    except BaseException:  # Ctrl-C too: what is running ends now, what is waiting never starts
        for worker in list(pool._processes.values()):
            worker.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _run(plain: dict[str, Any], path: Path, extras: Extras) -> FedkeepError | None:
    """Run one experiment in this process; the history stays in its folder, and only what went wrong travels back."""
    try:
        Experiment.from_dict(plain).run(path, extras.callbacks())
    except FedkeepError as error:
        return error
    return None
