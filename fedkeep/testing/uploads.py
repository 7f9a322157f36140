"""Honest uploads of a small federation, and what a server knows of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedkeep import tree
from fedkeep.bounds import Received
from fedkeep.engine.simulation import Simulation
from fedkeep.method import FedAvg
from fedkeep.testing.problem import Problem


def received_uploads(method: FedAvg, problem: Problem, **changes: Any) -> Iterator[tuple[Simulation, Received]]:
    """Yield every upload of a run of three rounds, as its server receives it."""
    sim = problem.simulation(method, **changes)
    settings = sim.settings
    for number in range(1, settings.rounds + 1):
        server, result = sim.server, sim.train_round(number, keep_models=True)
        uploads = result.clients["upload"]
        for k in range(len(tree.leaves(uploads)[0])):
            yield (
                sim,
                Received(
                    upload=tree.take(uploads, k),
                    server=server,
                    method=method,
                    task=sim.task,
                    round=number,
                    lr=settings.lr_in(number),
                    epochs=settings.epochs,
                    batch_size=settings.batch_size,
                    drop_last=settings.drop_last,
                ),
            )
        sim.apply(result)


def upload_names(method: FedAvg, problem: Problem) -> set[str]:
    """Return the names of the entries that a client uploads."""
    sim = problem.simulation(method)
    return set(sim.engine.train(method.broadcast(sim.server), [sim.job(5, 1)], 0.1).upload)
