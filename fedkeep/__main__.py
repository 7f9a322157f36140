"""Lets `python -m fedkeep` be the command line."""

from fedkeep.cli import main

if __name__ == "__main__":
    main()
