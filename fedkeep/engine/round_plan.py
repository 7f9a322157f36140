"""Rounds laid out beforehand: who takes part, on which rank, and what every client will do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkeep.data.dataset import Dataset
from fedkeep.data.partition import Partition
from fedkeep.data.seeds import sample_cohort
from fedkeep.engine import setup
from fedkeep.engine.distributed import Ranks
from fedkeep.engine.local import ClientJob
from fedkeep.engine.settings import Settings


@dataclass(frozen=True)
class RoundPlan:
    """Who takes part in a round, and what this rank's clients will do."""

    round: int
    cohort: list[int]
    skipped: list[int]  # sampled, but without examples
    shares: list[list[int]]  # the clients of each rank
    mine: list[ClientJob]  # their states are still to come


class RoundPlanner:
    """Makes a run's plans: a round's when it is asked for, or ahead of it while a GPU is at work on the one before."""

    def __init__(self, settings: Settings, data: Dataset, clients: Partition, ranks: Ranks) -> None:
        self.settings, self.clients, self.ranks = settings, clients, ranks
        self.cohort_size = settings.cohort_size(len(clients))
        self.image = setup.image_size(data, settings)
        self.labels, self.n_classes = data.y_train.numpy(), data.n_classes
        self._ahead: RoundPlan | None = None

    def plans(self, number: int) -> RoundPlan:
        """Return a round's plans: those made ahead, if they are this round's."""
        ahead, self._ahead = self._ahead, None
        return ahead if ahead and ahead.round == number else self._plan(number)

    def look_ahead(self, number: int) -> None:
        """Make a round's plans before they are asked for, once; after the last round there is none."""
        if self._ahead is None and number <= self.settings.rounds:
            self._ahead = self._plan(number)

    def cohort(self, number: int) -> tuple[list[int], list[int]]:
        """Choose who takes part in a round; also return who was chosen but has no examples."""
        sampled = sample_cohort(self.settings.seed, number, len(self.clients), self.cohort_size).tolist()
        there = [k for k in sampled if len(self.clients[k])]
        return there, [k for k in sampled if not len(self.clients[k])]

    def job(self, client: int, number: int) -> ClientJob:
        """Lay out one client's round; its state is still to come."""
        examples = self.clients[client]
        plan = setup.client_plan(self.settings, number, client, len(examples), self.image)
        return ClientJob(client, examples, np.bincount(self.labels[examples], minlength=self.n_classes), plan, {})

    def _plan(self, number: int) -> RoundPlan:
        """Choose a round's cohort, divide it among the ranks by their work, and lay out this rank's share of it."""
        cohort, skipped = self.cohort(number)
        divided = self.ranks.divide([len(self.clients[k]) for k in cohort])
        shares = [[cohort[i] for i in share] for share in divided]
        return RoundPlan(number, cohort, skipped, shares, [self.job(k, number) for k in shares[self.ranks.rank]])
