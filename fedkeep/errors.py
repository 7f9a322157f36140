"""Exceptions that fedkeep raises.

Every message names what is wrong, where, and what would be right. Programs read the attributes instead: `key` is the
setting, option or field, `value` what was given, `valid` the valid choices. Each may be None.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

E = TypeVar("E", bound="FedkeepError")


class FedkeepError(ValueError):
    """The input cannot work, or a run cannot continue. The command line prints the message as one line."""

    def __init__(
        self, message: str = "", *, key: str | None = None, value: Any = None, valid: Iterable[Any] | None = None
    ) -> None:
        super().__init__(message)
        self.key, self.value = key, value
        self.valid = None if valid is None else tuple(valid)

    def converted(self, kind: type[E], message: str) -> E:
        """Return an error of another type and message, with this one's key, value and valid choices."""
        return kind(message, key=self.key, value=self.value, valid=self.valid)


class DataError(FedkeepError):
    """The data set cannot be used as given."""


class PartitionError(FedkeepError):
    """The data cannot be divided among clients as requested."""


class ModelError(FedkeepError):
    """The model cannot be trained by these engines, or does not fit the data."""


class MethodError(FedkeepError):
    """A method is unknown, has an invalid hyperparameter, breaks the contract, or lacks something it needs."""


class EngineError(FedkeepError):
    """The requested engine cannot run this experiment."""


class LostPeer(EngineError):  # noqa: N818 (an event, not a mistake of the caller)
    """Another process of the same run has ended."""


class RunError(FedkeepError):
    """A run folder cannot be written, read or resumed."""


class RunFailed(RunError):  # noqa: N818 (an event, not a mistake of the caller)
    """A run ended by an exception that is not fedkeep's own, or with its process."""


class ForeignFile(RunError):  # noqa: N818 (it names what was found)
    """A file in a run folder belongs to another run."""


class ConfigError(FedkeepError):
    """An experiment file or an override contains something invalid."""


class UntrustedCode(ConfigError):  # noqa: N818 (it names what was found)
    """A run folder names code of the user's own, which is not imported unless the user says so."""


class UnsupportedMethod(ConfigError):  # noqa: N818 (it names what was found)
    """An experiment's method cannot be trained with its settings or its model."""


class Diverged(FedkeepError):  # noqa: N818 (an event, not a mistake of the caller)
    """Weights, loss or upload became NaN or infinite, in `round`, at `client` (None: on the server)."""

    def __init__(self, round: int, client: int | None, what: str) -> None:
        self.round, self.client, self.what = round, client, what
        self.history: Any = None  # the rounds measured until then
        where = "on the server" if client is None else f"client {client}"
        super().__init__(f"diverged in round {round}, {where}: {what}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the constructor's arguments, not the message."""
        return type(self), (self.round, self.client, self.what)
