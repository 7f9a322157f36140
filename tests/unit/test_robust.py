"""Robust averaging: against Flower's own functions, numbers by hand, attacks, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support.errors import raises
from support.methods import quick
from support.problems import Problem, gap

import fedkeep as fk
from fedkeep import tree
from fedkeep.engine import robust, server_hooks
from fedkeep.engine.settings import SMALLEST_COHORT, Settings
from fedkeep.errors import FedkeepError, MethodError
from fedkeep.method import Cohort, FedAvg

ROBUST = [kind for kind in SMALLEST_COHORT if kind != "mean"]


def random_uploads(seed: int, size: int) -> tuple[tree.Tree, tree.Tree]:
    """Return the server's weights and the uploads of a cohort whose first client is far away."""
    rng = np.random.default_rng(seed)
    server = {"params": {"a": torch.tensor(rng.normal(size=(3, 2))), "b": torch.tensor(rng.normal(size=4))}}
    params = tree.map(lambda w: w + torch.tensor(rng.normal(size=(size, *w.shape))), server["params"])
    params["a"][0] += 50
    return server, {"params": params, "n": torch.tensor(rng.integers(1, 99, size), dtype=torch.float64)}


def aggregated(settings: Settings, server: tree.Tree, uploads: tree.Tree) -> tree.Tree:
    cohort = Cohort(tuple(range(len(uploads["n"]))), 1, 0)
    return server_hooks.aggregate(FedAvg(), None, server, uploads, cohort, settings)["params"]


@pytest.mark.parametrize("size", [7, 10])
@pytest.mark.parametrize("kind", ["median", "trimmed_mean", "krum", "multi_krum"])
def test_results_are_those_of_flower(kind: str, size: int) -> None:
    flower = pytest.importorskip("flwr.server.strategy.aggregate", reason="Flower is not installed")
    for seed in range(5):
        server, uploads = random_uploads(seed, size)
        results = [([uploads["params"][name][k].numpy() for name in "ab"], 1) for k in range(size)]
        expected = {
            "median": lambda r=results: flower.aggregate_median(r),
            "trimmed_mean": lambda r=results: flower.aggregate_trimmed_avg(r, 2.5 / size),
            "krum": lambda r=results: flower.aggregate_krum(r, 2, 0),
            "multi_krum": lambda r=results: flower.aggregate_krum(r, 2, size - 2),
        }[kind]()
        ours = aggregated(Settings(aggregation=kind, hostile=2), server, uploads)
        assert gap({"a": torch.tensor(expected[0]), "b": torch.tensor(expected[1])}, ours) < 1e-12


def test_clipping_scales_each_change_to_the_median_norm() -> None:
    """Changes of norm 5, 1 and 10 along one axis, median 5: they become 5, 1 and 5, their mean 11/3."""
    server = {"params": {"w": torch.tensor([1.0, 1.0])}}
    params = {"w": torch.tensor([[4.0, 5.0], [1.0, 2.0], [7.0, 9.0]])}
    uploads = {"params": params, "n": torch.tensor([1.0, 1e9, 3.0])}
    clipped = robust.clip_to_median_norm(server, uploads, ("params",))["params"]["w"]
    torch.testing.assert_close(clipped, torch.tensor([[4.0, 5.0], [1.0, 2.0], [4.0, 5.0]]))
    mean = aggregated(Settings(aggregation="clip"), server, uploads)["w"]
    torch.testing.assert_close(mean, torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("kind", ROBUST)
def test_one_hostile_client_has_little_effect(kind: str) -> None:
    server, uploads = random_uploads(0, 10)
    honest = tree.mean(tree.take(uploads["params"], slice(1, None)))
    settings = Settings(aggregation=kind)
    for far in (1e3, -1e6):
        attacked = {"params": tree.map(torch.clone, uploads["params"]), "n": uploads["n"].clone()}
        attacked["n"][0] = 1e9
        attacked["params"]["a"][0] = far
        moved = tree.sub(aggregated(settings, server, attacked), honest)
        assert float(tree.dot(moved, moved)) ** 0.5 < 4.5  # a single honest client is about 3 from their mean
        plain = aggregated(Settings(), server, attacked)
        assert float((plain["a"] - honest["a"]).abs().max()) > 900


@pytest.mark.parametrize("kind", ["clip", "krum", "multi_krum"])
def test_a_small_entry_does_not_hide_behind_a_large_one(kind: str) -> None:
    server, uploads = random_uploads(0, 10)
    uploads["params"]["a"][0] -= 50
    uploads["dc"] = tree.map(lambda t: 1e4 * torch.randn_like(t), uploads["params"])
    uploads["params"]["a"][3] += 40  # far away among the weights, small among the dc
    scaffold = fk.methods.Scaffold()
    cohort = Cohort(tuple(range(10)), 1, 0)
    used, left = robust.resist(scaffold, server, uploads, cohort, Settings(aggregation=kind))
    change = robust.norms(robust.changes(server, used, ("params",)), len(left.ids))
    assert float(change.max()) < 6
    assert kind == "clip" or 3 not in left.ids


def test_krum_uses_the_clients_it_chose_and_no_others() -> None:
    server, uploads = random_uploads(1, 7)
    settings = Settings(aggregation="multi_krum", hostile=2)
    used, cohort = robust.resist(FedAvg(), server, uploads, Cohort((3, 5, 8, 9, 11, 20, 21), 4, 1), settings)
    assert len(cohort.ids) == len(used["n"]) == 5
    assert 3 not in cohort.ids
    assert (cohort.round, cohort.seed) == (4, 1)
    assert used["n"].tolist() == [float(np.median(uploads["n"]))] * 5


@pytest.mark.parametrize("kind", ["clip", "krum", "multi_krum"])
@pytest.mark.parametrize("name", ["fedkeep", "fedgen", "fedpac"])
def test_claimed_sizes_do_not_weigh_a_client(problem: Problem, name: str, kind: str) -> None:
    """A client that claims a million times its examples, in the classes that it has, changes nothing."""
    method = quick(name)
    sim = problem.run(method, participation=6, rounds=1, aggregation=kind)
    jobs = [sim.job(k, 2) for k in range(6)]
    uploads = sim.engine.train(server_hooks.broadcast(method, sim.server), jobs, 0.1).upload
    counts = next(uploads[entry] for entry in ("mu", "counts") if entry in uploads)
    assert torch.equal(counts.sum(1), uploads["n"])
    claimed = {**uploads, "n": uploads["n"].clone()}
    for entry in ({"mu", "counts"} & uploads.keys()) | {"n"}:
        claimed[entry] = uploads[entry].clone()
        claimed[entry][5] *= 1e6
    results = [
        server_hooks.aggregate(method, sim.task, sim.server, each, Cohort(tuple(range(6)), 2, 0), sim.settings)
        for each in (uploads, claimed)
    ]
    assert gap(*results) < 1e-9


REFUSED = ("fednova", "flashback", "feddf", "fedvarp", "fedexp", "fedkeep", "fedgen", "fedfomo", "fedpac")


@pytest.mark.parametrize("name", fk.methods.REGISTRY)
@pytest.mark.parametrize("kind", ["median", "krum"])
def test_every_method_that_averages_runs_and_the_others_are_refused(problem: Problem, name: str, kind: str) -> None:
    method = quick(name)
    if kind == "median" and name in REFUSED:
        with raises(MethodError, key="aggregation", value="median", valid=["clip", "krum"], mentions=[name]):
            problem.simulation(method, participation=6, aggregation=kind)
        return
    sim = problem.run(method, participation=6, aggregation=kind, rounds=2)
    assert gap(sim.server, problem.run(method, participation=6, rounds=2).server) > 1e-9
    stacked = problem.run(method, participation=6, aggregation=kind, rounds=2, engine="stacked")
    assert gap(sim.server, stacked.server) < 1e-9


@pytest.mark.parametrize("kind", ROBUST)
def test_chunks_are_not_averaged_in_advance(problem: Problem, kind: str) -> None:
    options = {"participation": 6, "aggregation": kind, "engine": "stacked"}
    whole, chunks = (problem.run(FedAvg(), **options, at_once=number) for number in (None, 2))
    assert gap(whole.server, chunks.server) < 1e-12


@pytest.mark.parametrize(
    ("kind", "hostile", "enough"), [("median", 1, 3), ("trimmed_mean", 2, 5), ("krum", 1, 5), ("multi_krum", 2, 7)]
)
def test_cohorts_must_be_large_enough(problem: Problem, kind: str, hostile: int, enough: int) -> None:
    many = dataclasses.replace(problem, clients=np.array_split(np.arange(40), 8))
    many.simulation(FedAvg(), aggregation=kind, hostile=hostile, participation=enough)
    with raises(FedkeepError, key="hostile", value=hostile, mentions=[str(enough)]):
        many.simulation(FedAvg(), aggregation=kind, hostile=hostile, participation=enough - 1)
    empty = [np.arange(5), *[np.array([], dtype=int)] * 7]
    with raises(FedkeepError, key="hostile", mentions=["1"]):
        dataclasses.replace(problem, clients=empty).run(FedAvg(), aggregation=kind, hostile=hostile, participation=8)


def test_settings_are_checked() -> None:
    with raises(FedkeepError, key="aggregation", value="mode", valid=ROBUST):
        Settings(aggregation="mode")
    with raises(FedkeepError, key="hostile", value=0):
        Settings(hostile=0)


def test_a_subclass_with_its_own_aggregate_declares_what_it_averages() -> None:
    class Own(fk.methods.FedNTD):
        def aggregate(self, task, server, uploads, cohort):
            return super().aggregate(task, server, uploads, cohort)

    class Loss(fk.methods.FedNTD):
        pass

    assert Own().averaged == ()
    assert Loss().averaged == ("params",)


@pytest.mark.parametrize("changes", [{"aggregation": "median"}, {"dp_clip": 1.0, "dp_noise": 0.1}])
def test_what_a_method_averages_can_depend_on_an_option(problem: Problem, changes: dict) -> None:
    with raises(MethodError):
        problem.simulation(fk.methods.FedKeep(), **changes)
    method = fk.methods.FedKeep(rows=False)
    assert gap(problem.run(method, **changes).params, problem.finished(method).params) > 1e-9
