"""Dropout in training: the same draws in both engines, with padding, in replays, after a resume and in every pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.methods import SAM
from support.problems import Problem, gap, make_problem, same
from torch import Tensor, nn

import fedkeep as fk
from fedkeep.engine import replay
from fedkeep.engine.mapping import one_stream_each
from fedkeep.engine.stacked import Stacked
from fedkeep.method import FedAvg


class Encoder(nn.Module):
    """A transformer's encoder; with `batch_first=False` the examples are along the second axis."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=batch_first)
        self.out, self.batch_first = nn.Linear(4, 4), batch_first

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, 0] if self.batch_first else x[:, 0].transpose(0, 1)
        return self.out(self.encoder(rows).mean(1 if self.batch_first else 0))


class Functional(nn.Module):
    """Calls dropout without a layer, once at the input, and has features."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(16, 8), nn.Linear(8, 4)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(F.dropout(x.flatten(1), 0.2, self.training)))

    def head(self, h: Tensor) -> Tensor:
        return self.out(F.dropout(h, 0.5, self.training))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(6, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(),
        nn.Dropout(0.2), nn.Flatten(), nn.Linear(24, 4),
    )  # fmt: skip


MODELS = {
    "mlp": mlp,
    "cnn": cnn,
    "functional": Functional,
    "encoder": lambda: Encoder(batch_first=True),
    "encoder, examples second": lambda: Encoder(batch_first=False),
}


def problem(model: str, **changes: Any) -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return dataclasses.replace(make_problem(**changes), model=MODELS[model]())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("model", MODELS)
def test_auto_stacks_and_equals_the_loop(model: str) -> None:
    """The clients' batches are of unequal size, so some are padded."""
    loop, auto = (problem(model, rounds=2).run(SAM(), engine=engine) for engine in ("loop", "auto"))
    assert auto.engine.name == "stacked"
    assert gap(loop.server, auto.server) < 1e-12


def test_it_has_an_effect() -> None:
    with_dropout, without = problem("mlp"), problem("mlp")
    without.model[3].p = 0.0
    assert gap(with_dropout.run(FedAvg()).server, without.run(FedAvg()).server) > 1e-3


def test_it_does_not_depend_on_who_is_trained_together() -> None:
    whole, chunks = (problem("cnn").run(fk.methods.FedNTD(), engine="stacked", at_once=n) for n in (None, 2))
    assert gap(whole.server, chunks.server) < 1e-12


def test_clients_one_after_another_on_a_gpu_equal_the_loop() -> None:
    """As on a GPU, where each client has a stream."""
    loop, stacked = (problem("functional").simulation(fk.methods.get("moon")(), engine="loop") for _ in range(2))
    stacked.engine = Stacked(stacked.local, stacked.x, stacked.y, one_stream_each)
    assert gap(loop.run().params, stacked.run().params) < 1e-12


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_steps_are_recorded_and_replayed(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(replay, "MIN_USES", 1)
    replayed = problem("mlp").run(fk.methods.FedNTD(), engine="stacked", rounds=4, dtype=dtype)
    assert replayed.engine.replay.works
    assert all(recorded is not None for recorded in replayed.engine.replay.recordings.values())
    assert max(recorded.uses for recorded in replayed.engine.replay.recordings.values()) >= 4
    plain = problem("mlp").simulation(fk.methods.FedNTD(), engine="stacked", rounds=4, dtype=dtype)
    plain.engine.replay = None
    plain.run()
    assert same(replayed.params, plain.params)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_resumed_run_draws_what_the_whole_run_draws(tmp_path: Path, engine: str) -> None:
    def stop(simulation: fk.Simulation, record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    own = problem("cnn")
    args = (fk.methods.Scaffold(), own.model, own.data, own.clients)
    settings = {**own.settings, "engine": engine, "rounds": 4}
    whole = fk.simulate(*args, **settings)
    with pytest.raises(KeyboardInterrupt):
        fk.simulate(*args, **settings, run_dir=tmp_path, callbacks=[stop])
    resumed = fk.resume(tmp_path, model=own.model, data=own.data, clients=own.clients)
    assert same(whole.params, resumed.params)


# Which draws are the same, and which are not


@dataclasses.dataclass(frozen=True)
class Twice(FedAvg):
    """Calls the model twice in its loss; notes how far apart the logits are."""

    def loss(self, visit: Any, params: Any, batch: Any) -> Tensor:
        first, second = (visit.task.apply(params, batch["x"], train=True) for _ in range(2))
        DISTANCES.append(float((first - second).detach().abs().max()))
        return fk.losses.masked_mean(visit.task.criterion(first + second, batch["y"]), batch["mask"])


DISTANCES: list[float] = []


def test_two_calls_in_one_loss_have_different_draws() -> None:
    DISTANCES.clear()
    problem("mlp").run(Twice(), rounds=1)
    assert DISTANCES
    assert min(DISTANCES) > 0


def test_the_passes_of_a_step_have_the_same_draws() -> None:
    """So SAM with radius 0 is FedAvg, as without dropout."""
    fedavg, flat, sharp = (
        problem("cnn").run(method, engine="stacked").params for method in (FedAvg(), SAM(rho=0.0), SAM(rho=0.05))
    )
    assert same(fedavg, flat)
    assert gap(fedavg, sharp) > 1e-6


def test_seeds_rounds_clients_and_steps_have_their_own_draws() -> None:
    """The mask of a layer that sees only ones, in every step of every client."""
    masks: list[tuple[float, ...]] = []

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                masks.append(tuple(F.dropout(torch.ones(64)).tolist()))
            return self.out(x.flatten(1))

    own, steps = dataclasses.replace(make_problem(), model=Looking()), 0
    simulations = [own.simulation(FedAvg(), seed=seed) for seed in (5, 6)]
    masks.clear()  # of the calls that test the model
    for simulation in simulations:
        for record in simulation.run().records[1:]:
            steps += sum(simulation.job(client, record["round"]).plan.steps for client in record["cohort"])
    assert len(masks) == len(set(masks)) == steps > 80
