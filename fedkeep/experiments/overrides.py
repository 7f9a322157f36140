"""Changes to the tables of an experiment: `key=value` overrides, sweeps and merging."""

from __future__ import annotations

import copy
import itertools
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedkeep import methods
from fedkeep._util.text import did_you_mean, format_value
from fedkeep._util.toml import parse_toml
from fedkeep.engine.option_places import sections_with
from fedkeep.engine.settings import DEFAULTS
from fedkeep.errors import ConfigError

NAME_KEY = {"method": "name", "model": "name", "data": "source", "split": "kind"}  # the key of a section's name
TRAIN = [name for name in DEFAULTS if name != "seed"]
_OPTIONAL = [  # what `none` switches off
    *(f"train.{name}" for name, default in DEFAULTS.items() if default is None),
    *(f"data.{name}" for name in ("held_out", "public", "public_alpha", "public_ids")),
]
# the top-level keys of an experiment
KEYS = [
    *NAME_KEY,
    "train",
    "seed",
    "checkpoint_every",
    "keep",
    "label",
    "callbacks",
    "metrics",
]


def override(tables: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return an experiment's tables with `key=value` overrides applied.

    A key of [train] may be written without `train.`. Another method, model, data set or split drops the options of the
    old one. TOML has no empty value: `none` (or `None`) removes a setting that is off by default, such as clip_norm.

    >>> override({"split": {"kind": "shards", "s": 2}}, ["split.file=published.json"])
    {'split': {'kind': 'file', 'file': 'published.json'}}
    >>> override({"method": {"name": "fedntd", "beta": 0.5}}, ["method=fedprox", "lr=0.1", "split.kind=iid"])
    {'method': {'name': 'fedprox'}, 'train': {'lr': 0.1}, 'split': {'kind': 'iid'}}
    """
    tables = copy.deepcopy(tables)
    for text in overrides:
        key, equals, written = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"{text!r} is not an override: write key=value, such as train.lr=0.1", key="override", value=text
            )
        full = full_key(key.strip())
        _apply(tables, full, _parse_value(full, written))
    return tables


def with_values(tables: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return an experiment's tables with values from Python in place of theirs; None switches a setting off.

    >>> with_values({"method": "fedntd", "train": {"clip_norm": 1.0}}, {"method": "fedavg", "clip_norm": None, "lr": 1})
    {'method': {'name': 'fedavg'}, 'train': {'lr': 1}}
    """
    tables = copy.deepcopy(tables)
    for key, value in changes.items():
        if (full := full_key(key)) in ("label", "keep", "checkpoint_every", "callbacks") and value is None:
            tables.pop(full, None)
        else:
            _apply(tables, full, "none" if value is None else copy.deepcopy(value))
    return tables


def _apply(tables: dict[str, Any], full: str, value: Any) -> None:
    """Set one key of an experiment's tables, in place."""
    section, _, name = full.partition(".")
    if section in NAME_KEY and name in ("", NAME_KEY[section]):
        old = tables.get(section)
        if isinstance(value, dict):
            tables[section] = value
        elif not isinstance(old, dict) or old.get(NAME_KEY[section]) != value:
            tables[section] = {NAME_KEY[section]: value}
    elif full == "split.file":
        old = as_table(section, tables.get(section, {}))
        kept = old if isinstance(old, dict) and old.get("kind") == "file" else {"kind": "file"}
        tables[section] = {**kept, "file": value}
    elif name:
        tables[section] = as_table(section, tables.get(section, {}))
        if full in _OPTIONAL and value in ("none", "None") and isinstance(tables[section], dict):
            tables[section].pop(name, None)
        else:
            _set(tables[section], full, value)
    else:
        tables[section] = value


def _set(table: Any, full: str, value: Any) -> None:
    """Set `section.a.b` in the section's table, in place; missing tables in between are created."""
    section, *parents, last = full.split(".")
    for parent in parents:
        table = table.setdefault(parent, {}) if isinstance(table, dict) else table
    if not isinstance(table, dict):
        parent = ".".join([section, *parents])
        raise ConfigError(f"{full} cannot be set: {parent} is not a table", key=full, value=value)
    table[last] = value


def merge(tables: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return an experiment's tables with some of another's merged into them, key by key.

    Another method, model or kind of split replaces the whole table, because the old one's options do not apply to it.

    >>> merge({"model": "mlp", "split": {"kind": "shards", "s": 2}}, {"model": {"projection": 8}, "split": "iid"})
    {'model': {'name': 'mlp', 'projection': 8}, 'split': {'kind': 'iid'}}
    """
    merged = dict(tables)
    for key, change in changes.items():
        old, new = as_table(key, merged.get(key)), as_table(key, change)
        merged[key] = new if _is_other_name(key, old, new) else _deep_merge(old, new)
    return merged


def _is_other_name(section: str, old: Any, new: Any) -> bool:
    """Return whether a table names another method, model or kind of split than the old table."""
    if section not in ("method", "model", "split") or not isinstance(new, dict):
        return False
    key = NAME_KEY[section]
    return new.get(key) not in (None, (old or {}).get(key))


def _deep_merge(old: Any, new: Any) -> Any:
    """Return the new value; of two tables, the old one updated key by key, at any depth."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{key: _deep_merge(old.get(key), value) for key, value in new.items()}}


def as_table(section: str, value: Any) -> Any:
    """Return a section as a table, also if it is given by its name alone; a split with a `file` is of that kind."""
    if section == "split" and isinstance(value, dict) and "file" in value:
        return {"kind": "file", **value}
    return {NAME_KEY[section]: value} if isinstance(value, str) and section in NAME_KEY else value


def as_list(value: Any) -> list[Any]:
    """Return the value of a key that may hold several, such as callbacks, as a list."""
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def expand_sweep(axes: Sequence[str], fixed: Sequence[str] = ()) -> list[list[str]]:
    """Turn `key=a,b,c` sweeps into lists of overrides, one per combination; raise if `fixed` overrides a swept key.

    >>> expand_sweep(["seed=0,1", "method=fedavg,fedntd"])[1:3]
    [['seed=0', 'method=fedntd'], ['seed=1', 'method=fedavg']]
    """
    overrides: dict[str, list[str]] = {}
    for text in axes:
        key, equals, written = text.partition("=")
        if not equals or not written:
            raise ConfigError(f"{text!r} is not a sweep: write key=a,b,c, such as seed=0,1,2", key="sweep", value=text)
        full = full_key(key.strip())
        if full in overrides:
            raise ConfigError(f"{key} is swept twice", key=full, value=text)
        values = [value.strip() for value in re.split(r",(?![^\[{]*[\]}])", written)]
        if sweeps_all_methods([text]):
            values = list(methods.discover())
        overrides[full] = [f"{key}={value}" for value in values]
    for text in fixed:
        key = text.partition("=")[0].strip()
        if overrides and full_key(key) in overrides:
            raise ConfigError(f"{key} is both swept and overridden by {text!r}", key=full_key(key), value=text)
    return [list(combination) for combination in itertools.product(*overrides.values())]


def sweeps_all_methods(axes: Sequence[str]) -> bool:
    """Return whether one of the sweeps is `method=all`."""
    pairs = [[part.strip() for part in text.partition("=")] for text in axes]
    return any(key in ("method", "method.name") and value == "all" for key, _, value in pairs)


def full_key(key: str) -> str:
    """Return a key with its section: `train.` may be left out."""
    if key.partition(".")[0] in KEYS:
        return key
    if key.partition(".")[0] in TRAIN:
        return f"train.{key}"
    valid = [*KEYS, *(f"train.{name}" if "." in key else name for name in TRAIN)]
    if sections := sections_with(key):
        places = " or ".join(f"{section}.{key}" for section in sections)
        raise ConfigError(f"unknown key {key!r}: did you mean {places}?", key=key, valid=valid)
    raise ConfigError(f"unknown key {key!r}: {did_you_mean(key, valid)}", key=key, valid=valid)


def _parse_value(key: str, text: str) -> Any:
    """Return a value written as TOML, or True or False as Python writes them; anything else is a string."""
    if text.strip() in ("True", "False"):
        return text.strip() == "True"
    try:
        return parse_toml(f"v = {text}")["v"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text
    except ValueError as error:
        message = str(error).removeprefix("v is ")
        raise ConfigError(f"{key} = {format_value(text, most=60)}: {message}", key=key, value=text) from None
