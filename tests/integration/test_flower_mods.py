"""Flower's own mods and wrappers with fedkeep's strategy: what docs/deploy.md says works, and what does not."""

from __future__ import annotations

import dataclasses

import pytest
from support.errors import raises
from support.problems import Problem, gap

import fedkeep as fk

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedkeep[flower]'")

from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from support.flower_grid import MemoryGrid, SuperNode, strategy_of

from fedkeep import tree
from fedkeep.errors import RunError
from fedkeep.flower import Strategy, client_app, drive


def federation(problem: Problem, method, mods, wrap=None, **options) -> Strategy:
    """Run a federation with these mods and this wrapper."""
    nodes = []
    for k, at in enumerate(problem.clients):
        part = dataclasses.replace(problem.data, x_train=problem.data.x_train[at], y_train=problem.data.y_train[at])
        app = client_app(method, lambda: problem.model, lambda context, part=part: part, mods=mods)
        nodes.append(SuperNode(app, {"client-id": k}))
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


def test_mod_rejects_a_method_that_sends_more_than_weights(three: Problem) -> None:
    with raises(RunError, key="round", value=1, mentions=["ArrayRecord"]):
        federation(three, fk.methods.get("scaffold")(), [LocalDpMod(0.01, 0.0, 1.0, 1e-5)], rounds=1)


def test_adaptive_clipping_and_secure_aggregation_do_not_work(three: Problem) -> None:
    with raises(RunError, key="round", value=1):
        federation(
            three,
            fk.methods.FedNTD(),
            [adaptiveclipping_mod],
            lambda s: DifferentialPrivacyClientSideAdaptiveClipping(s, 0.1, 3),
            rounds=1,
        )
    with raises(RunError, key="round", value=1, mentions=["secaggplus_configs"]):
        federation(three, fk.methods.FedNTD(), [secaggplus_mod], rounds=1)
