"""Fuzzing: random input, area by area, that must be accepted or refused with an error of fedkeep, and nothing else.

An area is a module of this package with a function

    def try_one(seed: int, folder: Path) -> bool

that makes one input from the seed and uses it: True if the input was accepted, False if it was refused with a
`FedkeepError`. Any other exception is a failure, and so is a try that takes too long or too much memory. `folder` is
empty and deleted afterwards; its parent belongs to the worker process, for what its tries share.

    PYTHONPATH=tests python -m fuzz --help
"""
