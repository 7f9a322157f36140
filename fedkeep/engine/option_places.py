"""Places of options: which part of an experiment has an option, for messages about one in the wrong place."""

from __future__ import annotations

import inspect
from dataclasses import fields

from fedkeep import methods, models
from fedkeep._util.validate import require_choice
from fedkeep.data import load, partition
from fedkeep.data.sources.common import Options
from fedkeep.engine.settings import Settings
from fedkeep.errors import FedkeepError

_IN_PYTHON = {
    "data": "fedkeep.data.load",
    "split": "the function of fedkeep.data.partition",
    "model": "fedkeep.models.build",
    "method": "the method's class in fedkeep.methods",
}


def sections_with(option: str) -> list[str]:
    """Return the sections of an experiment that have an option of this name.

    >>> sections_with("held_out"), sections_with("projection"), sections_with("lr")
    (['data'], ['model'], ['method'])
    """
    splits = {name for kind in partition.KINDS.values() for name in inspect.signature(kind).parameters}
    names = {
        "data": {*inspect.signature(load).parameters, *(f.name for f in fields(Options))} - {"source", "options"},
        "split": splits - {"y", "ids"},
        "model": {name for model in models.REGISTRY for name in models.options(model)},
        "method": {name for method in methods.discover().values() for name in method.hyperparameters()},
    }
    return [section for section, options in names.items() if option in options]


def require_setting(name: str) -> None:
    """Raise unless this is the name of a setting; say where it belongs if something else has an option of this name."""
    if name not in Settings.__dataclass_fields__ and (sections := sections_with(name)):
        places = " or ".join(_IN_PYTHON[section] for section in sections)
        raise FedkeepError(f"unknown setting {name!r}: it is an option of {places}", key=name)
    require_choice(name, name, Settings.__dataclass_fields__, what="setting")
