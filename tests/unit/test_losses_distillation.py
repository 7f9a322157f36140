"""What the distilling and contrasting methods do at their edges: first rounds, first visits, bytes, refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.errors import raises
from support.problems import Problem, gap, same

import fedkeep as fk
from fedkeep import losses, tree
from fedkeep.method import Cohort
from fedkeep.methods import MOON, FedAvg, FedAvgM, FedGKD, FedGKDVote, FedNova, FedNTD


def test_mse_is_the_mean_over_classes() -> None:
    """((1 - 3)^2 + 0 + (2 - 5)^2) / 3 = 13 / 3."""
    value = losses.mse(torch.tensor([[1.0, 7.0, 2.0]]), torch.tensor([[3.0, 7.0, 5.0]]))
    assert value.tolist() == pytest.approx([13 / 3])


def test_plain_distillation_reaches_the_true_logit_and_not_true_distillation_does_not() -> None:
    z, z_g = torch.tensor([[1.0, 2.0, 0.5]], requires_grad=True), torch.tensor([[0.3, -1.0, 2.0]])
    for distance in ("kl", "mse"):
        method = FedNTD(distance=distance)
        (whole,) = torch.autograd.grad(method.distance_to_teacher(z, z_g).sum(), z)
        assert float(whole[0, 1].abs()) > 0.1
        (rest,) = torch.autograd.grad(
            method.distance_to_teacher(losses.not_true(z, torch.tensor([1])), z_g[:, [0, 2]]).sum(), z
        )
        assert float(rest[0, 1]) == 0
        assert float(rest[0, 0].abs()) > 0.1


@pytest.mark.parametrize("method", [FedGKD(), FedGKD(M=1), FedGKDVote(), MOON()], ids=lambda m: m.name)
def test_the_first_round_is_fedavgs(problem: Problem, method: FedAvg) -> None:
    """No teacher yet, no previous model yet; from the second round on they differ."""
    plain, ours = problem.simulation(FedAvg()), problem.simulation(method)
    plain.step(), ours.step()
    assert gap(plain.params, ours.params) < 1e-12
    for _ in range(2):
        plain.step(), ours.step()
    assert gap(plain.params, ours.params) > 1e-6


@pytest.mark.parametrize(
    ("method", "models"), [(FedGKD(M=1), 1), (FedGKD(M=3), 2), (FedGKDVote(M=1), 1), (FedGKDVote(M=3), 3)]
)
def test_models_sent_down(problem: Problem, method: FedAvg, models: int) -> None:
    sim = problem.simulation(method)
    sent = tree.nbytes(method.broadcast(sim.server))
    assert sent // tree.nbytes(sim.params) == models
    assert sent % tree.nbytes(sim.params) <= 8 * 3


def test_the_buffer_holds_the_last_models_newest_first(problem: Problem) -> None:
    sim, seen = problem.simulation(FedGKD(M=2)), []
    for filled in ([0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]):
        assert sim.server["filled"].tolist() == filled
        for slot, params in enumerate(reversed(seen[-2:])):
            assert same(tree.take(sim.server["buffer"], slot), params)
        sim.step()
        seen.append(tree.map(torch.clone, sim.params))


def test_the_vote_gives_twice_lam_away_and_prefers_the_lower_loss(problem: Problem) -> None:
    method = FedGKDVote(lam=0.3, M=3)
    sim = problem.simulation(method)
    assert method.broadcast(sim.server)["gamma"].tolist() == [0.0, 0.0, 0.0]
    sim.step(), sim.step()
    gamma, loss = method.broadcast(sim.server)["gamma"], sim.server["losses"]
    assert float(gamma.sum()) == pytest.approx(0.6)
    assert float(gamma[2]) == 0
    assert float(gamma[0] / gamma[1]) == pytest.approx(float(torch.exp(3 * (loss[1] - loss[0]))))


def test_the_vote_raises_without_validation_examples(problem: Problem) -> None:
    whole = problem.data.public
    for public in (None, dataclasses.replace(whole, x_val=whole.x_val[:0], y_val=whole.y_val[:0])):
        data = dataclasses.replace(problem.data, public=public)
        with raises(fk.errors.MethodError, mentions=["public=0.1"]):
            dataclasses.replace(problem, data=data).simulation(FedGKDVote())


def test_moon_needs_a_model_with_features(problem: Problem) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4), torch.nn.Softplus())
    with raises(fk.errors.ModelError, key="model.features"):
        dataclasses.replace(problem, model=model).run(MOON())


def test_moon_stays_finite_where_all_features_are_zero(problem: Problem) -> None:
    """A cosine with the zero vector: no direction, so no pull and no NaN."""
    sim = problem.simulation(MOON())
    dead = {n: w - 100 if n == "body.1.bias" else w for n, w in sim.params.items()}
    features, _ = sim.task.outputs(dead, sim.x_test)
    assert float(features.abs().max()) == 0
    batch = {"x": sim.x[:4], "y": sim.y[:4], "mask": torch.ones(4, dtype=torch.bool)}
    new = tree.map(torch.clone, dead)
    sim.local.step(new, sim.task.optimizer.init(dead), batch, {"params": dead}, {}, {"previous": dead}, 0.1)
    assert all(bool(t.isfinite().all()) for t in tree.leaves(new))


def test_fednova_with_equal_steps_is_fedavg_and_with_unequal_ones_it_normalises() -> None:
    """w_g = 0, n = 1, 3; w = 2, 4. tau = 5, 5: 1/4 * 2 + 3/4 * 4 = 3.5, FedAvg.

    tau = 1, 4: d = -2, -1; tau_eff = 1/4 + 3 = 3.25; 3.25 * (2/4 + 3/4) = 4.0625.
    """
    server = {"params": {"w": torch.zeros(1)}}
    uploads = {"params": {"w": torch.tensor([[2.0], [4.0]])}, "n": torch.tensor([1.0, 3.0])}
    for tau, expected in (([5.0, 5.0], 3.5), ([1.0, 4.0], 4.0625)):
        after = FedNova().aggregate(None, server, {**uploads, "tau": torch.tensor(tau)}, Cohort((0, 1), 1, 0))
        assert float(after["params"]["w"]) == pytest.approx(expected)


def test_fedavgm_keeps_moving() -> None:
    """Clients stay where they are after one move of 1: b = 0.5 carries the server on by 0.5, then 0.25."""
    server = {"params": {"w": torch.zeros(1)}, "v": {"w": torch.zeros(1)}}
    where, method = 1.0, FedAvgM(b=0.5)
    for expected in (1.0, 1.5, 1.75):
        uploads = {"params": {"w": torch.tensor([[where]])}, "n": torch.tensor([1.0])}
        server = method.aggregate(None, server, uploads, Cohort((0,), 1, 0))
        where = float(server["params"]["w"])
        assert where == pytest.approx(expected)
