"""Simulations: cohorts, records, invalid arguments, and runs that diverge."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from support.errors import raises
from support.problems import Problem, gap, make_problem, same
from support.texts import make_text_data

import fedkeep as fk
from fedkeep import tree
from fedkeep.engine.device import numerics
from fedkeep.errors import DataError, Diverged, EngineError, FedkeepError, MethodError, ModelError, PartitionError
from fedkeep.runs.folder import RunFolder


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


def test_a_simulation_takes_data_sets_of_torch() -> None:
    x, y = torch.eye(3).repeat(8, 1), torch.arange(3).repeat(8)
    parts = (torch.utils.data.TensorDataset(x, y), torch.utils.data.TensorDataset(x[:6], y[:6]))
    simulation = fk.Simulation("fedavg", "mlp", parts, [range(12), range(12, 24)], fk.Settings(rounds=1, batch_size=4))
    assert simulation.data.n_classes == 3
    assert simulation.step()["round"] == 1


@pytest.mark.parametrize(("participation", "size"), [(0.5, 3), (1.0, 6), (1, 1), (6, 6), (0.01, 1), (0.25, 2)])
def test_participation_is_a_share_or_a_number(problem: Problem, participation: float, size: int) -> None:
    record = problem.simulation(fk.methods.FedAvg(), participation=participation).step()
    assert len(record["cohort"]) == size


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("participation", 7),  # there are 6 clients
        ("participation", 0),
        ("participation", 2.5),
        ("participation", True),
        ("rounds", 0),
        ("epochs", 1.5),
        ("batch_size", "4"),
        ("lr", -0.1),
        ("lr", float("nan")),
        ("lr", True),
        ("momentum", 1.0),
        ("momentum", "0.9"),
        ("weight_decay", -1.0),
        ("weight_decay", float("nan")),
        ("deterministic", "yes"),
        ("device", "gpu"),
        ("dtype", torch.int32),
        ("augment", True),
        ("clip_norm", 0.0),
        ("drop_last", 1),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_invalid_settings_raise_with_their_key(problem: Problem, key: str, value: object) -> None:
    with raises(FedkeepError, key=key):
        problem.simulation(fk.methods.FedAvg(), **{key: value})


@pytest.mark.parametrize(("padding", "most"), [("zeros", 4), ("reflect", 3)])
def test_the_padding_of_a_crop_is_at_most_the_image(problem: Problem, padding: str, most: int) -> None:
    """Images of 4 x 4 pixels; a reflection repeats no border pixel."""
    problem.simulation(fk.methods.FedAvg(), augment=fk.data.Augment(crop=most, padding=padding)).step()
    with raises(FedkeepError, key="augment.crop", value=most + 1):
        problem.simulation(fk.methods.FedAvg(), augment=fk.data.Augment(crop=most + 1, padding=padding))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_without_last_batches_only_full_ones_are_trained(problem: Problem, engine: str) -> None:
    """Batches of 4: the client with 3 examples trains on these, one with 11 takes 2 steps an epoch instead of 3."""
    sim = problem.simulation(fk.methods.FedAvg(), engine=engine, drop_last=True)
    sizes = {len(own): sim.job(k, 1).plan.size.tolist() for k, own in enumerate(problem.clients)}
    assert sizes[3] == [3, 3]
    assert sizes[11] == [4, 4, 4, 4]
    sim.run()
    assert gap(sim.params, problem.run(fk.methods.FedAvg(), engine=engine).params) > 1e-6


@pytest.mark.parametrize(
    ("key", "value", "suggestion"),
    [("autocast", "bf16", "bfloat16"), ("optimizer", "sdg", "sgd"), ("engine", "stackd", "stacked")],
)
def test_misspelt_choices_raise_with_a_suggestion(problem: Problem, key: str, value: str, suggestion: str) -> None:
    with raises(FedkeepError, key=key, value=value, valid=[suggestion], mentions=[suggestion]):
        problem.simulation(fk.methods.FedAvg(), **{key: value})


def test_numbers_from_numpy_are_numbers(problem: Problem) -> None:
    changes = {"seed": np.int64(5), "rounds": np.int32(3), "lr": np.float64(0.1), "participation": np.int64(4)}
    method = fk.methods.FedNTD(beta=np.float32(1.0))
    assert same(problem.run(fk.methods.FedNTD()).params, problem.run(method, **changes).params)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"data": (np.zeros(3), np.zeros(3))}, DataError),
        ({"clients": 5}, PartitionError),
        ({"clients": np.arange(10)}, PartitionError),
        ({"callbacks": [3]}, FedkeepError),
    ],
)
def test_wrong_argument_types_raise(problem: Problem, changes: dict, kind: type[FedkeepError]) -> None:
    arguments = {"data": problem.data, "clients": problem.clients, **changes}
    with raises(kind):
        fk.simulate("fedavg", problem.model, arguments.pop("data"), arguments.pop("clients"), **arguments)


def test_a_dict_of_clients_is_its_index_arrays(problem: Problem) -> None:
    named = dict(enumerate(problem.clients))
    plain = problem.run(fk.methods.FedAvg()).params
    assert same(plain, dataclasses.replace(problem, clients=named).run(fk.methods.FedAvg()).params)


def test_an_unknown_setting_raises_with_a_suggestion(problem: Problem) -> None:
    with raises(FedkeepError, key="batchsize", valid=["batch_size"], mentions=["batch_size"]):
        fk.simulate("fedavg", problem.model, problem.data, problem.clients, batchsize=3)


def test_the_learning_rate_decays_by_round(problem: Problem) -> None:
    records = problem.run(fk.methods.FedAvg(), lr=0.1, lr_decay=0.5).history.records[1:]
    assert [r["lr"] for r in records] == pytest.approx([0.1, 0.05, 0.025])


def test_a_cosine_schedule_is_torchs_after_a_linear_warm_up() -> None:
    settings = fk.Settings(rounds=12, lr=0.3, lr_schedule="cosine", lr_warmup=2)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    cosine, expected = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10), []
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cosine.step()
    assert [settings.lr_in(r) for r in range(1, 13)] == pytest.approx([0.1, 0.2, *expected], rel=1e-12)
    assert settings.lr_in(13) == settings.lr_in(12) > 0  # studies train after the last round
    assert fk.Settings(rounds=10**9, lr_schedule="cosine").lr_in(10**9) > 0
    assert settings.depends_on_rounds
    assert not fk.Settings(lr_warmup=3).depends_on_rounds


def test_a_scheduled_run_is_resumed_exactly(problem: Problem, tmp_path: Path) -> None:
    settings = {"rounds": 4, "lr_schedule": "cosine", "lr_warmup": 1, "optimizer": "adamw", "lr": 0.01}
    whole = problem.run(fk.methods.Scaffold(), **settings)
    assert [r["lr"] for r in whole.history.records[1:]] == pytest.approx([0.005, 0.01, 0.0075, 0.0025])
    stopped = problem.simulation(fk.methods.Scaffold(), **settings)
    stopped.callbacks = (lambda simulation, record: simulation.stop() if record["round"] == 2 else None,)
    with RunFolder.create(tmp_path / "run", {}) as folder:
        stopped.attach(folder).run()
    with RunFolder.open(tmp_path / "run") as folder:
        resumed = problem.simulation(fk.methods.Scaffold(), **settings).attach(folder)
        resumed.run()
    assert same(whole.server, resumed.server)


@pytest.mark.parametrize("method", [fk.methods.FedNTD(), fk.methods.FedRoD(personal_head=True)], ids=lambda m: m.name)
def test_both_engines_agree_with_adamw(problem: Problem, method: fk.methods.FedAvg) -> None:
    settings = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "participation": 1.0}
    loop, stacked = (problem.run(method, engine=engine, **settings) for engine in ("loop", "stacked"))
    assert gap(loop.server, stacked.server) < 1e-9
    decayed_less = problem.run(method, **{**settings, "weight_decay": 0.0})
    assert gap(loop.server, decayed_less.server) > 1e-4


def test_adam_does_not_decay_weights_by_default() -> None:
    """A decay of any size would shrink weights without another gradient by lr in every step."""
    assert [fk.Settings(optimizer=name).weight_decay for name in ("sgd", "adamw", "adam")] == [1e-5, 1e-5, 0.0]
    assert fk.Settings(optimizer="adam", weight_decay=1e-5).weight_decay == 1e-5
    assert repr(fk.Settings()) == "Settings()"
    assert repr(fk.Settings(optimizer="adam")) == "Settings(optimizer='adam')"
    assert repr(fk.Settings(optimizer="adam", weight_decay=1e-5)) == "Settings(weight_decay=1e-05, optimizer='adam')"
    assert inspect.signature(fk.simulate).parameters["weight_decay"].default == 1e-5
    data = make_text_data()
    model = fk.models.build("bag", data.input_shape, data.n_classes)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    lacks_most_words = [range(4)]
    settings = {"optimizer": "adam", "lr": 0.01, "rounds": 1, "batch_size": 2, "participation": 1.0}
    history = fk.simulate("fedavg", model, data, lacks_most_words, **settings)
    [name] = [name for name in start if "embed" in name]
    moved = (history.params[name] != start[name]).any(1)
    words = set(data.x_train[list(range(4))].pad()["input_ids"].flatten().tolist())
    assert set(torch.nonzero(moved).flatten().tolist()) <= words


def test_wrong_schedules_are_refused() -> None:
    with raises(FedkeepError, key="lr_schedule", valid=["cosine"], mentions=["did you mean cosine"]):
        fk.Settings(lr_schedule="cosin")
    with raises(FedkeepError, key="lr_warmup", value=3, mentions=["3 rounds"]):
        fk.Settings(rounds=3, lr_warmup=3)
    with raises(FedkeepError, key="lr_warmup", value=-1):
        fk.Settings(lr_warmup=-1)


def test_evaluation_is_as_often_as_asked_and_always_at_the_end(problem: Problem) -> None:
    history = problem.run(fk.methods.FedAvg(), rounds=5, eval_every=2, eval_local_every=4).history
    assert history.rounds.tolist() == [2, 4, 5]
    assert [r["round"] for r in history.records if "local" in r] == [4, 5]
    assert history.class_accuracy.shape == (3, 4)
    assert np.isnan(history.summary()["round_forgetting"])  # it needs every round
    assert history.local(4)["class_accuracy"].shape == (4, 4)
    with raises(FedkeepError, mentions=["eval_local_every"]):
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
        assert sum(record["local"]["hits"][place]) == int(hits.sum())
        assert record["local"]["total"] == torch.bincount(sim.y_test, minlength=4).tolist()


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
    assert sorted(sim.state.clients) == record["cohort"]


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
    with pytest.raises(Diverged) as caught:
        problem.run(fk.methods.FedAvg(), engine=engine, lr=3e38, momentum=0.0)
    assert caught.value.round == 1
    assert caught.value.client in range(6)
    assert re.search(r"step \d+ of \d+.*body\.1\.weight", caught.value.what)


def test_a_round_that_diverges_is_not_applied(problem: Problem) -> None:
    """Aggregation and test are started before the clients' numbers are checked; nothing of them may remain."""
    sim = problem.simulation(fk.methods.Scaffold(), rounds=3)
    sim.step()
    before, result = sim.server, sim.train_round()
    stored = {client: sim.state.clients.get(client) for client in result.plan.cohort}
    tree.leaves(result.clients["upload"])[0].fill_(torch.nan)
    with pytest.raises(Diverged):
        sim.apply(result)
    assert sim.server is before
    assert all(sim.state.clients.get(client) is state for client, state in stored.items())


def test_an_error_in_aggregation_is_not_blamed_if_the_clients_diverged(problem: Problem) -> None:
    class Strict(fk.methods.FedAvg):
        def aggregate(self, task, server, uploads, cohort):
            assert all(t.isfinite().all() for t in tree.leaves(uploads)), "not finite"
            return super().aggregate(task, server, uploads, cohort)

    with pytest.raises(Diverged):
        problem.run(Strict(), lr=3e38, momentum=0.0)


def test_a_server_that_diverges_is_named(problem: Problem) -> None:
    class Bad(fk.methods.FedAvg):
        def aggregate(self, task, server, uploads, cohort):
            return {"params": tree.scale(server["params"], float("inf"))}

    with pytest.raises(Diverged) as caught:
        problem.run(Bad())
    assert (caught.value.round, caught.value.client) == (1, None)
    assert "params/" in caught.value.what


def test_a_bad_upload_is_named(problem: Problem) -> None:
    class Bad(fk.methods.FedAvg):
        def finish(self, visit, params, measured):
            n = visit.facts["n"]
            return {"params": params, "n": n, "extra": n / 0}, visit.client

    with pytest.raises(Diverged) as caught:
        problem.run(Bad())
    assert caught.value.client in range(6)
    assert "extra" in caught.value.what


class Noise(torch.nn.Module):
    """A random layer that is not dropout: it skips an example's features altogether."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.bernoulli(torch.full((len(x), 1), 0.5, dtype=x.dtype)) if self.training else x


class Dropping(torch.nn.Module):
    def __init__(self, random: torch.nn.Module) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 8), random)
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


@pytest.mark.parametrize(
    ("model", "culprit"),
    [
        (Dropping(Noise()), "body.2 (Noise): it draws random numbers other than dropout's"),
        (Dropping(torch.nn.RReLU()), "body.2 (RReLU)"),
        (Recurrent(), "reader (LSTM)"),
    ],
)
def test_a_model_that_cannot_be_stacked_takes_the_loop_and_says_why(
    problem: Problem, caplog: pytest.LogCaptureFixture, model: torch.nn.Module, culprit: str
) -> None:
    own = dataclasses.replace(problem, model=model)
    with caplog.at_level(logging.WARNING):
        auto = own.run(fk.methods.FedNTD(), engine="auto")
    assert auto.engine.name == "loop"
    assert culprit in caplog.text
    with raises(EngineError, key="engine", mentions=[culprit]):
        own.simulation(fk.methods.FedNTD(), engine="stacked")


@pytest.mark.parametrize("random", [torch.nn.Dropout(0.5), Noise()], ids=["dropout", "noise"])
def test_random_layers_are_tied_to_the_clients_plan_and_global_state_is_left_alone(
    problem: Problem, random: torch.nn.Module
) -> None:
    own = dataclasses.replace(problem, model=Dropping(random))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = own.run(fk.methods.FedAvg(), engine="loop").params
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(99)
    assert same(first, own.run(fk.methods.FedAvg(), engine="loop").params)


def test_torchs_flags_are_set_for_a_round_and_switched_back(problem: Problem) -> None:
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Looking(fk.methods.FedAvg):
        def aggregate(self, task, server, uploads, cohort):
            seen.append(flags())
            return super().aggregate(task, server, uploads, cohort)

    def flags():
        deterministic = torch.are_deterministic_algorithms_enabled()
        return deterministic, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = flags()
    problem.run(Looking(), deterministic=True, rounds=1)
    problem.run(Looking(), tf32=False, rounds=1)
    assert seen == [(True, *before[1:]), (False, *before[1:])]  # TF32 is a GPU's
    assert flags() == before
    for tf32, expected in ((True, (False, "high", True)), (False, (False, "highest", False))):
        with numerics(fk.Settings(tf32=tf32), torch.device("cuda")):
            assert flags() == expected
    assert flags() == before


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


class Greedy(torch.nn.Module):
    """A model that writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x -= 0.5
        return self.out(x.flatten(1))


def test_a_model_that_writes_into_its_input_is_refused(problem: Problem) -> None:
    before = problem.data.x_test.clone()
    with raises(ModelError, key="model"):
        dataclasses.replace(problem, model=Greedy()).simulation(fk.methods.FedAvg())
    assert torch.equal(before, problem.data.x_test)


def test_a_callback_sees_the_model_of_its_round(problem: Problem) -> None:
    seen = []

    def look(simulation: fk.Simulation, record: dict) -> None:
        seen.append(tree.detach(dict(simulation.history.model.named_parameters())))

    fk.simulate("fedavg", problem.model, problem.data, problem.clients, **problem.settings, callbacks=look)
    start = {name: p.detach().double() for name, p in problem.model.named_parameters()}
    assert gap(start, seen[0]) > 1e-6
    assert gap(seen[0], seen[2]) > 1e-6
    with raises(ModelError, key="params"):
        problem.simulation(fk.methods.FedAvg()).task.module({})


def test_single_steps_are_recorded_like_a_run(problem: Problem) -> None:
    whole, stepped = problem.run(fk.methods.FedAvg()), problem.simulation(fk.methods.FedAvg())
    stepped.step()
    stepped.run()
    assert [r["round"] for r in stepped.history.records] == [0, 1, 2, 3]
    assert whole.history.summary()["bytes"] == stepped.history.summary()["bytes"]


def test_a_method_without_a_name_gets_its_class_name() -> None:
    class Nameless(fk.methods.FedAvg):
        pass

    assert Nameless.name == "nameless"


@pytest.mark.parametrize("returned", [None, {}, {"params": {"w": 1}}, {"params": {}, "n": 3}])
def test_a_wrong_result_of_aggregate_raises(problem: Problem, returned: object) -> None:
    class Bad(fk.methods.FedAvg):
        def aggregate(self, task, server, uploads, cohort):
            return returned

    with raises(MethodError, key="aggregate"):
        problem.run(Bad())


@pytest.mark.parametrize("at_once", [None, 1])
def test_the_next_round_is_planned_before_the_host_waits_for_this_one(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, at_once: int | None
) -> None:
    from fedkeep.engine import cohorts, round_trainer

    events: list[str] = []

    def noted(module: ModuleType, name: str) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: events.append(name) or original(*args))

    noted(cohorts, "sample_cohort")
    noted(round_trainer, "require_finite")
    problem.run(fk.methods.FedAvg(), rounds=3, participation=2, at_once=at_once)
    waits = ["require_finite"] * (2 if at_once else 1)
    assert events == ["sample_cohort", *["sample_cohort", *waits] * 2, *waits]


def test_evaluation_in_chunks_is_evaluation(problem: Problem) -> None:
    from fedkeep.engine.evaluate import evaluate
    from fedkeep.engine.mapping import map_clients

    sim = problem.simulation(fk.methods.FedAvg())
    args = (sim.x_test, sim.y_test, sim.local.inputs)
    whole, loss = evaluate(sim.task, sim.params, *args)
    parts, same_loss = evaluate(sim.task, sim.params, *args, chunk=3)
    assert torch.equal(whole, parts)
    assert float(loss) == pytest.approx(float(same_loss), rel=1e-12)
    both, _ = evaluate(sim.task, tree.stack([sim.params, sim.params]), *args, each=map_clients, chunk=4)
    assert torch.equal(both, torch.stack([whole, whole]))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_annotation_in_chunks_is_annotation(problem: Problem, engine: str) -> None:
    whole = problem.run(fk.methods.FedNTD(), engine=engine).params
    sim = problem.simulation(fk.methods.FedNTD(), engine=engine)
    sim.engine.local = dataclasses.replace(sim.local, chunk=3)
    sim.run()
    assert gap(whole, sim.params) < 1e-12


def test_annotation_on_a_gpu_is_bounded_by_bytes(problem: Problem) -> None:
    local = problem.simulation(fk.methods.FedNTD(), dtype="float32").local
    small, large = torch.zeros(5, 3, 32, 32, dtype=torch.uint8), torch.zeros(5, 3, 224, 224, dtype=torch.uint8)
    assert [local.hooks.annotation_batch_size(x, torch.device("cpu")) for x in (small, large)] == [1024, 1024]
    assert [local.hooks.annotation_batch_size(x, torch.device("cuda")) for x in (small, large)] == [8192, 222]


@pytest.mark.parametrize("limit", [0.05, 1e6])
def test_clipping_equals_torch(problem: Problem, limit: float) -> None:
    """One step, clipped hard and not at all, against `clip_grad_norm_` and plain SGD."""
    import copy

    sim = problem.simulation(fk.methods.FedAvg(), clip_norm=limit, momentum=0.0, weight_decay=0.0)
    batch = {"x": sim.x[:4], "y": sim.y[:4], "mask": torch.ones(4, dtype=torch.bool)}
    params = tree.map(torch.clone, sim.params)
    sim.local.step(params, {}, batch, {"params": sim.params}, {}, {}, 0.1)
    model = copy.deepcopy(problem.model).double()
    torch.nn.functional.cross_entropy(model(sim.x[:4]), sim.y[:4]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    expected = {name: (p - 0.1 * p.grad).detach() for name, p in model.named_parameters()}
    assert gap(expected, params) < 1e-12


def test_it_runs_inside_no_grad(problem: Problem) -> None:
    outside = problem.run(fk.methods.FedNTD(), engine="stacked").params
    with torch.no_grad():
        assert same(outside, problem.run(fk.methods.FedNTD(), engine="stacked").params)


def test_features_and_head_are_believed_only_if_they_make_the_model(problem: Problem) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = torch.nn.Linear(16, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x.flatten(1))

        def head(self, h: torch.Tensor) -> torch.Tensor:
            return self.c(h)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.b(self.features(x))).tanh()

    sim = dataclasses.replace(problem, model=Odd()).simulation(fk.methods.FedAvg())
    with raises(ModelError, key="model.features"):
        sim.task.outputs(sim.params, sim.x[:2])


def test_divergence_keeps_what_was_measured(problem: Problem) -> None:
    def grow(simulation: fk.Simulation, record: dict) -> None:
        simulation.state.server = {"params": tree.scale(simulation.params, 1e200)}

    with pytest.raises(Diverged) as caught:
        fk.simulate("fedavg", problem.model, problem.data, problem.clients, **problem.settings, callbacks=[grow])
    assert caught.value.history.rounds.tolist() == [1]


def test_two_classes_are_too_few_for_fedntd() -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 2
    data = fk.data.from_arrays(x, y, x, y)
    with raises(MethodError, key="n_classes", value=2):
        fk.simulate("fedntd", "mlp", data, [np.arange(20)], participation=1)


def test_a_criterion_of_ones_own(problem: Problem) -> None:
    def smoothed(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(z, y, reduction="none", label_smoothing=0.2)

    args = (problem.model, problem.data, problem.clients)
    plain = fk.simulate("fedavg", *args, **problem.settings)
    own = fk.simulate("fedavg", *args, **problem.settings, criterion=smoothed)
    assert gap(plain.params, own.params) > 1e-6


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
        "balanced_accuracy", "macro_precision", "macro_f1", "auc", "ece",
    }  # fmt: skip
    frame = history.to_pandas()
    assert frame.index.tolist() == [1, 2, 3]
    assert frame["accuracy"].tolist() == pytest.approx(history.accuracy.tolist())


def test_augmentation_needs_images() -> None:
    flat = make_problem()
    data = fk.data.from_arrays(np.zeros((8, 16)), np.arange(8) % 4, np.zeros((8, 16)), np.arange(8) % 4)
    with raises(DataError, key="augment"):
        dataclasses.replace(flat, data=data, clients=[np.arange(8)]).simulation(
            fk.methods.FedAvg(), participation=1, augment=fk.data.Augment(flip=True)
        )


def test_digits_fedntd_forgets_less_and_ends_higher_than_fedavg() -> None:
    """The claim the demonstration rests on, over its three seeds."""
    from fedkeep.engine.simulate import make_simulation
    from fedkeep.experiments import demo
    from fedkeep.experiments.build import build

    rows = {
        name: [make_simulation(build(demo.experiment(name, seed))).run().summary() for seed in range(3)]
        for name in ("fedavg", "fedntd")
    }
    mean = {name: {key: np.mean([r[key] for r in rs]) for key in rs[0]} for name, rs in rows.items()}
    assert mean["fedntd"]["final"] > mean["fedavg"]["final"]
    assert mean["fedntd"]["forgetting"] < mean["fedavg"]["forgetting"]
    assert mean["fedntd"]["round_forgetting"] < mean["fedavg"]["round_forgetting"]


@pytest.mark.parametrize("name", ["fedntd", "scaffold"])
def test_a_cohort_that_does_not_fit_into_memory_is_trained_in_parts(
    problem: Problem, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def small(sim: fk.Simulation) -> fk.Simulation:
        train = sim.engine.train

        def tight(shared, jobs, lr):
            if len(jobs) > 2:
                raise torch.OutOfMemoryError("no room")
            return train(shared, jobs, lr)

        sim.engine.train = tight
        sim.trainer._choose = lambda name: sim.engine
        return sim

    method = fk.methods.get(name)()
    whole = problem.run(method, engine="stacked", participation=1.0)
    parts = small(problem.simulation(method, engine="stacked", participation=1.0))
    parts.run()
    assert gap(whole.server, parts.server) < 1e-12
    halved = [record.args for record in caplog.records if record.name == "fedkeep"]
    assert halved == [(6, 3), (3, 1)], "clients at a time, and from then on"


def test_settings_as_keyword_arguments_are_the_settings() -> None:
    """Editors and type checkers see `SettingsDict`; it must list every setting."""
    from fedkeep.engine.settings import SettingsDict

    assert list(SettingsDict.__annotations__) == [f.name for f in dataclasses.fields(fk.Settings)]


def test_a_device_without_numbers_is_refused(problem: Problem) -> None:
    with raises(FedkeepError, key="device", value="meta", valid=["cpu"]):
        problem.run(fk.methods.FedAvg(), device="meta")
