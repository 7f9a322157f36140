"""What a page is about: data, clients, rounds, model and seeds of a problem, and the names of its classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedkeep._util.text import clip, printable, short_name
from fedkeep.analysis.groups import Group, Problem
from fedkeep.analysis.labels import problem_facts

MAX_NAME = 40  # characters of a class's or client's name


def facts(problem: Problem) -> list[str]:
    """Return what the problem is, in a few words each, from the data to the number of seeds."""
    first = problem_facts(problem.tables) if problem.tables else [problem.title]
    classes = {run.class_accuracy.shape[1] for group in problem.groups for run in group.runs}
    if len(classes) == 1 and first:
        first[0] = f"{first[0]}, {classes.pop()} classes"
    models = {_model_name(group) for group in problem.groups} - {""}
    seeds = sorted({len(group.runs) for group in problem.groups})
    model = [models.pop() if len(models) == 1 else f"{len(models)} models"] if models else []
    number = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return [*first, *model, f"{number} seed{'s' * (seeds[-1] > 1)}"]


def class_names(groups: Sequence[Group]) -> list[str] | None:
    """Return the names of the classes, where the data has some."""
    for run in (run for group in groups for run in group.runs):
        names = run.history.class_names
        if names is not None and len(names) == run.class_accuracy.shape[1]:
            return [short_name(name, MAX_NAME) for name in names]
    return None


def typical_seed(groups: Sequence[Group]) -> int:
    """Return the seed on which these groups are nearest to their means in accuracy and forgetting."""
    seeds = sorted(set.intersection(*(set(group.seeds) for group in groups)) or set(groups[0].seeds))

    def distance(seed: int) -> float:
        gaps = [
            abs(run.summary[key] - group.mean[key])
            for group in groups
            for run in group.runs
            if run.seed == seed
            for key in ("final", "forgetting")
        ]
        return float(np.nansum(gaps))

    return min(seeds, key=distance)


def _model_name(group: Group) -> str:
    """Return what the model is called: the name that it was given by, or its class."""
    model: dict[str, Any] = group.setting.get("model", {})
    given = group.runs[0].history.about.get("made_by", {}).get("model_name")
    return clip(printable(given or model.get("name", model.get("class", ""))), 30)
