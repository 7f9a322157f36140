"""The command line: every command, and everything drawn on a terminal."""

import os

from fedkeep.cli import signals

__all__ = ["main"]


def main() -> None:
    """Run the command line as a process. Until everything is imported, a signal ends it at once, in one line."""
    signals.end_at_once()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would write to stderr; read on its import
    from fedkeep.cli.app import main as run

    run()
