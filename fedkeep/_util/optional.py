"""Imports of optional packages, with an error that says how to install them."""

from __future__ import annotations

import importlib
from typing import Any

from fedkeep.errors import FedkeepError

_PACKAGE_NAMES = {"PIL": "pillow"}  # where the package to install has another name than the module


def require_extra(module: str, extra: str, feature: str, error: type[FedkeepError] = FedkeepError) -> Any:
    """Import a module of one of fedkeep's extras; if it is missing, raise an error with the install command.

    >>> require_extra("json", "none", "nothing").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        name = (missing.name or module).partition(".")[0]
        package = _PACKAGE_NAMES.get(name, name)
        raise error(
            f"{feature} needs {package}, which is not installed: pip install 'fedkeep[{extra}]'", key=package
        ) from missing
