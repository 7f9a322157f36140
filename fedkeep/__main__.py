"""Lets `python -m fedkeep` be the command line."""

from fedkeep.cli import main

main()
