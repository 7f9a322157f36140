"""Replayed steps on a CPU: every method trains as without replays, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.methods import METHODS, quick
from support.problems import Problem, make_problem, same
from torch import Tensor, nn

import fedkeep as fk
from fedkeep.engine import replay
from fedkeep.engine.replay import Replay
from fedkeep.engine.stacked import Stacked


@pytest.fixture(autouse=True)
def _replay_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MIN_USES", 1)


def replay_of(simulation: fk.Simulation) -> Replay:
    assert isinstance(simulation.engine, Stacked)
    assert simulation.engine.replay is not None
    return simulation.engine.replay


def train_both(problem: Problem, method: Any, **changes: Any) -> fk.Simulation:
    """Run with and without replays, compare the results bit for bit, and return the simulation with replays."""
    with_replays = problem.run(method, engine="stacked", **changes)
    without = problem.simulation(method, engine="stacked", **changes)
    assert isinstance(without.engine, Stacked)
    without.engine.replay = None
    without.run()
    assert same(with_replays.server, without.server)
    for k in range(len(problem.clients)):
        ours, theirs = (sim.state.clients.get(k) for sim in (with_replays, without))
        assert (ours is None) == (theirs is None)
        assert ours is None or same(ours, theirs)
    ours, theirs = ([r.get("train_loss") for r in sim.history.records] for sim in (with_replays, without))
    assert ours == theirs
    return with_replays


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_replayed(name: str, dtype: str) -> None:
    simulation = train_both(make_problem(), quick(name), dtype=dtype, rounds=4)
    used = replay_of(simulation)
    assert used.works
    assert used.recordings, "nothing was recorded"
    assert all(recorded is not None for recorded in used.recordings.values())
    assert max(recorded.uses for recorded in used.recordings.values() if recorded) >= 4


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adam", "lr": 0.01},
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
        {"clip_norm": 0.5},
        {"autocast": "bfloat16", "dtype": "float32"},
        {"dtype": "bfloat16"},
        {"at_once": 3},
        {"momentum": 0.0, "batch_size": 3},
    ],
    ids=lambda changes: "-".join(map(str, changes)),
)
def test_settings_are_replayed(changes: dict[str, Any]) -> None:
    assert replay_of(train_both(make_problem(), fk.methods.FedNTD(), **changes)).recordings


def test_a_convolutional_model_is_replayed() -> None:
    problem = make_problem()
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    model.append(nn.Linear(24, 4))
    problem = Problem(model, problem.data, problem.clients, problem.settings)
    assert replay_of(train_both(problem, fk.methods.FedNTD(), dtype="float32")).works


class Moody(nn.Module):
    """A layer that computes something else at every third call, which no recording can know."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x * (1.0 if self.calls % 3 else 2.0)


def test_a_module_with_a_state_of_its_own_is_noticed() -> None:
    problem = make_problem(rounds=6)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), Moody())
    simulation = Problem(model, problem.data, problem.clients, problem.settings).run(
        fk.methods.FedAvg(), engine="stacked"
    )
    assert not replay_of(simulation).works


def test_a_step_that_cannot_be_recorded_is_computed_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("cannot be recorded")

    monkeypatch.setattr(replay, "record", refuse)
    used = replay_of(train_both(make_problem(), fk.methods.FedAvg()))
    assert set(used.recordings.values()) == {None}


def test_an_error_in_a_step_is_the_methods_own() -> None:
    class Wrong(fk.methods.FedAvg):
        def loss(self, visit: Any, params: Any, batch: Any) -> Tensor:
            return visit.task.apply(params, batch["x"], train=True).mean(1)

    with pytest.raises(fk.errors.MethodError, match="must return a single number"):
        make_problem().run(Wrong(), engine="stacked")


def test_divergence_is_reported_as_without_replays() -> None:
    messages = []
    for use in (True, False):
        simulation = make_problem(lr=1e20, rounds=30).simulation(fk.methods.FedAvg(), engine="stacked", dtype="float32")
        if not use:
            simulation.engine.replay = None  # type: ignore[union-attr]
        with pytest.raises(fk.errors.Diverged) as error:
            simulation.run()
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_short_runs_and_large_cohorts_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MIN_USES", 100)
    used = Replay(lambda trees: (torch.zeros(2), {}), n_weights=1000, rounds=10)
    used.expect([3] * 12 + [2] * 5)
    assert used._pays(3)  # 120 steps in all
    assert not used._pays(2)
    assert not used._pays(1)
    large = Replay(lambda trees: (torch.zeros(2), {}), n_weights=replay.MAX_WEIGHTS // 2, rounds=10)
    large.expect([3] * 100)
    assert not large._pays(3)


def test_recordings_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, record, made = make_problem(rounds=5), replay.record, []

    def counted(*args: Any) -> Any:
        made.append(args)
        return record(*args)

    monkeypatch.setattr(replay, "record", counted)
    without_limit = problem.run(METHODS["scaffold"](), engine="stacked")
    assert len(replay_of(without_limit).recordings) > 2
    monkeypatch.setattr(replay, "MAX_RECORDINGS", 2)
    simulation = problem.simulation(METHODS["scaffold"](), engine="stacked")
    made.clear()  # without the trial step's
    for _ in range(5):
        simulation.step()
        assert len(made) == len(replay_of(simulation).recordings) == 2
    assert all(recorded is not None and recorded.uses for recorded in replay_of(simulation).recordings.values())
    assert same(simulation.server, without_limit.server)
