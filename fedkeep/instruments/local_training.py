"""Study of what models know during local training, epoch by epoch (FedNTD figure 6)."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np

from fedkeep import forgetting as fg
from fedkeep._util import arrays
from fedkeep.data.plan import ClientPlan
from fedkeep.engine.local import ClientJob
from fedkeep.engine.round_plan import RoundPlanner
from fedkeep.engine.simulation import Simulation
from fedkeep.instruments.next_round import NextRound, train_next_round
from fedkeep.instruments.options import Options, Result

MOST_POINTS = 10  # epochs at which the local models are evaluated


def training(trial: NextRound, options: Options) -> Result:
    """Return the local models' accuracy on their own and on other classes after each epoch (FedNTD figure 6).

    Local training is repeated from the start for every epoch shown, at most ten of them, with the same batches. Each
    entry of `in_local` and `out_local` has one value per client; the first is the global model that they start from.
    """
    epochs = (1 + arrays.evenly_spaced(trial.simulation.settings.epochs, MOST_POINTS)).tolist()
    before, counts = trial.class_accuracy[0], trial.label_counts
    accuracies = [np.broadcast_to(before, counts.shape)]
    for number in epochs:
        is_last = number == trial.simulation.settings.epochs
        stopped = trial if is_last else train_next_round(with_epochs(trial.simulation, number))
        accuracies.append(stopped.class_accuracy[1:-1])
    return {
        "epochs": [0, *epochs],
        "in_local": [fg.in_local(a, counts).tolist() for a in accuracies],
        "out_local": [fg.out_local(a, counts).tolist() for a in accuracies],
    }


def with_epochs(simulation: Simulation, epochs: int) -> Simulation:
    """Return the simulation with rounds that end after some epochs, with the batches of the whole ones."""
    s, shorter = simulation, copy.copy(simulation)
    planner = _FirstEpochs(epochs, s.settings, s.data, s.clients, s.ranks, s.planner.hold_out)
    shorter.round_trainer = dataclasses.replace(s.round_trainer, planner=planner)
    return shorter


class _FirstEpochs(RoundPlanner):
    """Plans that end after some epochs."""

    def __init__(self, epochs: int, *args: Any) -> None:
        super().__init__(*args)
        self.epochs = epochs

    def job(self, client: int, number: int) -> ClientJob:
        """Return one client's job in a round, without its later epochs."""
        job = super().job(client, number)
        return job._replace(plan=first_epochs(job.plan, self.epochs))


def first_epochs(plan: ClientPlan, epochs: int) -> ClientPlan:
    """Return a plan without its later epochs.

    >>> from fedkeep.data.plan import make_plan
    >>> plan = make_plan(seed=0, round=1, client=3, n=5, epochs=4, batch_size=2)
    >>> first_epochs(plan, 1).index.tolist() == plan.index[:3].tolist()
    True
    """
    steps = epochs * plan.per_epoch
    augment = {name: values[:steps] for name, values in plan.augment.items()}
    return dataclasses.replace(plan, index=plan.index[:steps], size=plan.size[:steps], augment=augment)
