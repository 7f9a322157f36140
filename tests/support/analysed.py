"""Runs that a study analyses as they train, uninterrupted and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fedkeep as fk
from fedkeep import instruments as ins
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.reading import read_instruments
from support.problems import Problem

ROUNDS = 4


def run_analysed(problem: Problem, method: str, every: int, study: str, path: Path) -> Path:
    """Run a method in a folder, with a study every so many rounds; return the folder."""
    parts, settings = (method, problem.model, problem.data, problem.clients), {**problem.settings, "rounds": ROUNDS}
    fk.simulate(*parts, run_dir=path, callbacks=ins.Every(every, study), **settings)
    return path


def resume_analysed(problem: Problem, method: str, every: int, study: str, path: Path) -> Path:
    """Do what `run_analysed` does, but stop after half of the rounds and resume from the folder."""
    for rounds in (ROUNDS // 2, ROUNDS):
        resumed = path.exists()
        with RunFolder.open(path) if resumed else RunFolder.create(path, {"checkpoint_every": 1}) as folder:
            simulation = problem.simulation(fk.methods.REGISTRY[method](), rounds=rounds).attach(folder)
            simulation.callbacks = (ins.Every(every, study),)
            simulation.run()
    return path


def results_of(study: str, *folders: Path) -> list[list[dict[str, Any]]]:
    """Return what each folder recorded of a study, one result per analysed round."""
    return [[line[study] for line in read_instruments(folder)] for folder in folders]
