"""FedKA beyond the contract and the oracle: why it recentres, how it drops examples, what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support.errors import raises
from support.problems import Problem, gap

import fedkeep as fk
from fedkeep.errors import MethodError
from fedkeep.methods._recentre import recentred
from fedkeep.methods.fedka import FedKA, shuffled


def test_recentring_changes_no_softmax_and_no_argmax(problem: Problem) -> None:
    sim = problem.run(FedKA(recentre=False))
    before = sim.task.apply(sim.params, sim.x_test)
    after = sim.task.apply(recentred(sim.task, "fedka", sim.params), sim.x_test)
    assert float((before - after).abs().max()) > 1e-3
    assert float((before.softmax(-1) - after.softmax(-1)).abs().max()) < 1e-12
    assert torch.equal(before.argmax(-1), after.argmax(-1))
    assert float(after.mean(-1).abs().max()) < 1e-12


def test_as_printed_the_mean_logit_climbs_and_recentred_it_does_not() -> None:
    """Two classes a client, digits: eq. 3 sees a common shift of all logits, and cross-entropy does not.

    As printed, with beta 0.01, the mean logit of the test set more than doubles every ten rounds (1.3, 4.9, 15.3).
    """
    data = fk.data.load("digits", public=1, validation=0)
    clients = fk.data.partition.shards(data.y_train, n_clients=10, s=2, seed=0)
    settings = fk.Settings(
        rounds=30, participation=5, epochs=2, batch_size=40, lr=0.05, momentum=0.9, engine="stacked", eval_every=30
    )
    means: dict[bool, list[float]] = {False: [], True: []}
    for recentre, found in means.items():
        sim = fk.Simulation(FedKA(beta=0.01, recentre=recentre), "mlp", data, clients, settings)
        for number in range(1, 31):
            sim.step()
            if number % 10 == 0:
                found.append(float(sim.task.apply(sim.params, sim.eval_inputs(sim.x_test)).mean()))
    at_10, at_20, at_30 = means[False]
    assert at_20 > 2 * at_10
    assert at_30 > 2 * at_20
    assert at_30 > 8
    assert max(map(abs, means[True])) < 1e-3


def test_without_weight_and_recentring_it_is_fedavg(problem: Problem) -> None:
    reference = problem.run(fk.methods.FedAvg()).params
    assert gap(reference, problem.run(FedKA(beta=0.0, recentre=False)).params) < 1e-12


def test_an_empty_anchor_gives_plain_cross_entropy(problem: Problem) -> None:
    """One client with every class, each of them dominant."""
    one = dataclasses.replace(problem, clients=[np.arange(len(problem.data.y_train))])
    settings = {"participation": 1}
    reference = one.run(fk.methods.FedAvg(), **settings).params
    assert gap(reference, one.run(FedKA(beta=0.5, recentre=False), **settings).params) < 1e-12


def test_each_example_is_dropped_as_often_as_another() -> None:
    """Of 20 classes 5 are kept: each in a quarter of 20,000 draws, each pair in 5 * 4 / (20 * 19) of them."""
    noise = np.random.default_rng(0).random(20_000)
    order = torch.vmap(lambda u: shuffled(u, 20))(torch.from_numpy(noise))
    kept = torch.zeros(20_000, 20).scatter(1, order.topk(5, dim=1).indices, 1.0)
    together = kept.T @ kept / len(kept)
    assert float((together.diagonal() - 0.25).abs().max()) < 0.015
    apart = together[~torch.eye(20, dtype=torch.bool)]
    assert float((apart - 20 / 380).abs().max()) < 0.01
    assert order.min() >= 0


def test_it_refuses_to_start_without_an_example_of_each_class(problem: Problem) -> None:
    bare = dataclasses.replace(problem, data=dataclasses.replace(problem.data, public=None))
    with raises(MethodError, key="public"):
        bare.simulation(FedKA())
    public = problem.data.public
    few = dataclasses.replace(public, x=public.x[public.y > 1], y=public.y[public.y > 1])
    lacking = dataclasses.replace(problem, data=dataclasses.replace(problem.data, public=few))
    with raises(MethodError, key="public", value=[0, 1], mentions=["public=1, validation=0"]):
        lacking.simulation(FedKA())


class Headless(torch.nn.Module):
    """Logits that are no linear layer's: the negative distances to as many centres as there are classes."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.centres = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -((x.flatten(1)[:, None] - self.centres.reshape(4, 16)) ** 2).sum(-1)


@pytest.mark.parametrize("shape", [(4, 4, 4), (4, 16)], ids=["no matrix", "not the logits' layer"])
def test_a_model_that_cannot_be_recentred_raises(problem: Problem, shape: tuple[int, ...]) -> None:
    other = dataclasses.replace(problem, model=Headless(shape))
    with raises(MethodError, key="method.recentre", mentions=["recentre=False"]):
        other.simulation(FedKA())
    other.simulation(FedKA(recentre=False)).step()


def test_inputs_may_be_dicts() -> None:
    """Text comes as a dict of tensors, whole numbers among them: the shared examples do too."""

    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.classifier = torch.nn.Embedding(7, 5), torch.nn.Linear(5, 3)

        def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.classifier((self.embedding(x["ids"]) * x["keep"][..., None]).mean(1))

    rng = np.random.default_rng(0)
    x, y = {"ids": rng.integers(0, 7, (60, 4)), "keep": rng.random((60, 4))}, np.arange(60) % 3
    data = fk.data.from_arrays(x, y, x, y).with_public(1, validation=0)
    clients = [np.flatnonzero(data.y_train.numpy() == c) for c in range(3)]
    for engine in ("loop", "stacked"):
        settings = fk.Settings(rounds=2, participation=3, epochs=1, batch_size=5, lr=0.1, engine=engine)
        sim = fk.Simulation(FedKA(), Words(), data, clients, settings)
        sim.run()
        assert all(bool(w.isfinite().all()) for w in sim.params.values())
