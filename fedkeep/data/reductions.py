"""Reductions: data that changes during a run. From a round on, a client has fewer examples of a class."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fedkeep._util.text import did_you_mean, format_value
from fedkeep._util.validate import require_number, require_whole
from fedkeep.data.client_indices import Partition
from fedkeep.errors import FedkeepError

log = logging.getLogger("fedkeep")


@dataclass(frozen=True)
class Reduction:
    """From `round` on, a client keeps only some of its examples of a class, until a later reduction says otherwise.

    `keep` is a share (float) or a number (int) of the examples that the split gives to the client. Those that come
    first in the split are kept, so that the fewer are always a part of the more.
    """

    round: int
    client: int
    class_id: int
    keep: float | int

    def __post_init__(self) -> None:
        for name, low in (("round", 1), ("client", 0), ("class_id", 0)):
            object.__setattr__(self, name, require_whole(f"reductions.{name}", getattr(self, name), low))
        if isinstance(self.keep, float):
            require_number("reductions.keep", self.keep, low=0, high=1)
        else:
            object.__setattr__(self, "keep", require_whole("reductions.keep", self.keep, low=0))


def check_reductions(given: Any) -> tuple[Reduction, ...]:
    """Return reductions, given as such or as tables; raise if they are anything else, or contradict each other.

    >>> check_reductions([{"round": 50, "client": 0, "class_id": 3, "keep": 0.5}])
    (Reduction(round=50, client=0, class_id=3, keep=0.5),)
    """
    if not isinstance(given, list | tuple):
        raise FedkeepError(f"reductions must be a list, not {format_value(given)}", key="reductions", value=given)
    reductions = tuple(one if isinstance(one, Reduction) else _from_table(one) for one in given)
    known: set[tuple[int, int, int]] = set()
    for one in reductions:
        place = (one.round, one.client, one.class_id)
        if place in known:
            raise FedkeepError(
                f"reductions: round {one.round}, client {one.client}, class {one.class_id} is there twice",
                key="reductions",
                value=place,
            )
        known.add(place)
    return reductions


def require_effect(
    reductions: Iterable[Reduction] | None, rounds: int, prefix: str = "", error: type[FedkeepError] = FedkeepError
) -> None:
    """Raise if a reduction is for a round after the last one: the run would be one without it.

    >>> require_effect([Reduction(50, 0, 3, 10)], rounds=40)
    Traceback (most recent call last):
    fedkeep.errors.FedkeepError: reductions: round = 50 has no effect, because the last round is rounds = 40
    """
    for one in reductions or ():
        if one.round > rounds:
            raise error(
                f"{prefix}reductions: round = {one.round} has no effect, because the last round is {prefix}rounds = "
                f"{rounds}",
                key=f"{prefix}reductions.round",
                value=one.round,
            )


def _from_table(table: Any) -> Reduction:
    names = [f.name for f in fields(Reduction)]
    if not isinstance(table, Mapping):
        raise FedkeepError(
            f"reductions must be tables of {', '.join(names)}, not {format_value(table)}", key="reductions", value=table
        )
    for name in table:
        if name not in names:
            raise FedkeepError(
                f"reductions: unknown key {name!r}: {did_you_mean(str(name), names)}",
                key="reductions",
                value=name,
                valid=names,
            )
    if missing := [name for name in names if name not in table]:
        raise FedkeepError(f"reductions: {missing[0]} is missing", key="reductions", value=missing[0], valid=names)
    return Reduction(**table)


class ClientExamples:
    """The examples of each client in each round: those of the split, without what reductions have removed."""

    def __init__(
        self, clients: Partition, y: np.ndarray, n_classes: int, reductions: tuple[Reduction, ...] = ()
    ) -> None:
        self.clients, self.y = clients, y
        self._of_client: dict[int, list[Reduction]] = {}
        for one in sorted(reductions, key=lambda reduction: reduction.round):
            self._check(one, n_classes)
            self._of_client.setdefault(one.client, []).append(one)

    def of(self, client: int, round: int) -> np.ndarray:
        """Return a client's examples in a round, as indices into the training data."""
        own = self.clients[client]
        keep = {one.class_id: one.keep for one in self._of_client.get(client, ()) if one.round <= round}
        kept = np.ones(len(own), dtype=bool)
        for class_id, limit in keep.items():
            members = np.flatnonzero(self.y[own] == class_id)
            kept[members[limit if isinstance(limit, int) else _rounded(limit * len(members)) :]] = False
        return own[kept] if keep else own

    def size(self, client: int, round: int) -> int:
        """Return the number of a client's examples in a round."""
        return len(self.of(client, round)) if client in self._of_client else self.clients.size(client)

    def _check(self, one: Reduction, n_classes: int) -> None:
        for name, value, number in (("client", one.client, len(self.clients)), ("class_id", one.class_id, n_classes)):
            if value >= number:
                raise FedkeepError(
                    f"reductions: {name} = {value}, but there are only 0 to {number - 1}",
                    key=f"reductions.{name}",
                    value=value,
                )
        if not (self.y[self.clients[one.client]] == one.class_id).any():
            log.warning("reductions: client %d has no examples of class %d", one.client, one.class_id)


def _rounded(number: float) -> int:
    return int(np.floor(number + 0.5))
