"""Packages that only some features need, imported when these are used."""

from __future__ import annotations

import importlib
from typing import Any

from fedkeep.errors import FedkeepError


def need(module: str, extra: str, what: str) -> Any:
    """Import a module of an extra, or say in one line how to get it.

    >>> need("json", "none", "nothing").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        raise FedkeepError(f"{what} needs {missing}, which is not installed: pip install 'fedkeep[{extra}]'") from error
