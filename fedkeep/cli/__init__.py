"""The command line: every command, and everything drawn on a terminal."""

import atexit
import os
import sys
from contextlib import suppress

from fedkeep.cli import signals

__all__ = ["main"]

_exit_code = 1  # of the process, unless a command sets it


def main() -> None:
    """Run the command line as a process. Until everything is imported, a signal ends it at once, in one line."""
    global _exit_code
    signals.end_at_once()
    atexit.register(_end_process)  # the first to be registered is the last to be called
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would write to stderr; read on its import
    from fedkeep.cli.app import main as run

    try:
        run()
        _exit_code = 0
    except SystemExit as end:
        _exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


def _end_process() -> None:
    """End the process without the destructors of libraries.

    Some of torch's threads may still run shortly after its import. Its destructors then abort the process, and the exit
    code is lost: now and then after Ctrl-C, or after an error that was found early.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a pipe that nobody reads any more
            stream.flush()
    os._exit(_exit_code)
