"""The errors a user can cause or meet; each message says what is wrong, where, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class FedkeepError(ValueError):
    """What the user gave cannot work, or a run cannot go on. The command line prints it as one line."""


class DataError(FedkeepError):
    """The data set is not usable as given."""


class PartitionError(FedkeepError):
    """The data cannot be divided among clients as asked."""


class ModelError(FedkeepError):
    """The model cannot be trained by these engines, or does not fit the data."""


class MethodError(FedkeepError):
    """A method is unknown, is given a bad hyperparameter, or misses something it needs."""


class EngineError(FedkeepError):
    """The runtime asked for cannot run this."""


class LostPeer(EngineError):  # noqa: N818 (it is what happened, not a mistake of the caller)
    """Another process of the same run has ended."""


class RunError(FedkeepError):
    """A run folder cannot be written, read, or gone on with."""


class ConfigError(FedkeepError):
    """An experiment file or an override says something that is not valid."""


class Diverged(FedkeepError):  # noqa: N818 (it is what happened, not a mistake of the caller)
    """Weights, loss or upload left the finite numbers. `round`, `client` (None: the server) and `what` say where."""

    def __init__(self, round: int, client: int | None, what: str) -> None:
        self.round, self.client, self.what = round, client, what
        self.history: Any = None  # what the run had measured until then
        where = "on the server" if client is None else f"client {client}"
        super().__init__(f"diverged in round {round}, {where}: {what}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel between processes as what it was made of."""
        return type(self), (self.round, self.client, self.what)


def nearest(word: str, valid: Iterable[str]) -> str:
    """Say which of the valid words was probably meant, and list them.

    >>> nearest("fedntf", ["fedavg", "fedntd"])
    'did you mean fedntd? (valid: fedavg, fedntd)'
    >>> nearest("xyz", ["fedavg", "fedntd"])
    'valid: fedavg, fedntd'
    """
    valid = list(valid)
    close = difflib.get_close_matches(str(word).lower(), valid, n=1)
    listing = f"valid: {', '.join(valid)}"
    return f"did you mean {close[0]}? ({listing})" if close else listing
