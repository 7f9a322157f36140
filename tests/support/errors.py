"""Assertions about errors: their type and the attributes that programs read, never the wording."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fedkeep.errors import FedkeepError

ANY = object()


@contextmanager
def raises(
    kind: type[FedkeepError],
    key: Any = ANY,
    value: Any = ANY,
    valid: Iterable[Any] | None = None,
    mentions: Iterable[str] = (),
) -> Iterator[pytest.ExceptionInfo[FedkeepError]]:
    """Expect an error of this type with this key and value.

    `valid` names choices that must be among the error's. `mentions` are machine-readable parts of the message, such as
    a file name, a number or a command; not words of a sentence.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    if key is not ANY:
        assert error.key == key, str(error)
    if value is not ANY:
        assert error.value == value, str(error)
    if valid is not None:
        assert set(valid) <= set(error.valid or ()), str(error)
    assert "\n" not in str(error), "an error is one line"
    for part in mentions:
        assert part in str(error), str(error)
