"""Checks of the tables of an experiment file: their keys, the names of parts, and the settings in [train]."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedkeep._util.text import did_you_mean, format_value
from fedkeep._util.validate import first_error
from fedkeep.data import Augment
from fedkeep.data.reductions import check_reductions
from fedkeep.engine.settings import Settings
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.experiments.overrides import NAME_KEY, TRAIN


def parse_settings(table: dict[str, Any]) -> Settings:
    """Return the settings of [train] and the seed; raise at the first key or value that is not valid."""
    require_known("train", {key: value for key, value in table.items() if key != "seed"}, TRAIN)
    if isinstance(table.get("augment"), dict):
        require_known("train.augment", table["augment"], [f.name for f in fields(Augment)])
    for key, value in table.items():
        if isinstance(value, bool) and key not in ("deterministic", "tf32", "drop_last"):
            raise ConfigError(f"train.{key} cannot be {str(value).lower()}", key=f"train.{key}", value=value)
    if table.get("reductions") is not None:
        try:
            table = {**table, "reductions": check_reductions(table["reductions"])}
        except FedkeepError as error:
            raise ConfigError(f"train.{error}", key=f"train.{error.key}", value=error.value) from None
    try:
        return _settings_adapter().validate_python(table)
    except ValidationError as error:
        first = first_error("" if error.errors()[0]["loc"] == ("seed",) else "train.", error)
        if first.key in TRAIN:
            first.key = f"train.{first.key}"
        raise first from None


@functools.cache
def _settings_adapter() -> TypeAdapter[Settings]:
    """Return the validator of settings. To build it takes 10 ms, and a table has hundreds of experiments."""
    return TypeAdapter(Settings)


def require_name(section: str, table: dict[str, Any]) -> str:
    """Return the name in a section, such as method.name or split.kind; raise if there is none."""
    key = f"{section}.{NAME_KEY[section]}"
    name = table.get(NAME_KEY[section])
    if name is None:
        raise ConfigError(f"{key} is missing", key=key)
    if not isinstance(name, str):
        raise not_a_name(key, name)
    return name


def not_a_name(key: str, value: Any) -> ConfigError:
    """Return the error of a part that is given as an object, or as anything else than a name."""
    return ConfigError(
        f"{key} must be a name, not {format_value(value)}: an experiment names its parts; "
        "to use objects of Python, call fedkeep.simulate",
        key=key,
        value=value,
    )


def require_one_method(table: dict[str, Any]) -> str:
    """Return the method's name; raise if several are named, and say which options take several."""
    name = table.get("name")
    several = ",".join(map(str, name)) if isinstance(name, list) else str(name).strip("[]")
    if several == "all" or "," in several:
        names = "fedavg,fedntd" if several == "all" else several
        raise ConfigError(
            f"method = {format_value(name)}: an experiment has one method. For one run of each of several, use fedkeep "
            f"run with --sweep method={several}; to tune several, use fedkeep tune with --methods {names}",
            key="method.name",
            value=name,
        )
    return require_name("method", table)


def require_known(section: str, table: dict[str, Any], valid: Iterable[str], of: str = "") -> None:
    """Raise if a table has a key that is not among the valid ones; `of` says of what, in the message."""
    names = sorted(valid)
    for key, value in table.items():
        if key not in names:
            full = f"{section}.{key}" if section else key
            suggestion = did_you_mean(key, names, section)
            if not section and key in TRAIN:
                suggestion = f"write it in the table [train]; {suggestion}"
            raise ConfigError(f"unknown key {full!r}{of}: {suggestion}", key=full, value=value, valid=names)
