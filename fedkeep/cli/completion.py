"""What a shell completes: experiments, keys, and names of methods, models, data, splits and settings' choices.

Completion runs at every press of the tab key, so nothing large is imported: names are read from the source files.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# the choices of settings: the file and the variable that has them
_CHOICES = {
    "lr_schedule": ("engine/lr_schedule.py", "SCHEDULES"),
    "optimizer": ("optim.py", "OPTIMIZERS"),
    "engine": ("engine/settings.py", "ENGINES"),
    "dtype": ("engine/settings.py", "DTYPES"),
    "autocast": ("engine/settings.py", "AUTOCAST"),
    "aggregation": ("engine/settings.py", "SMALLEST_COHORT"),
    "read_out": ("engine/settings.py", "READ_OUTS"),
}


def complete_experiment(incomplete: str) -> list[str]:
    """Return what may follow `fedkeep run`: experiments that come with fedkeep, files, `key=`, and names after it."""
    files = [] if _divided_by_bash() or "=" in incomplete else [*presets(), *_files()]
    return [*(word for word in files if word.startswith(incomplete)), *complete_change(incomplete)]


def complete_change(incomplete: str) -> list[str]:
    """Return what may follow `--sweep`: `key=`, and the names after it, also after a comma.

    Of a key that is the only one, values are offered too: a shell adds a space after a single word.
    """
    if divided := _divided_by_bash():
        return _complete_list(divided[1], names_of(divided[0]))
    key, equals, start = incomplete.partition("=")
    if equals:
        return [f"{key}={name}" for name in _complete_list(start, names_of(key))]
    found = [known for known in keys() if known.startswith(key)]
    values = names_of(found[0]) or ["", *_default(found[0])] if len(found) == 1 else [""]
    return [f"{one}={value}" for one in found for value in values]


def complete_method(incomplete: str) -> list[str]:
    """Return the names of methods, also after a comma."""
    return _complete_list(incomplete, names_of("method"))


def presets() -> list[str]:
    """Return the names of the experiments that come with fedkeep."""
    return sorted(path.stem for path in (_PACKAGE / "experiments" / "presets").glob("*.toml"))


def keys() -> list[str]:
    """Return the keys of an experiment; settings without `train.`."""
    return ["method", "model", "data", "split", "seed", "label", *(name for name in _settings() if name != "seed")]


def names_of(key: str) -> list[str]:
    """Return the names that a key may have; an empty list for other keys."""
    key = key.removeprefix("train.")
    if key in ("method", "method.name"):
        return sorted(["fedavg", *_modules(_PACKAGE / "methods")])
    if key in ("model", "model.name"):
        return _names_in("models/__init__.py", "REGISTRY")
    if key in ("data", "data.source"):
        return [name for variable in ("READY", "NAMED") for name in _names_in("data/sources/named.py", variable)]
    if key in ("split", "split.kind"):
        return _names_in("data/partition.py", "KINDS")
    if key == "device":
        return ["auto", "cpu", "cuda"]
    if key in _CHOICES:
        return _names_in(*_CHOICES[key])
    return ["true", "false"] if _settings().get(key) in ("True", "False") else []


def _divided_by_bash() -> tuple[str, str] | None:
    """Return key and value of a word that bash has divided at "="; None for other words, and in other shells."""
    words, place = os.environ.get("COMP_WORDS", "").split(), int(os.environ.get("COMP_CWORD", "0"))
    before, last = words[:place], "".join(words[place : place + 1])
    if last == "=" and before:
        return before[-1], ""
    if last and before[-1:] == ["="] and len(before) > 1:
        return before[-2], last
    return None


def _complete_list(incomplete: str, names: list[str]) -> list[str]:
    """Return the names that complete the last of several, separated by commas, after those before it.

    >>> _complete_list("fedavg,fedn", ["fedavg", "fedntd"])
    ['fedavg,fedntd']
    """
    before, comma, start = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in names if name.startswith(start)]


def _default(key: str) -> list[str]:
    """Return the default of a setting as an override has it, if it has one."""
    written = _settings().get(key)
    return [] if written is None else [written.replace("None", "none").strip("'\"")]


@cache
def _settings() -> dict[str, str]:
    """Return the settings of a run with their defaults as Python code."""
    tree = ast.parse((_PACKAGE / "engine" / "settings.py").read_text(encoding="utf-8"))
    [settings] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings"]
    found = [node for node in settings.body if isinstance(node, ast.AnnAssign) and node.value is not None]
    return {node.target.id: ast.unparse(node.value) for node in found if isinstance(node.target, ast.Name)}  # type: ignore[arg-type]


def _modules(folder: Path) -> Iterator[str]:
    return (path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def _names_in(file: str, variable: str) -> list[str]:
    """Return the keys of a dict, or the texts of a tuple, that a module assigns to a variable."""
    for node in ast.parse((_PACKAGE / file).read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not any(isinstance(target, ast.Name) and target.id == variable for target in targets):
            continue
        value = getattr(node, "value", None)
        names = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
        return [str(name.value) for name in names if isinstance(name, ast.Constant)]
    return []


def _files() -> list[str]:
    return sorted(path.name for path in Path.cwd().glob("*.toml"))
