"""The cohorts of a run: drawn from the seed, or given as a list or a federation file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkeep.data.federation_file import Cohorts, read_cohorts
from fedkeep.data.seeds import sample_cohort
from fedkeep.engine import robust
from fedkeep.engine.settings import Settings
from fedkeep.errors import FedkeepError
from fedkeep.runs.files import fingerprint


@dataclass(frozen=True)
class CohortSequence:
    """The cohort of every round."""

    settings: Settings
    n_clients: int
    size: int  # of the largest cohort
    given: Cohorts | None = None

    @classmethod
    def of(cls, settings: Settings, n_clients: int) -> CohortSequence:
        """Return the cohorts of a run; raise if the given ones are too few or do not fit the clients."""
        if settings.cohorts is None:
            return cls(settings, n_clients, settings.cohort_size(n_clients))
        file = settings.cohorts if isinstance(settings.cohorts, str) else None
        given = settings.cohorts if isinstance(settings.cohorts, tuple) else read_cohorts(settings.cohorts)
        where = f"cohorts = {file}" if file else "cohorts"
        if len(given) < settings.rounds:
            raise FedkeepError(
                f"{where}: there are cohorts of {len(given)} rounds, but rounds = {settings.rounds}",
                key="cohorts",
                value=len(given),
            )
        for number, cohort in enumerate(given, start=1):
            if cohort[-1] >= n_clients:
                raise FedkeepError(
                    f"{where}: round {number} has client {cohort[-1]}, but the clients are 0 to {n_clients - 1}",
                    key="cohorts",
                    value=cohort[-1],
                )
        robust.require_enough(settings, min(map(len, given[: settings.rounds])))
        return cls(settings, n_clients, max(map(len, given)), given)

    def sampled(self, number: int) -> list[int]:
        """Return the clients of a round, in increasing order.

        A round after the last of the given ones, as in a study of a finished run, is drawn, as large as that one.
        """
        if self.given is not None and number <= len(self.given):
            return list(self.given[number - 1])
        size = self.size if self.given is None else len(self.given[-1])
        drawn: list[int] = sample_cohort(self.settings.seed, number, self.n_clients, size).tolist()
        return drawn

    def all(self) -> list[list[int]]:
        """Return the cohorts of all rounds of the run."""
        return [self.sampled(number) for number in range(1, self.settings.rounds + 1)]

    @property
    def fingerprint(self) -> str | None:
        """A checksum of the given cohorts, as far as the run uses them; None if they are drawn."""
        return None if self.given is None else cohorts_fingerprint(self.given, self.settings.rounds)


def cohorts_fingerprint(cohorts: Cohorts, rounds: int) -> str:
    """Return a checksum of the cohorts of so many rounds."""
    used = cohorts[:rounds]
    return fingerprint(np.array([k for cohort in used for k in cohort]), np.array([len(cohort) for cohort in used]))


def summarize_cohorts(cohorts: list[list[int]], n_clients: int) -> str:
    """Return a summary of the cohorts.

    >>> summarize_cohorts([[0, 1], [1, 2]], n_clients=4)
    '2 rounds with 2 to 2 clients; a client takes part in 0 to 2 rounds (median 1)'
    """
    sizes = [len(cohort) for cohort in cohorts]
    visits = np.bincount(np.concatenate(cohorts), minlength=n_clients)
    return (
        f"{len(cohorts)} rounds with {min(sizes)} to {max(sizes)} clients; a client takes part in {visits.min()} to "
        f"{visits.max()} rounds (median {np.median(visits):g})"
    )
