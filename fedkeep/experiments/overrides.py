"""Experiments as plain tables, and how words change them: overrides, sweeps, one experiment's tables over another's."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from fedkeep import methods
from fedkeep._util.text import did_you_mean
from fedkeep.engine.settings import Settings
from fedkeep.errors import ConfigError

NAME_KEY = {"method": "name", "model": "name", "data": "source", "split": "kind"}  # what a section is about, by its key
TRAIN = [f.name for f in fields(Settings) if f.name != "seed"]
KEYS = [*NAME_KEY, "train", "seed", "checkpoint_every"]  # of an experiment


def override(given: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Apply `key=value` overrides; a key of [train] may stand alone, and a new method drops the old one's settings.

    >>> override({"method": {"name": "fedntd", "beta": 0.5}}, ["method=fedprox", "lr=0.1", "split.kind=iid"])
    {'method': {'name': 'fedprox'}, 'train': {'lr': 0.1}, 'split': {'kind': 'iid'}}
    """
    given = {key: dict(value) if isinstance(value, dict) else value for key, value in given.items()}
    for text in overrides:
        key, equals, written = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{text!r} is not an override: write key=value, such as train.lr=0.1")
        section, _, name = _place(key.strip()).partition(".")
        value = _value(written)
        if section in NAME_KEY and name in ("", NAME_KEY[section]):
            same = isinstance(given.get(section), dict) and given[section].get(NAME_KEY[section]) == value
            given[section] = given[section] if same else {NAME_KEY[section]: value}
        elif name:
            table = as_table(section, given.get(section, {}))
            inner = table
            *parents, last = name.split(".")
            for parent in parents:
                inner = inner.setdefault(parent, {}) if isinstance(inner, dict) else inner
            if not isinstance(inner, dict):
                raise ConfigError(f"{text!r}: there is no table {'.'.join([section, *parents])} to set {last} in")
            inner[last] = value
            given[section] = table
        else:
            given[section] = value
    return given


def merge(given: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Put some tables of an experiment over those of another, key by key; another method, model or kind of split
    replaces its table, for the settings of the old one mean nothing to it.

    >>> merge({"model": "mlp", "split": {"kind": "shards", "s": 2}}, {"model": {"projection": 8}, "split": "iid"})
    {'model': {'name': 'mlp', 'projection': 8}, 'split': {'kind': 'iid'}}
    """
    out = dict(given)
    for key, change in changes.items():
        old, new = as_table(key, out.get(key)), as_table(key, change)
        subject = NAME_KEY[key] if key in ("method", "model", "split") else None
        other = (
            subject is not None and isinstance(new, dict) and new.get(subject) not in (None, (old or {}).get(subject))
        )
        out[key] = new if other else _over(old, new)
    return out


def _over(old: Any, new: Any) -> Any:
    """Put a value over another; tables key by key, however deep."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{key: _over(old.get(key), value) for key, value in new.items()}}


def as_table(section: str, value: Any) -> Any:
    """Write a section that is given by its name alone as a table."""
    return {NAME_KEY[section]: value} if isinstance(value, str) and section in NAME_KEY else value


def expand_sweep(swept: Sequence[str]) -> list[list[str]]:
    """Turn `key=a,b,c` sweeps into lists of overrides, one per combination.

    >>> expand_sweep(["seed=0,1", "method=fedavg,fedntd"])[1:3]
    [['seed=0', 'method=fedntd'], ['seed=1', 'method=fedavg']]
    """
    axes: list[list[str]] = []
    places: list[str] = []
    for text in swept:
        key, equals, written = text.partition("=")
        if not equals or not written:
            raise ConfigError(f"{text!r} is not a sweep: write key=a,b,c, such as seed=0,1,2")
        place = _place(key.strip())
        if place in places:
            raise ConfigError(f"{key} is swept twice")
        places.append(place)
        values = [value.strip() for value in re.split(r",(?![^\[{]*[\]}])", written)]
        if values == ["all"] and key in ("method", "method.name"):
            values = list(methods.discover())
        axes.append([f"{key}={value}" for value in values])
    return [list(combination) for combination in itertools.product(*axes)]


def _place(key: str) -> str:
    if key.partition(".")[0] in KEYS:
        return key
    if key in TRAIN:
        return f"train.{key}"
    valid = [*KEYS, *(f"train.{name}" for name in TRAIN)]
    raise ConfigError(f"unknown key {key!r}: {did_you_mean(key, [*valid, *TRAIN])}")


def _value(written: str) -> Any:
    """Read a value as TOML, or else as the text it is."""
    try:
        return tomllib.loads(f"v = {written}")["v"]
    except tomllib.TOMLDecodeError:
        return written
