"""Values inside of lists, tuples and dicts, as operations take them as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def map_nested(kind: type, fn: Callable[[Any], Any], given: Any) -> Any:
    """Apply `fn` to every instance of `kind`, at any depth of lists, tuples and dicts; leave everything else as it is.

    >>> map_nested(int, lambda i: i + 1, (1, [2, "a"], {"b": 3}))
    (2, [3, 'a'], {'b': 4})
    """
    if isinstance(given, kind):
        return fn(given)
    if type(given) is dict:
        return {key: map_nested(kind, fn, one) for key, one in given.items()}
    return type(given)(map_nested(kind, fn, one) for one in given) if type(given) in (list, tuple) else given
