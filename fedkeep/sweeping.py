"""Many runs: one after another, or several at a time in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from fedkeep.config import Experiment
from fedkeep.errors import Diverged
from fedkeep.history import History
from fedkeep.runs import load_run
from fedkeep.terminal import Bar


def run_all(
    experiments: Mapping[str, Experiment], folder: Path, jobs: int, progress: Bar
) -> Iterator[tuple[str, History | Diverged]]:
    """Run experiments into folders of their names, and yield each when it is done; one may diverge, the rest go on."""
    if jobs == 1:
        for label, experiment in experiments.items():
            progress.begin(label)
            try:
                yield label, experiment.run(folder / label, (progress,))
            except Diverged as error:
                yield label, error
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        waiting = {
            pool.submit(_run, experiment.to_dict(), folder / label): label for label, experiment in experiments.items()
        }
        for future in as_completed(waiting):
            label = waiting[future]
            progress.begin(label)
            diverged = future.result()
            progress.advance(experiments[label].train.rounds)
            yield label, load_run(folder / label) if diverged is None else Diverged(*diverged)


def _run(plain: dict[str, Any], path: Path) -> tuple[int, int | None, str] | None:
    """Run one experiment in this process; the history stays in its folder, and only a divergence travels back."""
    try:
        Experiment.from_dict(plain).run(path)
    except Diverged as error:
        return error.round, error.client, error.what
    return None
