"""The command line: every command, and everything drawn on a terminal."""

from fedkeep.cli.app import main

__all__ = ["main"]
