"""Loading a run together with its model, as far as its folder says what the model is."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from torch import nn

from fedkeep._util.own_parts import trust as allow
from fedkeep.errors import FedkeepError, RunError, UntrustedCode
from fedkeep.experiments.build import build_model, build_network
from fedkeep.experiments.experiment import Experiment
from fedkeep.runs import reading
from fedkeep.runs.federation_copy import with_own_files
from fedkeep.runs.history import History
from fedkeep.task import Task
from fedkeep.tree import Tree


def load_run(path: str | Path, weights: bool = True, trust: str | Iterable[str] = ()) -> History:
    """Return the history of a run as far as it has come. The run may be finished, running or interrupted.

    A damaged or foreign file raises `RunError`, whose `key` is the file's name. A damaged checkpoint is only reported,
    because the rounds do not depend on it. With `weights=False` its weights are not read, which is faster.

    `history.model` is built when it is used. Code of your own that the folder names is imported then only if `trust`
    has its name, or its module. A model that was given to `simulate` as an object is not in the folder.
    """
    allow(trust)
    history = reading.load_run(path, weights)
    if weights:
        history.build = partial(_build, history)
    return history


def _build(history: History, params: Tree) -> nn.Module:
    """Build the model of a run; without the data, where the run recorded what the model was built for."""
    about, folder = history.about, history.folder
    assert folder is not None
    if not params:
        raise RunError(f"{folder} has no checkpoint whose weights can be read", key="model", value=str(folder))
    made_by = about.get("made_by", {})
    table = {"name": made_by["model_name"]} if "model_name" in made_by else about["model"]
    if "name" not in table:
        raise RunError(
            f"the model of {folder} is an object of the class {table.get('class')} in Python, which a folder cannot "
            "hold: build it, and load the weights with model.load_state_dict(history.params, strict=False)",
            key="model",
            value=table.get("class"),
        )
    if "input_shape" in made_by:
        model = build_network(table, tuple(made_by["input_shape"]), made_by["n_classes"], about["seed"])
        return Task(model, made_by["n_classes"], 1).module(params)
    try:
        return build_model(Experiment.from_dict(with_own_files(about, folder)), params)
    except UntrustedCode:
        raise
    except FedkeepError as error:
        raise error.converted(RunError, f"the model of {folder} cannot be built without its data: {error}") from error
