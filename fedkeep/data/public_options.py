"""Checks of the options that choose a public set: those that need no data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedkeep._util.text import format_value
from fedkeep.errors import DataError, FedkeepError


def is_number_per_class(public: Any) -> bool:
    """Return whether `public` is a number of examples per class."""
    return isinstance(public, int | np.integer) and not isinstance(public, bool) and int(public) >= 1


def is_fraction(public: Any) -> bool:
    """Return whether `public` is a fraction of the training examples."""
    return isinstance(public, float) and 0 < public < 1


def check_public_options(options: Mapping[str, Any], prefix: str = "", error: type[FedkeepError] = DataError) -> None:
    """Raise if public, public_ids, public_alpha and public_only are invalid together.

    Messages and keys name the options with the prefix, such as `data.` in an experiment file.

    >>> check_public_options({"public_alpha": 0.1}, "data.")
    Traceback (most recent call last):
    fedkeep.errors.DataError: data.public_alpha needs data.public as a fraction, such as 0.03
    """
    public, by_owner = options.get("public"), options.get("public_ids")

    def refuse(name: str, message: str) -> FedkeepError:
        return error(f"{prefix}{name} {message}", key=f"{prefix}{name}", value=options[name])

    if public is not None and by_owner is not None:
        raise refuse("public_ids", f"and {prefix}public both choose the public set: set only one of them")
    if public is not None and not is_fraction(public) and not is_number_per_class(public):
        rule = "must be a fraction between 0 and 1, or a number of examples per class of at least 1"
        none = f"; without {prefix}public there is no public set" if public == 0 else ""
        raise refuse("public", f"{rule}, not {format_value(public)}{none}")
    if options.get("public_alpha") is not None and not is_fraction(public):
        raise refuse("public_alpha", f"needs {prefix}public as a fraction, such as 0.03")
    if options.get("public_only") and public is None and by_owner is None:
        raise refuse("public_only", f"needs a public set: set {prefix}public or {prefix}public_ids")
