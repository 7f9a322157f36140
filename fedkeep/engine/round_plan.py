"""Plans of whole rounds: the cohort, its division among ranks, and every client's plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkeep.data.dataset import Dataset
from fedkeep.data.partition import Partition
from fedkeep.data.reductions import ClientExamples
from fedkeep.engine.cohorts import CohortSequence
from fedkeep.engine.distributed import Ranks
from fedkeep.engine.local import ClientJob
from fedkeep.engine.settings import Settings
from fedkeep.engine.setup import client_plan, image_size


@dataclass(frozen=True)
class RoundPlan:
    """The cohort of a round, and the jobs of this rank's clients."""

    round: int
    cohort: list[int]
    skipped: list[int]  # sampled, but without examples
    shares: list[list[int]]  # the clients of each rank
    jobs: list[ClientJob]  # of this rank; the clients' states are added later


class RoundPlanner:
    """Makes the plans of a run's rounds, on request or ahead of time while a GPU works on the round before."""

    def __init__(
        self, settings: Settings, data: Dataset, clients: Partition, ranks: Ranks, hold_out: float = 0.0
    ) -> None:
        self.settings, self.ranks, self.hold_out = settings, ranks, hold_out
        self.cohorts = CohortSequence.of(settings, len(clients))
        self.image = image_size(data, settings)
        self.labels, self.n_classes = data.y_train.numpy(), data.n_classes
        self.examples = ClientExamples(clients, self.labels, self.n_classes, settings.reductions or ())
        self._ahead: RoundPlan | None = None

    def plan(self, number: int) -> RoundPlan:
        """Return a round's plan; the one made ahead, if it is of this round."""
        ahead, self._ahead = self._ahead, None
        return ahead if ahead and ahead.round == number else self._plan(number)

    def plan_ahead(self, number: int) -> list[ClientJob]:
        """Make a round's plan before it is needed; return its jobs, none if it was ready or there is no such round."""
        if self._ahead is not None or number > self.settings.rounds:
            return []
        self._ahead = self._plan(number)
        return self._ahead.jobs

    def cohort(self, number: int) -> tuple[list[int], list[int]]:
        """Return the clients that take part in a round, and the sampled ones without examples."""
        sampled = self.cohorts.sampled(number)
        sizes = {k: self.examples.size(k, number) for k in sampled}
        return [k for k in sampled if sizes[k]], [k for k in sampled if not sizes[k]]

    def job(self, client: int, number: int) -> ClientJob:
        """Return one client's job in a round; its state and what is sent to it are added later."""
        examples = self.examples.of(client, number)
        plan = client_plan(self.settings, number, client, len(examples), self.image, self.hold_out)
        return ClientJob(client, examples, np.bincount(self.labels[examples], minlength=self.n_classes), plan, {}, {})

    def _plan(self, number: int) -> RoundPlan:
        cohort, skipped = self.cohort(number)
        divided = self.ranks.divide([self.examples.size(k, number) for k in cohort])
        shares = [[cohort[i] for i in share] for share in divided]
        return RoundPlan(number, cohort, skipped, shares, [self.job(k, number) for k in shares[self.ranks.rank]])
