"""Files that an experiment names: relative to its file, and recorded so that they are found from any folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedkeep._util.own_parts import is_own_part
from fedkeep.data.sources import generated, hub, named
from fedkeep.experiments.overrides import as_table

# the keys that always name a file or a folder, and those that name one if it exists: other values are names on a hub
_FILES = {"data": ("source", "root"), "split": ("file",), "train": ("cohorts",)}
_FILES_OR_NAMES = {"data": ("tokenizer",), "model": ("path",)}


def with_absolute_paths(tables: Mapping[str, Any], folder: Path, must_exist: bool = False) -> dict[str, Any]:
    """Return an experiment's tables with absolute paths of its files, which are relative to a folder.

    A file that exists in the working directory and not in the folder is that one. With `must_exist`, paths of files
    that do not exist stay as they are, so that errors show what was written.

    >>> with_absolute_paths({"data": "digits", "split": {"file": "s.json"}}, Path("/project"))
    {'data': {'source': 'digits'}, 'split': {'kind': 'file', 'file': '/project/s.json'}}
    """
    changed: dict[str, Any] = {section: as_table(section, value) for section, value in tables.items()}
    for keys, is_file in ((_FILES, True), (_FILES_OR_NAMES, False)):
        for section, names in keys.items():
            table = changed.get(section)
            if not isinstance(table, dict):
                continue
            found = {name: table[name] for name in names if _is_path(section, name, table.get(name))}
            paths = {name: _absolute(value, folder, must_exist or not is_file) for name, value in found.items()}
            changed[section] = {**table, **paths}
    return changed


def is_data_file(source: object) -> bool:
    """Return whether a data source is a file or a folder, not the name of a data set or of a function.

    >>> [name for name in ("digits", "hf:mnist", "my_data:load", "wards.csv") if is_data_file(name)]
    ['wards.csv']
    """
    if not isinstance(source, str) or source.startswith((hub.PREFIX, generated.PREFIX)) or is_own_part(source):
        return False
    return named.canonical_name(source) is None


def _is_path(section: str, name: str, value: object) -> bool:
    if not isinstance(value, str) or not value or value.startswith("~") or "\0" in value:
        return False
    return is_data_file(value) if (section, name) == ("data", "source") else True


def _absolute(value: str, folder: Path, must_exist: bool) -> str:
    for place in (folder, Path.cwd()):
        if (place / value).exists():
            return os.path.abspath(place / value)
    known_file = Path(value).suffix or "/" in value  # anything else may be a misspelt name
    return value if must_exist or not known_file else os.path.abspath(folder / value)
