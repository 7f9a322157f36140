"""Parts of an experiment that are not fedkeep's: models, data, callbacks and metrics, named `package.module:name`.

An installed package may also offer them under a short name, in the entry point groups `fedkeep.models`, `fedkeep.data`
and `fedkeep.callbacks`. Other code is imported only when the user has given its name (`fedkeep._util.own_parts`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedkeep import models
from fedkeep._util.own_parts import call_object, find_entry_point, is_own_part, load_entry_point, load_object, trust
from fedkeep._util.rng import seeded
from fedkeep._util.structure import structure_hash
from fedkeep._util.text import did_you_mean, format_value
from fedkeep.data import Dataset, load
from fedkeep.data.sources import generated, hub, named
from fedkeep.engine.simulation import Callback
from fedkeep.engine.user_metrics import metrics_by_name
from fedkeep.errors import ConfigError
from fedkeep.experiments.overrides import NAME_KEY, as_list, as_table

if TYPE_CHECKING:
    from fedkeep.experiments.experiment import Experiment

GROUPS = {"model": "fedkeep.models", "data": "fedkeep.data", "callbacks": "fedkeep.callbacks"}
# keys of [data] that fedkeep applies to the data set that a function returns, unless the function takes them itself
SHARED_OPTIONS = (
    "public", "public_ids", "public_alpha", "public_only", "min_per_id", "held_out", "validation", "normalise", "seed",
)  # fmt: skip
_FILLED_IN = {"model": ("input_shape", "n_classes"), "data": ("seed",), "callbacks": ()}


def named_code(tables: Mapping[str, Any]) -> dict[str, str]:
    """Return the code that an experiment's tables name, by key. Nothing is imported.

    >>> named_code({"model": {"name": "my_nets:small"}, "data": "digits", "callbacks": ["my_log:Csv"]})
    {'model.name': 'my_nets:small', 'callbacks': 'my_log:Csv'}
    """
    found = {}
    for section in ("model", "data"):
        table = as_table(section, tables.get(section))
        name = table.get(NAME_KEY[section]) if isinstance(table, dict) else None
        if is_code(section, name):
            found[f"{section}.{NAME_KEY[section]}"] = str(name)
    for number, item in enumerate(as_list(tables.get("callbacks"))):
        name = item.get("name") if isinstance(item, dict) else item
        if is_own_part(name):
            found[f"callbacks.{number}" if number else "callbacks"] = str(name)
    metrics = metrics_by_name(tables.get("metrics"), ConfigError)
    return found | {f"metrics.{name}": code for name, code in metrics.items() if is_own_part(code)}


def trust_given(tables: Mapping[str, Any]) -> None:
    """Allow the code to be loaded that these tables name: the user wrote them, or typed them as changes to others."""
    trust(named_code(tables).values())


def is_code(section: str, name: object) -> bool:
    """Return whether a section's name is `package.module:name`; `hf:NAME` and `generated:NAME` are data sets."""
    of_data = section == "data" and str(name).startswith((hub.PREFIX, generated.PREFIX))
    return is_own_part(name) and not of_data


def is_own(section: str, name: object) -> bool:
    """Return whether a part is the user's or an installed package's; False for fedkeep's own parts."""
    return is_code(section, name) or _entry_point(section, name) is not None


def _entry_point(section: str, name: object) -> EntryPoint | None:
    """Return the part that an installed package offers under a name that is not one of fedkeep's."""
    known = name in models.REGISTRY if section == "model" else section == "data" and named.canonical_name(str(name))
    if known or not isinstance(name, str) or not name.isidentifier():
        return None
    return find_entry_point(GROUPS[section], name)


def _load(section: str, name: str) -> Callable[..., Any]:
    key = f"{section}.{NAME_KEY[section]}" if section in NAME_KEY else section
    point = None if is_code(section, name) else _entry_point(section, name)
    return load_object(name, key=key) if point is None else load_entry_point(point, key=key)


def load_part(section: str, name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Import a part and return it; raise if it does not take these options."""
    key = f"{section}.{NAME_KEY[section]}" if section in NAME_KEY else section
    part = _load(section, name)
    parameters = _parameters(part, key, name)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return part
    for option, value in options.items():
        if option not in parameters and not (section == "data" and option in SHARED_OPTIONS):
            suggestion = did_you_mean(option, list(parameters), section)
            raise ConfigError(
                f"{name} has no option {option!r}: {suggestion}", key=f"{section}.{option}", value=value,
                valid=list(parameters),
            )  # fmt: skip
    if section == "callbacks" and is_callback(part, options):
        return part
    for parameter in parameters.values():
        required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        if required and parameter.name not in (*options, *_FILLED_IN[section]):
            raise ConfigError(
                f"{section}.{parameter.name} is missing: {name} needs it", key=f"{section}.{parameter.name}"
            )
    return part


def build_own_model(table: Mapping[str, Any], input_shape: Any, n_classes: int, seed: int) -> nn.Module:
    """Call the user's function, or build the user's class, with torch seeded by the run's seed."""
    options = dict(table)
    name = options.pop("name")
    part = load_part("model", name, options)
    filled = {"input_shape": input_shape, "n_classes": n_classes}
    with seeded(seed, torch.device("cpu")):
        model = call_object(part, name, "model.name", _filled(part, options, filled))
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.name = {name!r} returned {type(model).__name__}, not a torch.nn.Module",
            key="model.name",
            value=name,
        )
    return model


def load_own_data(table: Mapping[str, Any], seed: int) -> Dataset:
    """Call the user's function, and apply the options of [data] that hold for every data set."""
    options = {"seed": seed, **table}
    name = options.pop("source")
    part = load_part("data", name, options)
    named_options = _parameters(part, "data.source", name)
    shared = {key: options.pop(key) for key in SHARED_OPTIONS if key in options and key not in named_options}
    data = call_object(part, name, "data.source", options)
    if not isinstance(data, Dataset):
        raise ConfigError(
            f"data.source = {name!r} returned {type(data).__name__}, not what fedkeep.data.load or from_arrays return",
            key="data.source",
            value=name,
        )
    return load(data, **shared)


def parse_callbacks(given: Any) -> list[dict[str, Any]]:
    """Return the callbacks of an experiment as tables; each may be given by its name alone."""
    several = given if isinstance(given, list) else [given]
    tables = [{"name": each} if isinstance(each, str) else each for each in several]
    for table in tables:
        if not isinstance(table, dict) or not isinstance(table.get("name"), str):
            raise ConfigError(
                f"callbacks has {format_value(table)}: write a list of package.module:name, or of tables with name",
                key="callbacks",
                value=table,
            )
    return tables


def is_callback(part: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a function is a callback itself: it needs two arguments, and no options are given for it."""
    if isinstance(part, type) or options:
        return False
    parameters = inspect.signature(part).parameters.values()
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) == 2


def make_own_callbacks(callbacks: Iterable[Mapping[str, Any]]) -> list[Callback]:
    """Return new callbacks: a function of the simulation and the record, what others return, instances of classes."""
    made = []
    for table in callbacks:
        options = dict(table)
        name = options.pop("name")
        part = load_part("callbacks", name, options)
        callback = part if is_callback(part, options) else call_object(part, name, "callbacks", options)
        if not callable(callback):
            raise ConfigError(
                f"callbacks = {name!r} returned {format_value(callback, most=60)}, which cannot be called with the "
                "simulation and the record",
                key="callbacks",
                value=name,
            )
        made.append(callback)
    return made


def metric_names(given: Any) -> dict[str, str]:
    """Return metrics as `package.module:function` by name; raise if they are written in another way.

    >>> metric_names(["my_metrics:specificity"])
    {'specificity': 'my_metrics:specificity'}
    """
    metrics = metrics_by_name(given, ConfigError)
    for name, code in metrics.items():
        if not is_own_part(code):
            raise ConfigError(
                f"metrics.{name} = {format_value(code)}: write package.module:function",
                key=f"metrics.{name}",
                value=code,
            )
    return metrics


def load_metrics(experiment: Experiment) -> dict[str, Callable[..., Any]]:
    """Import an experiment's metrics and return them by name."""
    return {name: load_object(code, key=f"metrics.{name}") for name, code in experiment.metrics.items()}


def check_parts(experiment: Experiment) -> None:
    """Import the parts that an experiment names; raise if one does not exist or does not take its options."""
    for section, name, options in _parts(experiment):
        load_part(section, name, options)
    load_metrics(experiment)


def code_hashes(experiment: Experiment) -> dict[str, str]:
    """Return a hash of the source of each own part, by section; comments and layout do not count."""
    found: dict[str, str] = {}
    for section, name, _ in _parts(experiment):
        code = structure_hash(_load(section, name))
        found[section] = f"{found[section]} {code}" if section in found else code
    return found


def _parts(experiment: Experiment) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the section, name and options of every part of an experiment that is not fedkeep's."""
    tables = [("model", experiment.model), ("data", experiment.data)]
    for section, table in [*tables, *(("callbacks", each) for each in experiment.callbacks)]:
        options = dict(table)
        name = options.pop(NAME_KEY.get(section, "name"))
        if section == "callbacks" or is_own(section, name):
            yield section, name, options


def _parameters(part: Callable[..., Any], key: str, name: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(part).parameters
    except (TypeError, ValueError):
        raise ConfigError(f"{key} = {name!r}: its arguments are not known", key=key, value=name) from None


def _filled(part: Callable[..., Any], options: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return the options, with what fedkeep knows for arguments that have no value yet."""
    parameters = inspect.signature(part).parameters
    return {**{key: value for key, value in known.items() if key in parameters}, **options}
