"""What a shell completes after `fedkeep run`: experiments, keys, and names of methods, models, data and splits.

Completion runs at every press of the tab key, so nothing large is imported: names are read from the source files.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import typer

_PACKAGE = Path(__file__).parents[1]


def complete_experiment(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return what may follow: experiments that come with fedkeep, files, `key=`, and the names after `method=`.

    bash divides a word at "=", other shells do not.
    """
    before = "".join(ctx.params.get("args") or ())
    if incomplete == "=" or before.endswith("="):
        key = before.rstrip("=")
        found = [name for known in ("method", "model", "split") if key.endswith(known) for name in names_of(known)]
        return [name for name in found if name.startswith(incomplete.lstrip("="))]
    key, equals, start = incomplete.partition("=")
    if equals:
        return [f"{key}={name}" for name in names_of(key) if name.startswith(start)]
    return [word for word in (*presets(), *_files(), *(f"{key}=" for key in keys())) if word.startswith(incomplete)]


def presets() -> list[str]:
    """Return the names of the experiments that come with fedkeep."""
    return sorted(path.stem for path in (_PACKAGE / "experiments" / "presets").glob("*.toml"))


def keys() -> list[str]:
    """Return the keys of an experiment; settings without `train.`."""
    tree = ast.parse((_PACKAGE / "engine" / "settings.py").read_text(encoding="utf-8"))
    [settings] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings"]
    fields = [n.target.id for n in settings.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    return ["method", "model", "data", "split", "seed", "label", *(name for name in fields if name != "seed")]


def names_of(key: str) -> list[str]:
    """Return the names that a key may have; an empty list for other keys."""
    if key in ("method", "method.name"):
        return sorted(["fedavg", *_modules(_PACKAGE / "methods")])
    if key in ("model", "model.name"):
        return _keys_of(_PACKAGE / "models" / "__init__.py", "REGISTRY")
    if key in ("split", "split.kind"):
        return _keys_of(_PACKAGE / "data" / "partition.py", "KINDS")
    return []


def _modules(folder: Path) -> Iterator[str]:
    return (path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def _keys_of(file: Path, variable: str) -> list[str]:
    """Return the keys of a dict that a module defines as `variable: type = {...}`."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Dict):
            continue
        if isinstance(node.target, ast.Name) and node.target.id == variable:
            return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    return []


def _files() -> list[str]:
    return sorted(path.name for path in Path.cwd().glob("*.toml"))
