"""Flower's own mods and wrappers with fedkeep's strategy: what docs/deploy.md says works, and what does not."""

from __future__ import annotations

import dataclasses

import pytest
from support.errors import raises
from support.problems import Problem, gap

import fedkeep as fk

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from support.flower_grid import MemoryGrid, SuperNode, strategy_of

from fedkeep import tree
from fedkeep.errors import ConfigError, MethodError, RunError
from fedkeep.flower import Strategy, client_app, drive

WRAPPERS = (DifferentialPrivacyClientSideFixedClipping, DifferentialPrivacyServerSideFixedClipping)


def nodes_of(problem: Problem, method, mods) -> list[SuperNode]:
    """Return a node for each client, with these mods."""
    nodes = []
    for k, at in enumerate(problem.clients):
        part = dataclasses.replace(problem.data, x_train=problem.data.x_train[at], y_train=problem.data.y_train[at])
        app = client_app(method, lambda: problem.model, lambda context, part=part: part, mods=mods)
        nodes.append(SuperNode(app, {"client-id": k}))
    return nodes


def federation(problem: Problem, method, mods, wrap=None, **options) -> Strategy:
    """Run a federation with these mods and this wrapper."""
    nodes = nodes_of(problem, method, mods)
    strategy = strategy_of(problem, method, attempts=1, **options)
    drive(strategy, wrap(strategy) if wrap else strategy, MemoryGrid(nodes))
    return strategy


def moved(strategy: Strategy) -> float:
    """Return how far training moved the weights."""
    change = tree.sub(strategy.federation.state.params, strategy.federation.task.init)
    return float(tree.dot(change, change)) ** 0.5


def test_local_differential_privacy_clips_and_adds_noise(three: Problem) -> None:
    clipped = federation(three, fk.methods.FedNTD(), [LocalDpMod(0.01, 0.0, 1.0, 1e-5)], rounds=1)
    assert moved(clipped) <= 0.0101
    noised = federation(three, fk.methods.FedNTD(), [LocalDpMod(0.01, 0.01, 1.0, 1e-5)], rounds=1)
    assert moved(noised) > 0.02


@pytest.mark.parametrize("side", ["client", "server"])
def test_central_differential_privacy_with_fixed_clipping(three: Problem, side: str, tmp_path) -> None:
    kind = {
        "client": DifferentialPrivacyClientSideFixedClipping,
        "server": DifferentialPrivacyServerSideFixedClipping,
    }[side]
    mods = [fixedclipping_mod] if side == "client" else None
    clipped = federation(three, fk.methods.FedNTD(), mods, lambda s: kind(s, 0.0, 0.01, 3), rounds=1)
    assert moved(clipped) <= 0.0101
    noised = federation(
        three, fk.methods.FedNTD(), mods, lambda s: kind(s, 5.0, 0.01, 3), rounds=1, run_dir=tmp_path / "run"
    )
    assert moved(noised) > 0.02
    assert gap(fk.load_run(tmp_path / "run").params, noised.federation.state.params) == 0, (
        "what is saved includes the noise"
    )


def test_local_differential_privacy_does_not_send_the_number_of_examples(three: Problem) -> None:
    nodes = nodes_of(three, fk.methods.FedNTD(), [LocalDpMod(0.01, 0.0, 1.0, 1e-5)])
    strategy = strategy_of(three, fk.methods.FedNTD(), attempts=1, rounds=1)
    sent = []
    strategy.commit = lambda arrays=None: sent.extend(strategy.pending.uploads.values()) or Strategy.commit(strategy)
    strategy.start(MemoryGrid(nodes))
    assert [float(upload["n"]) for upload in sent] == [1.0] * 3


COVERED_BY_WRAPPERS = (
    "fedavg", "fedprox", "moon", "fedntd", "fedlmd", "fedrs", "fedlc", "fedvls", "fedrod", "feddecorr", "fedinit",
    "fedsam", "fedsol", "fedala", "fedalign",
)  # fmt: skip
SENDS_MORE = ("fedkeep", "fednova", "flashback", "feddistill")  # than one model's weights and n
# in the broadcast: the mod itself raises
SEVERAL_MODELS = ("scaffold", "fedcurv", "fedgkd", "fedgkd_vote", "fedcm", "fedgen", "fedfomo", "fedpac")


@pytest.mark.parametrize("name", fk.methods.REGISTRY)
def test_mods_are_refused_where_a_method_sends_more_than_weights(three: Problem, name: str) -> None:
    method = fk.methods.get(name)()
    nodes = nodes_of(three, method, [LocalDpMod(0.01, 0.0, 1.0, 1e-5)])
    strategy = strategy_of(three, method, attempts=1, rounds=1)
    if name not in (*SENDS_MORE, *SEVERAL_MODELS):
        strategy.start(MemoryGrid(nodes))
        return
    with raises(RunError, key="round", value=1):
        strategy.start(MemoryGrid(nodes))
    refused = [error for node in nodes for error in node.errors if isinstance(error, MethodError)]
    assert bool(refused) == (name in SENDS_MORE)
    assert all(error.value == name and "LocalDpMod" in str(error) for error in refused)


@pytest.mark.parametrize("name", fk.methods.REGISTRY)
@pytest.mark.parametrize("kind", WRAPPERS, ids=lambda kind: kind.__name__.removeprefix("DifferentialPrivacy"))
def test_wrappers_are_refused_where_the_server_does_more_than_average(three: Problem, kind, name: str) -> None:
    method = fk.methods.get(name)()
    strategy = strategy_of(three, method, attempts=1, rounds=1)
    grid = MemoryGrid(nodes_of(three, method, [fixedclipping_mod] if "ClientSide" in kind.__name__ else None))
    if name in COVERED_BY_WRAPPERS:
        drive(strategy, kind(strategy, 0.0, 0.01, 3), grid)
        assert moved(strategy) <= 0.0101
        return
    with raises(MethodError, key="wrap", value=name, mentions=[kind.__name__]):
        drive(strategy, kind(strategy, 0.0, 0.01, 3), grid)


def test_a_wrapper_refuses_uploads_with_more_than_weights(three: Problem) -> None:
    class Counting(fk.methods.FedAvg):
        averaged = ("params",)

        def finish(self, visit, params, measured):
            upload, client = super().finish(visit, params, measured)
            return {**upload, "mu": visit.facts["label_counts"]}, client

    strategy = strategy_of(three, Counting(), attempts=1, rounds=1)
    wrapped = DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 0.01, 3)
    with raises(MethodError, key="mods", value="counting", mentions=["mu"]):
        drive(strategy, wrapped, MemoryGrid(nodes_of(three, Counting(), None)))


@pytest.mark.parametrize("settings", [{"aggregation": "median"}, {"dp_clip": 1.0, "dp_noise": 1.0}])
def test_wrappers_are_refused_with_other_ways_to_aggregate(three: Problem, settings: dict) -> None:
    strategy = strategy_of(three, fk.methods.FedNTD(), rounds=1, **settings)
    wrapped = DifferentialPrivacyServerSideFixedClipping(strategy, 1.0, 0.01, 3)
    with raises(ConfigError, key="wrap"):
        drive(strategy, wrapped, MemoryGrid([]))


def test_under_a_wrapper_clients_count_alike(three: Problem) -> None:
    """With a clip so large that it changes nothing, the result is the plain mean, not the one weighted by n."""
    wrapped = federation(
        three,
        fk.methods.FedAvg(),
        None,
        lambda s: DifferentialPrivacyServerSideFixedClipping(s, 0.0, 1e9, 3),
        rounds=1,
    )
    sim = three.simulation(fk.methods.FedAvg(), rounds=1)
    models = sim.train_round(keep_models=True).clients["params"]
    assert gap(tree.mean(models), wrapped.federation.state.params) < 1e-9


def test_adaptive_clipping_at_the_clients_and_secure_aggregation_are_refused(three: Problem) -> None:
    for mod in (adaptiveclipping_mod, secaggplus_mod):
        with raises(ConfigError, key="mods", value=mod.__name__):
            federation(three, fk.methods.FedNTD(), [mod], rounds=1)
    with raises(ConfigError, key="report_loss"):
        client_app("fedavg", lambda: None, lambda context: None, mods=[LocalDpMod(1, 0, 1, 1e-5)], report_loss=True)
