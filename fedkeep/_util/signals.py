"""The signals that ask a process to end, and delaying them until the end of a block. Imports nothing large."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NUMBERS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class EndOnce:
    """A handler that ends the process at the first signal; the same event may send more of them."""

    def __init__(self) -> None:
        self.is_ending = False

    def __call__(self, number: int, frame: Any) -> None:
        if not self.is_ending:
            self.is_ending = True
            sys.exit(128 + number)


@contextmanager
def delayed() -> Iterator[None]:
    """Delay signals that a Python function handles until the end of the block; a second one is handled at once.

    With the handler `EndOnce` all of them wait. No signal gets a handler that had none. Outside of the main thread,
    where Python handles no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Callable[[int, Any], Any]] = {}
    pending: list[int] = []

    def wait(number: int, frame: Any) -> None:
        pending.append(number)
        if len(pending) > 1 and not isinstance(before[number], EndOnce):
            before[number](number, frame)

    for number in NUMBERS:
        if callable(handler := signal.getsignal(number)):
            before[number] = handler
            signal.signal(number, wait)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is wait:  # a handler that was called may have replaced it
                signal.signal(number, handler)
        if len(pending) == 1 or (pending and isinstance(before[pending[0]], EndOnce)):
            before[pending[0]](pending[0], None)
