"""What SIGINT (Ctrl-C), SIGTERM and SIGHUP do to the command line.

While the command line is imported, and when a command is over, a signal ends the process at once, in one line. While a
command runs, it raises KeyboardInterrupt or SystemExit, so that a simulation can save its last finished round. A second
signal ends the process at once. The exit code is 128 + the number of the signal, as in a shell.

This module is imported before all others of the command line and imports nothing large.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from fedkeep._util.signals import NUMBERS

CODES = {128 + number: "interrupted" if number == signal.SIGINT else "terminated" for number in NUMBERS}
_received: list[int] = []
_raising: set[int] = set()  # the signals that raise now


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while a command runs.

    After a plain KeyboardInterrupt inside `exec`, which dataclasses use, `python -m` ends by the signal, even if the
    exception was caught and the process asks for another exit code.
    """


def end_at_once() -> None:
    """From now on, let a signal end the process at once, in one line."""
    _handle(_end)


@contextmanager
def raising() -> Iterator[None]:
    """Let the first signal raise KeyboardInterrupt or SystemExit, and the next one end the process."""
    before = _handle(_raise)
    _raising.update(before)
    _received.clear()
    hook, sys.unraisablehook = sys.unraisablehook, _signal_again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
        _raising.clear()


@contextmanager
def hint(text: str | Callable[[], str]) -> Iterator[None]:
    """Say what to do next if a signal ends the block; a function is called then."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        end = SystemExit(128 + signal.SIGINT) if isinstance(error, KeyboardInterrupt) else error
        if end.code in CODES:
            end.add_note(text if isinstance(text, str) else text())
        raise end from None


def replace(number: int, handler: Callable[[int, Any], Any]) -> None:
    """Handle one of the signals in another way until the end of `raising`."""
    _raising.discard(number)
    signal.signal(number, handler)


def raise_if_received() -> None:
    """Raise SystemExit if there was a signal: another package may have made an error of its own of the exception."""
    if _received:
        raise SystemExit(128 + _received[0])


def message(end: SystemExit) -> str | None:
    """Return the line that says which signal ended a command, and what to do next; None if it was no signal."""
    event = CODES.get(end.code) if isinstance(end.code, int) else None
    return event and "; ".join([event, *getattr(end, "__notes__", [])])


def _handle(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Handle the signals that are not ignored (nohup, background jobs); return the handlers before."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {number: signal.getsignal(number) for number in NUMBERS}
    before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handler)
    return before


def _end(number: int, frame: Any) -> NoReturn:
    os.write(2, f"fedkeep: {CODES[128 + number]}\n".encode())
    os._exit(128 + number)


def _raise(number: int, frame: Any) -> NoReturn:
    _received.append(number)
    for each in _raising:
        signal.signal(each, signal.SIG_DFL)
    if number == signal.SIGINT:
        raise Interrupted
    raise SystemExit(128 + number)


def _signal_again(unraisable: Any) -> None:
    """Send a signal again if its exception was raised where Python ignores exceptions, such as in `__del__`."""
    if not _received or not issubclass(unraisable.exc_type, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(unraisable)
        return
    for each in _raising:
        signal.signal(each, _raise)
    threading.Timer(0.05, os.kill, (os.getpid(), _received[-1])).start()
