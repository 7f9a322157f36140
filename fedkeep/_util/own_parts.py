"""A user's own parts, by name: a model, data set, metric or callback written as `package.module:name`.

Loading one imports a module, which runs its code. So only names are loaded that the user has given in this process: in
an experiment file of theirs, on the command line or in Python (`trust`). A name that was merely read from a run folder
is refused. An installed package may offer parts too, as entry points: the user has installed it, so these are loaded.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import Any

from fedkeep._util.text import did_you_mean, format_value, one_line
from fedkeep.errors import ConfigError, FedkeepError, UntrustedCode

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_IN_RUN_FOLDER = "rounds.jsonl"
_trusted: set[str] = set()  # names and modules that the user has given
_folders: set[str] = set()  # from which the user's modules may be imported


def is_own_part(name: object) -> bool:
    """Return whether a name is that of an object in a module; other names are those of built-in parts.

    >>> is_own_part("my_models:small_net"), is_own_part("mlp"), is_own_part("hf:user/data")
    (True, False, False)
    """
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def module_of(name: str) -> str:
    """Return the module of an own part.

    >>> module_of("package.module:factory")
    'package.module'
    """
    return name.partition(":")[0]


def trust(names: Iterable[str]) -> None:
    """Allow parts to be loaded: `package.module:name`, or all functions and classes that a `package.module` defines."""
    for name in [names] if isinstance(names, str) else names:
        if not isinstance(name, str) or not (is_own_part(name) or is_own_part(f"{name}:x")):
            raise ConfigError(
                f"trust = {format_value(name)}: write package.module:name, or package.module", key="trust", value=name
            )
        _trusted.add(name)


def trusted() -> frozenset[str]:
    """Return the names and modules that the user has given so far, for other processes."""
    return frozenset(_trusted)


def is_trusted(name: str) -> bool:
    """Return whether the user has given this name, or its module."""
    return name in _trusted or module_of(name) in _trusted


def load_object(name: str, *, key: str, error: type[FedkeepError] = ConfigError) -> Callable[..., Any]:
    """Import a module and return the function or class `package.module:name` in it; errors name the `key`.

    The user must have given the name (`trust`). Modules in the working directory can be imported, and those in folders
    that `import_from` was called with; an installed module of the same name comes first.

    >>> trust(["fractions:Fraction", "fractions:Fractoin"])
    >>> load_object("fractions:Fraction", key="model")
    <class 'fractions.Fraction'>
    >>> load_object("fractions:Fractoin", key="model")
    Traceback (most recent call last):
    fedkeep.errors.ConfigError: model = 'fractions:Fractoin': the module fractions has no Fractoin: did you mean Fraction? (valid: Decimal, Fraction)
    """  # noqa: E501
    if not is_own_part(name):
        raise error(f"{key} = {format_value(name)}: write package.module:name", key=key, value=name)
    if not is_trusted(name):
        raise UntrustedCode(
            f"{key} = {name!r} is code, and is not run only because a run folder names it: to run it, add --trust "
            f"{module_of(name)} (in Python: trust={module_of(name)!r})",
            key=key,
            value=name,
        )
    import_from(Path.cwd())
    module, _, attribute = name.partition(":")

    def problem(reason: str, valid: list[str] | None = None) -> FedkeepError:
        return error(f"{key} = {name!r}: {reason}", key=key, value=name, valid=valid)

    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name is not None and f"{module}.".startswith(f"{missing.name}."):
            raise problem(
                f"there is no module {missing.name}: it must be installed, in the working directory, or next to the "
                "experiment file"
            ) from None
        raise problem(f"importing {module} failed: {one_line(missing)}") from missing
    except Exception as failure:
        raise problem(f"importing {module} failed: {_with_place(failure)}") from failure
    for part in attribute.split("."):
        if not hasattr(found, part):
            valid = [each for each in dir(found) if not each.startswith("_") and callable(getattr(found, each))]
            raise problem(
                f"the module {module} has no {attribute}{_hiding(module)}: {did_you_mean(part, valid)}", valid
            )
        found = getattr(found, part)
    if not callable(found):
        raise problem(_not_callable(found))
    if name not in _trusted and getattr(found, "__module__", None) != module:
        raise problem(f"the module {module} does not define it: name it itself, --trust {name}")
    return found  # type: ignore[no-any-return]


def load_entry_point(point: EntryPoint, *, key: str) -> Callable[..., Any]:
    """Import what an installed package offers and return it. No folder is added to those that modules come from."""
    try:
        found = point.load()
    except Exception as failure:
        message = f"{key} = {point.name!r}: importing {point.value} failed: {_with_place(failure)}"
        raise ConfigError(message, key=key, value=point.name) from failure
    if not callable(found):
        raise ConfigError(f"{key} = {point.name!r}: {_not_callable(found)}", key=key, value=point.name)
    return found  # type: ignore[no-any-return]


def find_entry_point(group: str, name: str) -> EntryPoint | None:
    """Return the part that an installed package offers under this name in an entry point group. Nothing is imported."""
    installed = (p for p in entry_points(group=group, name=name) if p.dist is None or not _is_in_folder(p.dist))
    return next(installed, None)


def _is_in_folder(package: Distribution) -> bool:
    """Return whether a package is in a folder of the user's modules, and not installed."""
    return os.path.abspath(str(package.locate_file(""))) in _folders


def call_object(part: Callable[..., Any], name: str, key: str, options: dict[str, Any]) -> Any:
    """Call a function of the user's; an exception of its own becomes an error that says where it was raised."""
    try:
        return part(**options)
    except FedkeepError:
        raise
    except Exception as failure:
        raise ConfigError(f"{key} = {name!r} failed: {_with_place(failure)}", key=key, value=name) from failure


def _with_place(error: Exception) -> str:
    """Return an exception as one line, with the file and line that raised it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {one_line(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {one_line(error)}{place}"


def import_from(folder: Path) -> None:
    """Let modules in a folder be imported, unless installed ones have the same name; those in a run folder never.

    A module that happens to be in the working directory cannot take the place of an installed one.
    """
    path = os.path.abspath(folder)
    if path not in sys.path and not os.path.exists(os.path.join(path, _IN_RUN_FOLDER)):
        sys.path.append(path)
        _folders.add(path)
        importlib.invalidate_caches()


def _hiding(module: str) -> str:
    """Return which file of the user's an installed module of the same name hides, in parentheses; or nothing."""
    name = module.partition(".")[0]
    used = os.path.abspath(getattr(sys.modules[name], "__file__", None) or "")
    for folder in _folders:
        file = next((f for f in (f"{name}.py", name) if os.path.exists(os.path.join(folder, f))), None)
        if file is not None and not used.startswith(os.path.join(folder, name)):
            return f" ({used} comes before {os.path.join(folder, file)}: rename yours)"
    return ""


def _not_callable(found: object) -> str:
    return f"it must be a function or a class, not {type(found).__name__} {format_value(found, most=60)}"
