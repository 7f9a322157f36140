"""Rounds: who takes part, what is recorded, what is refused, and how a run that diverges ends."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch
from conftest import Problem, gap, make_problem, same

import fedkeep as fk
from fedkeep import tree
from fedkeep.errors import Diverged, EngineError, FedkeepError


def test_methods_are_compared_on_the_same_cohorts(problem: Problem) -> None:
    cohorts = [
        [r["cohort"] for r in problem.run(method).history.records[1:]]
        for method in (fk.methods.FedAvg(), fk.methods.Scaffold())
    ]
    assert cohorts[0] == cohorts[1]
    assert all(len(set(c)) == 4 for c in cohorts[0])
    assert len({tuple(c) for c in cohorts[0]}) > 1


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(problem: Problem) -> None:
    first, again, other = (problem.run(fk.methods.FedNTD(), seed=seed).params for seed in (1, 1, 2))
    assert same(first, again)
    assert gap(first, other) > 1e-6


@pytest.mark.parametrize(("participation", "size"), [(0.5, 3), (1.0, 6), (1, 1), (6, 6), (0.01, 1), (0.25, 2)])
def test_participation_is_a_share_or_a_number(problem: Problem, participation: float, size: int) -> None:
    record = problem.simulation(fk.methods.FedAvg(), participation=participation).step()
    assert len(record["cohort"]) == size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"participation": 7}, "there are 6"),
        ({"participation": 0}, "share in"),
        ({"participation": 2.5}, "say 2"),
        ({"participation": True}, "share in"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1"),
        ({"epochs": 1.5}, "epochs must be"),
        ({"batch_size": "4"}, "batch_size must be"),
        ({"lr": -0.1}, "lr must be a number above 0"),
        ({"lr": float("nan")}, "lr must be"),
        ({"momentum": 1.0}, "momentum must lie"),
        ({"weight_decay": -1.0}, "weight_decay must not"),
        ({"clip_norm": 0.0}, "clip_norm must be"),
        ({"optimizer": "sdg"}, "did you mean sgd"),
        ({"engine": "stackd"}, "did you mean stacked"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_bad_settings_are_refused_by_name(problem: Problem, changes: dict, message: str) -> None:
    with pytest.raises(FedkeepError, match=message):
        problem.simulation(fk.methods.FedAvg(), **changes)


def test_an_unknown_setting_names_the_nearest(problem: Problem) -> None:
    with pytest.raises(FedkeepError, match="did you mean batch_size"):
        fk.simulate("fedavg", problem.model, problem.data, problem.clients, batchsize=3)


def test_the_learning_rate_decays_by_round(problem: Problem) -> None:
    records = problem.run(fk.methods.FedAvg(), lr=0.1, lr_decay=0.5).history.records[1:]
    assert [r["lr"] for r in records] == pytest.approx([0.1, 0.05, 0.025])


def test_evaluation_is_as_often_as_asked_and_always_at_the_end(problem: Problem) -> None:
    history = problem.run(fk.methods.FedAvg(), rounds=5, eval_every=2, eval_local_every=4).history
    assert history.rounds.tolist() == [2, 4, 5]
    assert [r["round"] for r in history.records if "local" in r] == [4, 5]
    assert history.class_accuracy.shape == (3, 4)
    assert np.isnan(history.summary()["round_forgetting"])  # it needs every round
    assert history.local(4)["class_accuracy"].shape == (4, 4)
    with pytest.raises(FedkeepError, match="eval_local_every"):
        history.local(3)


def test_the_record_tells_what_the_models_do(problem: Problem) -> None:
    """Confusion, class accuracy and label counts against predictions made by hand from the final module."""
    sim = problem.run(fk.methods.FedAvg(), eval_local_every=1)
    x, y = problem.data.x_test, problem.data.y_test
    predicted = sim.history.model(x).argmax(1)
    expected = [[int(((y == a) & (predicted == b)).sum()) for b in range(4)] for a in range(4)]
    assert sim.history.records[-1]["confusion"] == expected
    assert sim.history.accuracy[-1] == pytest.approx(float((predicted == y).double().mean()))
    local = sim.history.local(3)
    for k, counts in zip(local["ids"], local["label_counts"], strict=True):
        labels = problem.data.y_train[problem.clients[k]]
        assert counts.tolist() == torch.bincount(labels, minlength=4).tolist()


def test_local_models_are_evaluated_as_they_came_from_training(problem: Problem) -> None:
    sim = problem.simulation(fk.methods.FedAvg(), eval_local_every=1)
    shared = sim.method.broadcast(sim.server)
    record = sim.step()
    for place, k in enumerate(record["cohort"]):
        at = torch.from_numpy(problem.clients[k])
        plan = fk.data.make_plan(5, 1, k, len(at), 2, 4)
        trained = sim.local.train_one(shared, {}, sim.x[at], sim.y[at], plan, record["lr"])
        hits = sim.task.apply(trained.params, sim.x_test).argmax(1) == sim.y_test
        assert np.trace(record["local"]["confusion"][place]) == int(hits.sum())


def test_bytes_are_read_off_the_trees(problem: Problem) -> None:
    sim = problem.simulation(fk.methods.Scaffold())
    model = tree.nbytes(sim.params)
    record = sim.step()
    assert record["bytes_down"] == 4 * 2 * model  # weights and c
    assert record["bytes_up"] == 4 * (2 * model + 8)  # weights, dc and n


def test_clients_without_examples_are_skipped(problem: Problem, caplog: pytest.LogCaptureFixture) -> None:
    empty = np.array([], dtype=int)
    some = dataclasses.replace(problem, clients=[problem.clients[5], empty])
    record = some.simulation(fk.methods.FedAvg(), participation=1.0).step()
    assert (record["cohort"], record["skipped"]) == ([0], [1])
    sim = dataclasses.replace(problem, clients=[problem.clients[5], *[empty] * 50]).simulation(
        fk.methods.FedAvg(), participation=1, rounds=3
    )
    with caplog.at_level(logging.WARNING):
        sim.run()
    idle = [r for r in sim.history.records[1:] if not r["cohort"]]
    assert idle
    assert "nothing changes" in caplog.text


def test_only_visited_clients_have_state(problem: Problem) -> None:
    sim = problem.simulation(fk.methods.Scaffold(), participation=2)
    record = sim.step()
    assert sorted(sim.states) == record["cohort"]


def test_callbacks_see_every_round_and_may_stop_the_run(problem: Problem) -> None:
    seen = []

    def callback(simulation: fk.Simulation, record: dict) -> None:
        seen.append((record["round"], simulation.round))
        if record["round"] == 2:
            simulation.stop()

    sim = fk.Simulation(
        fk.methods.FedAvg(),
        problem.model,
        problem.data,
        problem.clients,
        fk.Settings(**problem.settings),
        [callback],
    )
    history = sim.run()
    assert seen == [(1, 1), (2, 2)]
    assert history.rounds.tolist() == [1, 2]
    assert history.params


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_divergence_names_the_round_the_client_and_what_grew(problem: Problem, engine: str) -> None:
    with pytest.raises(Diverged, match=r"round 1, client \d+: the loss went .* step \d+ of") as caught:
        problem.run(fk.methods.FedAvg(), engine=engine, lr=1e200, momentum=0.0)
    assert caught.value.round == 1
    assert caught.value.client in range(6)
    assert "weight" in str(caught.value)


def test_a_server_that_diverges_is_named(problem: Problem) -> None:
    class Bad(fk.methods.FedAvg):
        def aggregate(self, task, server, uploads, cohort):
            return {"params": tree.scale(server["params"], float("inf"))}

    with pytest.raises(Diverged, match="on the server: aggregation made params/"):
        problem.run(Bad())


def test_a_bad_upload_is_named(problem: Problem) -> None:
    class Bad(fk.methods.FedAvg):
        def finish(self, shared, params, local, client, facts, measured):
            return {"params": params, "n": facts["n"], "extra": facts["n"] / 0}, client

    with pytest.raises(Diverged, match="not finite in the upload: extra"):
        problem.run(Bad())


class Dropping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.Dropout(0.5))
        self.out = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(x))


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reader = torch.nn.LSTM(4, 8, batch_first=True)
        self.out = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.reader(x.flatten(1, 2))[0][:, -1])


@pytest.mark.parametrize(("model", "culprit"), [(Dropping(), "body.2 (Dropout)"), (Recurrent(), "reader (LSTM)")])
def test_a_model_that_cannot_be_stacked_takes_the_loop_and_says_why(
    problem: Problem, caplog: pytest.LogCaptureFixture, model: torch.nn.Module, culprit: str
) -> None:
    own = dataclasses.replace(problem, model=model)
    with caplog.at_level(logging.WARNING):
        auto = own.run(fk.methods.FedNTD(), engine="auto")
    assert auto.engine.name == "loop"
    assert culprit in caplog.text
    with pytest.raises(EngineError) as caught:
        own.simulation(fk.methods.FedNTD(), engine="stacked")
    assert culprit in str(caught.value)


def test_dropout_is_tied_to_the_clients_plan_and_global_state_is_left_alone(problem: Problem) -> None:
    own = dataclasses.replace(problem, model=Dropping())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = own.run(fk.methods.FedAvg(), engine="loop").params
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(99)
    assert same(first, own.run(fk.methods.FedAvg(), engine="loop").params)


def test_deterministic_mode_is_switched_back(problem: Problem) -> None:
    seen = []
    sim = problem.simulation(fk.methods.FedAvg(), deterministic=True, rounds=1)
    sim.callbacks = (lambda s, r: seen.append(torch.are_deterministic_algorithms_enabled()),)
    sim.run()
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_autocast_computes_in_bfloat16_and_keeps_the_weights(problem: Problem) -> None:
    plain = problem.run(fk.methods.FedAvg(), dtype=torch.float32)
    cast = problem.run(fk.methods.FedAvg(), dtype=torch.float32, autocast=torch.bfloat16)
    assert all(w.dtype == torch.float32 for w in tree.leaves(cast.params))
    assert 1e-6 < gap(plain.params, cast.params) < 0.3


class Tempered(torch.nn.Module):
    """A model with a weight that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4))
        self.temperature = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) / self.temperature


def test_a_weight_may_be_a_single_number(problem: Problem) -> None:
    own = dataclasses.replace(problem, model=Tempered())
    loop, stacked = (own.run(fk.methods.Scaffold(), engine=engine).params for engine in ("loop", "stacked"))
    assert gap(loop, stacked) < 1e-12
    assert float(loop["temperature"]) != 1.0


def test_ten_lines_from_python() -> None:
    data = fk.data.load("digits", public=0.1)
    clients = fk.data.partition.dirichlet(data.y_train, n_clients=20, alpha=0.1, seed=0)
    history = fk.simulate(
        fk.methods.FedNTD(beta=1.0, tau=1.0),
        "mlp",
        data,
        clients,
        rounds=3,
        participation=0.2,
        lr=0.05,
        batch_size=10,
    )
    assert history.settings["engine"] == "stacked"
    assert history.class_accuracy.shape == (3, 10)
    assert set(history.summary()) == {
        "final", "best", "smoothed", "forgetting", "round_forgetting", "bytes", "seconds",
    }  # fmt: skip
    frame = history.to_pandas()
    assert frame.index.tolist() == [1, 2, 3]
    assert frame["accuracy"].tolist() == pytest.approx(history.accuracy.tolist())


def test_augmentation_needs_images() -> None:
    flat = make_problem()
    data = fk.data.from_arrays(np.zeros((8, 16)), np.arange(8) % 4, np.zeros((8, 16)), np.arange(8) % 4)
    with pytest.raises(fk.errors.DataError, match="needs images"):
        dataclasses.replace(flat, data=data, clients=[np.arange(8)]).simulation(
            fk.methods.FedAvg(), participation=1, augment=fk.data.Augment(flip=True)
        )


def test_digits_fedntd_forgets_less_and_ends_higher_than_fedavg() -> None:
    """The claim the demonstration rests on, over its three seeds."""
    from fedkeep import demo

    rows = {name: [demo.one(name, seed).summary() for seed in range(3)] for name in ("fedavg", "fedntd")}
    mean = {name: {key: np.mean([r[key] for r in rs]) for key in rs[0]} for name, rs in rows.items()}
    assert mean["fedntd"]["final"] > mean["fedavg"]["final"]
    assert mean["fedntd"]["forgetting"] < mean["fedavg"]["forgetting"]
    assert mean["fedntd"]["round_forgetting"] < mean["fedavg"]["round_forgetting"]
