"""Imports of optional packages, with an error that says how to install them."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import PackageNotFoundError, requires
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
            f"{feature} needs {package}, which is not installed: {install_command(extra, package)}", key=package
        ) from missing


def install_command(extra: str, package: str) -> str:
    """Return the command that installs the packages of an extra; it works for a release and for a checkout.

    >>> install_command("no such extra", "pyarrow")
    'pip install pyarrow'
    """
    try:
        required = requires("fedkeep") or []
    except PackageNotFoundError:
        required = []
    marked = (line.partition(";") for line in required)
    wanted = [name.strip() for name, _, marker in marked if re.search(rf"extra\s*==\s*['\"]{extra}['\"]", marker)]
    return "pip install " + " ".join(f"'{name}'" if wanted else name for name in wanted or [package])
