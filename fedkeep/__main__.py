"""Lets `python -m fedkeep` be the command line."""

from fedkeep.cli.app import main

main()
