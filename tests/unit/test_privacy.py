"""Differential privacy: sensitivity, noise, accounting against the exact formula, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr
from scipy.stats import kstest
from support.errors import raises
from support.problems import Problem, gap

import fedkeep as fk
from fedkeep import tree
from fedkeep.engine import privacy, server_hooks
from fedkeep.engine.settings import Settings
from fedkeep.errors import FedkeepError, MethodError
from fedkeep.method import Cohort, FedAvg

pytest.importorskip("opacus", reason="the accountant is not installed: pip install '.[privacy]'")

DP = {"dp_clip": 0.5, "dp_noise": 1.5}
REFUSED = ("fednova", "flashback", "feddf", "fedvarp", "fedexp", "fedkeep", "fedgen", "fedfomo", "fedpac")


def silent(count: int) -> bytes:
    """Return bytes whose normal numbers are all (nearly) zero: the median of the 52 bits."""
    return (np.full(count // 8, 2**63, dtype="<u8")).tobytes()


def exact_epsilon(deviation: float, delta: float) -> float:
    """Return the exact epsilon of the Gaussian mechanism of sensitivity 1 (Balle and Wang, 2018, theorem 8)."""

    def excess(epsilon: float) -> float:
        first = log_ndtr(0.5 / deviation - epsilon * deviation)
        second = epsilon + log_ndtr(-0.5 / deviation - epsilon * deviation)
        return math.exp(first) - math.exp(min(second, first)) - delta

    return brentq(excess, 0.0, 1e5)


@pytest.mark.parametrize("delta", [1e-5, 1e-3])
@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("rounds", [1, 10, 200])
def test_epsilon_is_an_upper_bound_close_to_the_exact_one(noise: float, rounds: int, delta: float) -> None:
    """Rounds compose to one Gaussian mechanism with the noise divided by the root of their number."""
    exact = exact_epsilon(noise / math.sqrt(rounds), delta)
    ours = privacy.compute_epsilon(noise, delta, rounds)
    assert exact <= ours <= 1.2 * exact + 0.02


@pytest.mark.parametrize("noise", [1e-3, 1e6])
@pytest.mark.parametrize("rounds", [1, 10**6])
@pytest.mark.parametrize("delta", [1e-300, 0.5, 1 - 1e-9])
def test_epsilon_is_finite_for_all_that_settings_allow(noise: float, rounds: int, delta: float) -> None:
    assert 0 <= privacy.compute_epsilon(noise, delta, rounds) < 1e30


def test_epsilon_counts_the_rounds_of_the_client_that_took_part_most() -> None:
    assert privacy.most_rounds([[0, 1], [1, 2], [1, 3]]) == 3
    assert privacy.most_rounds([]) == 0
    settings = Settings(**DP)
    assert privacy.epsilon(settings, [[0, 1], [1, 2], [1, 3]]) == privacy.compute_epsilon(1.5, 1e-5, 3)
    assert privacy.epsilon(settings, []) == 0.0


def test_noise_is_standard_normal() -> None:
    sample = privacy.normals(100_000, privacy.seeded_bytes(0, 1)).numpy()
    assert kstest(sample, "norm").pvalue > 1e-3
    assert kstest(privacy.normals(20_000, privacy.system_bytes).numpy(), "norm").pvalue > 1e-6
    assert not np.array_equal(sample, privacy.normals(100_000, privacy.seeded_bytes(0, 2)).numpy())
    extremes = privacy.normals(2, lambda count: b"\0" * 8 + b"\xff" * 8).tolist()
    assert extremes == pytest.approx([-8.2, 8.2], abs=0.1)


def uploads_of(sim: fk.Simulation) -> tuple[tree.Tree, Cohort]:
    result = sim.train_round()
    return result.clients["upload"], server_hooks.make_cohort(sim.settings, result.plan.cohort, 1)


def privatised(sim: fk.Simulation, uploads: tree.Tree, cohort: Cohort, source=silent) -> tree.Tree:
    size = sim.cohort_size
    return privacy.privatise(sim.method, sim.server, uploads, cohort, sim.settings, size, source)


def joint_norm(value: tree.Tree) -> float:
    return float(tree.dot(value, value)) ** 0.5


def test_changes_are_measured_from_the_weights_that_were_sent(problem: Problem) -> None:
    """FedACG sends other weights than it holds."""
    sim = problem.simulation(fk.methods.FedACG(), **DP)
    sim.step()
    uploads, cohort = uploads_of(sim)
    sent = sim.method.broadcast(sim.server)["params"]
    assert joint_norm(tree.sub(sent, sim.server["params"])) > 2 * DP["dp_clip"]
    new = server_hooks.aggregate(sim.method, sim.task, sim.server, uploads, cohort, sim.settings, silent)
    assert 0 < joint_norm(tree.sub(new["params"], sent)) <= DP["dp_clip"] * (1 + 1e-9)


@pytest.mark.parametrize("name", sorted(fk.methods.REGISTRY.keys() - set(REFUSED)))
def test_one_client_changes_the_sum_by_at_most_the_clipping_norm(problem: Problem, name: str) -> None:
    """Everything that the server computes follows from the noised sum, which one client moves by at most C."""
    method = fk.methods.get(name)()
    sim = problem.simulation(method, **DP)
    uploads, cohort = uploads_of(sim)
    means = []
    for scale in (0.0, 1.0, 1e4, -1e4):  # the first client's contribution: nothing, its own, far too large
        changed = tree.map(torch.clone, uploads)
        base = {"params": sim.server["params"]}
        for entry in method.averaged:
            zero = base.get(entry, tree.zeros_like(tree.take(uploads[entry], 0)))
            tree.map(lambda t, w, s=scale: t[0].copy_(w + s * (t[0] - w)), changed[entry], zero)
        changed["n"] = changed["n"] * (1 + abs(scale))
        private = privatised(sim, changed, cohort)
        assert len(set(private["n"].tolist())) == 1
        means.append({entry: tree.take(private[entry], 0) for entry in method.averaged})
        assert all(gap(means[-1], {e: tree.take(private[e], k) for e in method.averaged}) == 0 for k in range(4))
    for other in means[1:]:
        moved = 4 * joint_norm(tree.sub(other, means[0]))
        assert moved <= 0.5 * (1 + 1e-9)
    assert moved == pytest.approx(0.5, rel=1e-6), "a client that sends too much moves the sum by all of it"


def test_the_noise_has_the_stated_deviation(problem: Problem) -> None:
    sim = problem.simulation(FedAvg(), dp_clip=2.0, dp_noise=3.0)
    uploads, cohort = uploads_of(sim)
    quiet = privatised(sim, uploads, cohort)
    noise = []
    for round in range(30):
        noised = privatised(sim, uploads, cohort, privacy.seeded_bytes(0, round))
        noise += [t[0].flatten() for t in tree.leaves(tree.sub(noised["params"], quiet["params"]))]
    deviation = float(torch.cat(noise).std())
    assert deviation == pytest.approx(3.0 * 2.0 / 4, rel=0.02)


def test_missing_clients_count_as_no_change(problem: Problem) -> None:
    sim = problem.simulation(FedAvg(), **DP)
    uploads, cohort = uploads_of(sim)
    all_but_one = tree.take(uploads, slice(1, None))
    absent = privatised(sim, all_but_one, Cohort(cohort.ids[1:], 1, 0))
    unchanged = tree.map(torch.clone, uploads)
    tree.map(lambda t, w: t[0].copy_(w), unchanged["params"], sim.params)
    zero = privatised(sim, unchanged, cohort)
    assert gap(tree.take(absent["params"], 0), tree.take(zero["params"], 0)) < 1e-15


@pytest.mark.parametrize("name", sorted(fk.methods.REGISTRY.keys() - set(REFUSED)))
def test_engines_and_chunks_agree_and_the_seed_decides(problem: Problem, name: str) -> None:
    method = fk.methods.get(name)()
    options = {**DP, "rounds": 2}
    loop = problem.run(method, **options)
    stacked = problem.run(method, engine="stacked", at_once=2, **options)
    assert gap(loop.server, stacked.server) < 1e-9
    if name == "fedavg":
        assert gap(loop.server, problem.run(method, **options).server) == 0
        assert gap(loop.server, problem.run(method, **options, seed=6).server) > 1e-3


def test_records_hold_epsilon_and_nothing_of_single_clients(problem: Problem) -> None:
    records = problem.run(FedAvg(), **DP).history.records
    assert all(record["train_loss"] is None and "local" not in record for record in records[1:])
    counts = [privacy.most_rounds([r["cohort"] for r in records[1 : t + 1]]) for t in range(1, 4)]
    assert [r["epsilon"] for r in records[1:]] == [privacy.compute_epsilon(1.5, 1e-5, count) for count in counts]


def test_a_resumed_run_has_the_same_noise_and_epsilon(problem: Problem, tmp_path) -> None:
    from fedkeep.runs.folder import RunFolder

    whole = problem.run(FedAvg(), **DP)
    with RunFolder.create(tmp_path / "run", {"checkpoint_every": 1}) as folder:
        problem.simulation(FedAvg(), **DP, rounds=2).attach(folder).run()
    with RunFolder.open(tmp_path / "run") as folder:
        resumed = problem.simulation(FedAvg(), **DP).attach(folder)
        resumed.run()
    assert gap(whole.server, resumed.server) == 0
    assert [r.get("epsilon") for r in whole.history.records] == [r.get("epsilon") for r in resumed.history.records]


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_do_not_average_are_refused(problem: Problem, name: str) -> None:
    with raises(MethodError, key="dp_noise", value=name):
        problem.simulation(fk.methods.get(name)(), **DP)


def test_entries_that_are_not_averaged_are_refused(problem: Problem) -> None:
    class Counting(FedAvg):
        averaged = ("params",)

        def finish(self, visit, params, measured):
            upload, client = super().finish(visit, params, measured)
            return {**upload, "mu": visit.facts["label_counts"]}, client

    with raises(MethodError, key="dp_noise", value="counting", mentions=["mu"]):
        problem.run(Counting(), **DP)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"dp_clip": 1.0}, "dp_noise"),
        ({"dp_noise": 1.0}, "dp_clip"),
        ({"dp_clip": 0.0, "dp_noise": 1.0}, "dp_clip"),
        ({"dp_clip": 1.0, "dp_noise": float("nan")}, "dp_noise"),
        ({"dp_clip": 1.0, "dp_noise": 1e-200}, "dp_noise"),
        ({"dp_clip": 1e300, "dp_noise": 1.0}, "dp_clip"),
        ({"dp_delta": 1.0}, "dp_delta"),
        ({**DP, "aggregation": "median"}, "aggregation"),
        ({**DP, "eval_local_every": 1}, "eval_local_every"),
    ],
)
def test_settings_are_checked(settings: dict, key: str) -> None:
    with raises(FedkeepError, key=key):
        Settings(**settings)


def test_a_missing_accountant_is_named(problem: Problem, monkeypatch) -> None:
    monkeypatch.setattr(privacy, "ACCOUNTANT", "no_such_accountant.rdp")
    with raises(FedkeepError, key="no_such_accountant", mentions=["pip install 'opacus"]):
        problem.simulation(FedAvg(), **DP)
