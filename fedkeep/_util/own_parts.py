"""A user's own parts, by name: a model, data set, metric or callback written as `package.module:name`.

Loading one imports the module, which runs its code. Callers load only names that the user has given: in an experiment
file of theirs, on the command line or in Python; never a name that was read from a run folder.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedkeep._util.text import did_you_mean, format_value, one_line
from fedkeep.errors import ConfigError, FedkeepError

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


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


def load_object(name: str, *, key: str, error: type[FedkeepError] = ConfigError) -> Callable[..., Any]:
    """Import a module and return the function or class `package.module:name` in it; errors name the `key`.

    Modules in the working directory can be imported, and those in folders that `import_from` was called with.

    >>> load_object("fractions:Fraction", key="model")
    <class 'fractions.Fraction'>
    >>> load_object("fractions:Fractoin", key="model")
    Traceback (most recent call last):
    fedkeep.errors.ConfigError: model = 'fractions:Fractoin': the module fractions has no Fractoin: did you mean Fraction? (valid: Decimal, Fraction)
    """  # noqa: E501
    if not is_own_part(name):
        raise error(f"{key} = {format_value(name)}: write package.module:name", key=key, value=name)
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
        raise problem(f"importing {module} failed: {type(failure).__name__}: {one_line(failure)}") from failure
    for part in attribute.split("."):
        if not hasattr(found, part):
            valid = [each for each in dir(found) if not each.startswith("_") and callable(getattr(found, each))]
            raise problem(f"the module {module} has no {attribute}: {did_you_mean(part, valid)}", valid)
        found = getattr(found, part)
    if not callable(found):
        raise problem(f"it must be a function or a class, not {type(found).__name__} {format_value(found, most=60)}")
    return found  # type: ignore[no-any-return]


def import_from(folder: Path) -> None:
    """Let modules in a folder be imported, as Python does for the folder of a script."""
    path = os.path.abspath(folder)
    if path not in sys.path:
        sys.path.insert(0, path)
        importlib.invalidate_caches()


def entry_point_names(group: str) -> dict[str, str]:
    """Return the parts that installed packages offer in an entry point group, as name -> `package.module:name`."""
    return {point.name: point.value for point in entry_points(group=group)}
