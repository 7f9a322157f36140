"""What a user's own Flower app forgets: strategies of Flower and of users, observed without changing anything."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.errors import raises
from torch import nn

import fedkeep as fk

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server import strategy as older
from flwr.serverapp import ServerApp, strategy
from support.flower_grid import MemoryGrid, SuperNode

from fedkeep.analysis.run_set import read_runs
from fedkeep.errors import ConfigError, DataError, FedkeepError, ModelError, RunError
from fedkeep.flower import Strategy, forgetting
from fedkeep.flower.class_test import ModelTest
from fedkeep.flower.strategy_api import MessageApi
from fedkeep.instruments.next_round import open_run
from fedkeep.reports.data import page_data
from fedkeep.runs.folder import RunFolder

NODES, ROUNDS = 6, 3
Y = torch.arange(90) % 3
X = torch.randn(90, 4, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(4)[Y]
TEST = (X[60:], Y[60:])


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))


def train(state: dict[str, torch.Tensor], node: int, lr: float) -> tuple[dict[str, torch.Tensor], dict]:
    """Train on the node's two classes."""
    model = Net()
    model.load_state_dict(state)
    mine = torch.arange(60)[(torch.arange(60) // 10 == node) & (Y[:60] != node % 3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(X[mine]), Y[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    counts = torch.bincount(Y[mine], minlength=3).tolist()
    return model.state_dict(), {"train_loss": loss.item(), "num-examples": len(mine), "label-counts": counts}


app = ClientApp()


@app.train()
def train_message(message: Message, context: Context) -> Message:
    state = message.content["arrays"].to_torch_state_dict()
    state, metrics = train(state, context.node_config["partition-id"], message.content["config"]["lr"])
    content = RecordDict({"arrays": ArrayRecord(state), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate_message(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"seen": float(message.content["arrays"]["0.bias"].numpy()[0]), "num-examples": 1})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)


def grid() -> MemoryGrid:
    return MemoryGrid([SuperNode(app, {"partition-id": k}) for k in range(NODES)])


def seed_all() -> None:
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002 (as apps do)
    torch.manual_seed(3)


class Drawing(Net):
    """A model that draws random numbers where it is tested."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _ = random.random(), np.random.random(), torch.rand(1)  # noqa: NPY002
        return super().forward(x)


torch.manual_seed(0)
STATE = Net().state_dict()


def initial() -> ArrayRecord:
    return ArrayRecord(STATE)


def start(one, nodes: MemoryGrid | None = None, rounds: int = ROUNDS, arrays: ArrayRecord | None = None, **options):
    config = ConfigRecord({"lr": 0.1})
    return one.start(nodes or grid(), arrays or initial(), num_rounds=rounds, train_config=config, **options)


def same_arrays(one: ArrayRecord, other: ArrayRecord) -> bool:
    return list(one) == list(other) and all(one[name].data == other[name].data for name in one)


def confusion_of(arrays: ArrayRecord) -> list[list[int]]:
    """The same as the test under test, written down plainly."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    model.eval()
    table = np.zeros((3, 3), int)
    for true, predicted in zip(TEST[1], model(TEST[0]).argmax(1), strict=True):
        table[true, predicted] += 1
    return table.tolist()


def private(**options):
    return strategy.DifferentialPrivacyServerSideFixedClipping(
        strategy.FedAvg(**options), noise_multiplier=0.1, clipping_norm=1.0, num_sampled_clients=4
    )


STRATEGIES = {
    "FedAvg": strategy.FedAvg, "FedProx": strategy.FedProx, "FedAdam": strategy.FedAdam, "FedYogi": strategy.FedYogi,
    "FedAvgM": lambda **o: strategy.FedAvgM(server_momentum=0.5, **o), "FedMedian": strategy.FedMedian,
    "FedTrimmedAvg": strategy.FedTrimmedAvg, "Krum": strategy.Krum, "MultiKrum": strategy.MultiKrum,
    "DifferentialPrivacyServerSideFixedClipping": private,
}  # fmt: skip


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_computes_the_same_and_its_run_can_be_reported(tmp_path: Path, name: str) -> None:
    options = {"fraction_train": 0.7}  # 4 of 6 nodes, drawn by Python's random numbers
    seed_all()
    plain = start(STRATEGIES[name](**options))
    after_plain = random.random(), np.random.random(), torch.rand(1).item()  # noqa: NPY002
    given = STRATEGIES[name](**options)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*TEST), batch_size=8, shuffle=True)
    seed_all()
    observed = forgetting(given, Drawing, loader, run_dir=tmp_path / "run", local_every=1)
    assert observed is given
    result = start(observed)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == after_plain  # noqa: NPY002
    assert same_arrays(result.arrays, plain.arrays)
    assert str(result.train_metrics_clientapp) == str(plain.train_metrics_clientapp)
    assert str(result.evaluate_metrics_clientapp) == str(plain.evaluate_metrics_clientapp)
    history = fk.load_run(tmp_path / "run")
    assert history.verified
    assert history.ended == "finished"
    assert history.records[-1]["confusion"] == confusion_of(result.arrays)
    assert fk.tree.spec(history.params) == fk.tree.spec(dict(result.arrays.to_torch_state_dict()))
    [group] = read_runs([tmp_path / "run"]).groups
    assert group.label == name
    assert group.loss_by_phase is not None


def test_records_say_who_took_part_what_was_sent_and_where_accuracy_was_lost(tmp_path: Path) -> None:
    nodes = grid()
    nodes.node_of(2).fault = lambda message, work: None  # it never replies
    result = start(forgetting(strategy.FedAvg(), Net(), TEST, run_dir=tmp_path, local_every=2), nodes)
    history = fk.load_run(tmp_path)
    untrained, first, second, third = history.records
    assert untrained["confusion"] == confusion_of(initial())
    assert first["cohort"] == [0, 1, 3, 4, 5]
    assert first["nodes"] == {str(k): str(node) for k, node in enumerate(sorted(nodes.nodes))}
    assert "nodes" not in second, "only in the round in which a node is new"
    assert list(second["failed"]) == ["2"]
    size = sum(len(array.data) for array in initial().values())
    assert (first["bytes_down"], first["bytes_up"]) == (6 * size, 5 * size)
    assert first["train_loss"] == pytest.approx(result.train_metrics_clientapp[1]["train_loss"])
    assert first["train_metrics"]["train_loss"] == result.train_metrics_clientapp[1]["train_loss"]
    assert first["client_metrics"]["0"]["num-examples"] > 0
    assert third["test_loss"] > 0
    assert history.anatomy_rounds == [2, 3], "every second round, and the last"
    local = history.local(2)
    assert local["class_accuracy"].shape == local["label_counts"].shape == (5, 3)
    assert (local["label_counts"] == 0).any(1).all(), "every client has two classes of three"
    setting = read_runs([tmp_path]).groups[0].setting
    assert setting["method"] == {"name": "FedAvg"}, "defaults are no news"
    assert setting["train"] == {"rounds": 3, "eval_every": 1, "eval_local_every": 2, "config": {"lr": 0.1}}
    assert history.about["made_by"]["strategy"]["fraction_train"] == 1.0


class Saving(strategy.FedAvg):
    """As users write them: a `start` of their own around Flower's."""

    def __init__(self, power: float) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.power, self.api_key, self.seen = power, "secret", []

    def start(self, grid, initial_arrays, **options):
        return super().start(grid, initial_arrays, evaluate_fn=self.look, **options)

    def look(self, number: int, arrays: ArrayRecord) -> MetricRecord:
        self.seen.append(number)
        return MetricRecord({"right": int(np.trace(confusion_of(arrays)))})


def test_a_strategy_of_the_users_own_that_evaluates_itself(tmp_path: Path) -> None:
    result = start(forgetting(one := Saving(0.5), Net, TEST, run_dir=tmp_path))
    history = fk.load_run(tmp_path)
    assert one.seen == [0, 1, 2, 3]
    right = [int(np.trace(record["confusion"])) for record in history.records]
    assert right == [result.evaluate_metrics_serverapp[number]["right"] for number in range(4)]
    assert history.about["method"] == {
        "fraction_evaluate": 0.0,
        "min_evaluate_nodes": 0,
        "name": "Saving",
        "power": 0.5,
    }
    assert "secret" not in (tmp_path / "experiment.toml").read_text()
    assert history.about["made_by"]["algorithm"]


def test_an_app_with_a_loop_of_its_own_says_how_many_rounds_it_has(tmp_path: Path) -> None:
    observed = forgetting(strategy.FedAvg(), Net, TEST, run_dir=tmp_path, num_rounds=2)
    nodes, arrays = grid(), initial()
    for number in (1, 2):
        messages = observed.configure_train(number, arrays, ConfigRecord({"lr": 0.1}), nodes)
        averaged, _ = observed.aggregate_train(number, iter(nodes.send_and_receive(messages)))
        arrays = ArrayRecord({name: averaged[name] for name in averaged})
    history = fk.load_run(tmp_path)
    assert history.ended == "finished"
    assert history.records[2]["confusion"] == confusion_of(arrays)


class OldClient(NumPyClient):
    def __init__(self, node: int) -> None:
        self.node = node

    def fit(self, parameters, config):
        names = Net().state_dict()
        state = {name: torch.tensor(array) for name, array in zip(names, parameters, strict=True)}
        state, metrics = train(state, self.node, 0.1)
        return [value.numpy() for value in state.values()], metrics["num-examples"], {"loss": metrics["train_loss"]}


def test_strategies_of_the_older_interface(tmp_path: Path) -> None:
    def run(wrap):
        def server_fn(context: Context) -> ServerAppComponents:
            parameters = ndarrays_to_parameters([array.numpy() for array in initial().values()])
            one = older.FedAvg(  # one client a round: several train in threads, in any order
                fraction_fit=0.5,
                min_fit_clients=1,
                fraction_evaluate=0.0,
                initial_parameters=parameters,
                evaluate_fn=lambda *given: seen.append(given),
            )
            return ServerAppComponents(strategy=wrap(one), config=ServerConfig(num_rounds=2))

        seen: list = []
        client = ClientApp(client_fn=lambda context: OldClient(context.node_config["partition-id"]).to_client())
        nodes = MemoryGrid([SuperNode(client, {"partition-id": k}) for k in range(2)])
        nodes.set_run(SimpleNamespace(run_id=1))
        seed_all()
        ServerApp(server_fn=server_fn)(nodes, Context(1, 1, {}, RecordDict(), {}))
        return seen

    plain = run(lambda one: one)
    options = {"run_dir": tmp_path, "num_rounds": 2, "local_every": 1}
    observed = run(lambda one: forgetting(one, Net, TEST, **options))
    for (number, arrays, _), (same_number, same, _) in zip(plain, observed, strict=True):
        assert number == same_number
        assert all(np.array_equal(a, b) for a, b in zip(arrays, same, strict=True))
    history = fk.load_run(tmp_path)
    assert history.ended == "finished"
    assert [len(record["cohort"]) for record in history.records[1:]] == [1, 1]
    assert history.records[2]["bytes_up"] == history.records[2]["bytes_down"] > 0
    assert history.records[2]["train_loss"] > 0
    assert history.anatomy_rounds == [1, 2]
    named = dict(zip(Net().state_dict(), observed[-1][1], strict=True))
    assert history.records[2]["confusion"] == confusion_of(ArrayRecord({k: torch.tensor(v) for k, v in named.items()}))
    with raises(ConfigError, key="num_rounds"):
        forgetting(older.FedAvg(), Net, TEST, run_dir=tmp_path / "other")


def test_a_function_of_the_users_own_tests_the_model(tmp_path: Path) -> None:
    results = [None, (np.eye(3), float("nan")), (torch.eye(3), 0.5), np.eye(3, dtype=int)]  # before and after 3 rounds
    start(forgetting(strategy.FedAvg(), confusion=lambda arrays: results.pop(0), run_dir=tmp_path))
    history = fk.load_run(tmp_path)
    assert history.rounds.tolist() == [1, 2, 3]
    assert (history.confusion == np.eye(3)).all()
    assert [record.get("test_loss") for record in history.records] == [None, None, 0.5, None]
    verdict = page_data(read_runs([tmp_path]))["verdict"]
    assert any("local_every=1 of fedkeep.flower.forgetting" in line for line in verdict["details"])


@pytest.mark.parametrize(
    ("change", "error", "key"),
    [
        ({"strategy": "FedAvg"}, ConfigError, "strategy"),
        ({"strategy": strategy.FedAvg}, ConfigError, "strategy"),
        ({"model": None}, ConfigError, "model"),
        ({"test_data": None}, ConfigError, "test_data"),
        ({"confusion": confusion_of}, ConfigError, "confusion"),
        ({"model": lambda: "net"}, ModelError, "model"),
        ({"model": nn.Linear(5, 3)}, ModelError, "model"),
        ({"model": nn.Flatten(0)}, ModelError, "model"),
        ({"model": nn.Linear(4, 2)}, DataError, "test_data"),
        ({"test_data": fk.data.from_arrays(*TEST, *TEST, n_classes=4)}, DataError, "test_data"),
        ({"test_data": 5}, DataError, "test_data"),
        ({"test_data": (X, Y[:5])}, DataError, "x_test"),
        ({"num_rounds": 0}, ConfigError, "num_rounds"),
        ({"every": 0}, ConfigError, "every"),
        ({"label": ""}, ConfigError, "label"),
        ({"device": "nowhere"}, FedkeepError, "device"),
    ],
)
def test_wrong_arguments_are_named_at_once(tmp_path: Path, change: dict, error: type, key: str) -> None:
    arguments = {"strategy": strategy.FedAvg(), "model": Net, "test_data": TEST, "run_dir": tmp_path / "run", **change}
    with raises(error, key=key):
        forgetting(**arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "key", "value"),
    [
        ({"model": nn.Sequential(nn.Linear(4, 3)), "test_data": TEST}, ModelError, "model", "1.bias"),
        (
            {"model": nn.Sequential(*list(Net())[:3], nn.Linear(5, 4)), "test_data": TEST},
            ModelError,
            "model",
            "3.weight",
        ),
        ({"confusion": lambda arrays: [1, 2]}, FedkeepError, "confusion", (2,)),
        ({"confusion": lambda arrays: [[0.5]]}, FedkeepError, "confusion", None),
        ({"confusion": lambda arrays: 1 / 0}, FedkeepError, "test_data", "ZeroDivisionError"),
    ],
)
def test_what_does_not_fit_the_app_is_named_before_the_first_round(
    tmp_path: Path, arguments: dict, error: type, key: str, value: object
) -> None:
    nodes = grid()
    with raises(error, key=key, value=value):
        start(forgetting(strategy.FedAvg(), **arguments, run_dir=tmp_path / "run"), nodes)
    assert not any(node.received for node in nodes.nodes.values())
    assert not (tmp_path / "run").exists()


def test_strategies_that_cannot_be_observed_are_refused(tmp_path: Path) -> None:
    observed = forgetting(strategy.FedAvg(), Net, TEST, run_dir=tmp_path / "run")
    with raises(ConfigError, key="strategy"):
        forgetting(observed, Net, TEST, run_dir=tmp_path / "again")
    with raises(ConfigError, key="strategy"):
        own = Strategy("fedavg", lambda: nn.Linear(4, 3), num_clients=2, n_classes=3)
        forgetting(own, Net, TEST, run_dir=tmp_path / "own")
    inside = strategy.DifferentialPrivacyServerSideFixedClipping(observed, 0.1, 1.0, NODES)
    with raises(ConfigError, key="num_rounds"):
        start(inside)


def test_a_failing_test_does_not_end_the_federation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def sometimes(arrays: ArrayRecord):
        calls.append(len(calls))
        if len(calls) in (2, 3):
            raise RuntimeError("out of memory")
        return confusion_of(arrays)

    seed_all()
    result = start(forgetting(strategy.FedAvg(), confusion=sometimes, run_dir=tmp_path))
    seed_all()
    assert same_arrays(result.arrays, start(strategy.FedAvg()).arrays)
    assert ["confusion" in record for record in fk.load_run(tmp_path).records] == [True, False, False, True]
    assert sum("out of memory" in record.message for record in caplog.records) == 1, "it is logged once"


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    test = ModelTest(Net, TEST)
    assert test.run(STATE)["test_loss"] > 0
    record = test.run({**STATE, "3.bias": torch.tensor([float("inf"), 0.0, 0.0])})
    assert "test_loss" not in record
    assert "confusion" in record
    json.dumps(record, allow_nan=False)


def test_replies_that_cannot_be_read_do_not_end_the_federation(tmp_path: Path, monkeypatch, caplog) -> None:
    observed = forgetting(strategy.FedAvg(), Net, TEST, run_dir=tmp_path, local_every=1)
    monkeypatch.setattr(MessageApi, "replies", lambda *given: 1 / 0)
    seed_all()
    result = start(observed)
    seed_all()
    assert same_arrays(result.arrays, start(strategy.FedAvg()).arrays)
    history = fk.load_run(tmp_path)
    assert [record.get("cohort") for record in history.records] == [None, [], [], []]
    assert history.records[3]["confusion"] == confusion_of(result.arrays)
    assert sum("ZeroDivisionError" in record.message for record in caplog.records) == 1


def test_a_full_disk_does_not_end_the_federation(tmp_path: Path, monkeypatch, caplog) -> None:
    append = RunFolder.append

    def full(self: RunFolder, record: dict) -> None:
        if record["round"] == 2:
            raise RunError("no space left on device", key="rounds.jsonl")
        append(self, record)

    monkeypatch.setattr(RunFolder, "append", full)
    seed_all()
    result = start(forgetting(strategy.FedAvg(), Net, TEST, run_dir=tmp_path))
    seed_all()
    assert same_arrays(result.arrays, start(strategy.FedAvg()).arrays)
    assert [record["round"] for record in fk.load_run(tmp_path).records] == [0, 1]
    assert "no space left" in caplog.text


class Killed(BaseException):
    """Ends a server in the middle of a round."""


def interrupted(path: Path) -> None:
    nodes = grid()

    def killed(message: Message, work):
        if message.content["config"]["server-round"] == 3:
            raise Killed
        return work()

    nodes.node_of(0).fault = killed
    with pytest.raises(Killed):
        start(forgetting(strategy.FedAvg(), Net, TEST, run_dir=path), nodes)


def test_a_restarted_server_continues_from_its_saved_weights_or_is_refused(tmp_path: Path) -> None:
    interrupted(tmp_path)
    with raises(RunError, key="run_dir", value=str(tmp_path), mentions=["resume=True"]):
        forgetting(strategy.FedAvg(), Net, TEST, run_dir=tmp_path)
    before = (tmp_path / "rounds.jsonl").read_bytes()
    with raises(RunError, key="initial_arrays", value=2, mentions=[str(tmp_path)]):
        start(forgetting(strategy.FedAvg(), Net, TEST, run_dir=tmp_path, resume=True))
    saved = ArrayRecord(fk.load_run(tmp_path).params)
    for other, key in (
        ({"strategy": strategy.FedAvg(fraction_train=0.5)}, "method"),
        ({"test_data": (X, Y)}, "made_by.test"),
    ):
        arguments = {"strategy": strategy.FedAvg(), "test_data": TEST, **other}
        with raises(RunError, key=key):
            start(forgetting(**arguments, model=Net, run_dir=tmp_path, resume=True), arrays=saved)
    assert (tmp_path / "rounds.jsonl").read_bytes() == before, "what is refused changes nothing"
    again = forgetting(strategy.FedAvg(), Net, TEST, run_dir=tmp_path, resume=True)
    start(again, rounds=1, arrays=saved)
    history = fk.load_run(tmp_path)
    assert history.verified
    assert [record["round"] for record in history.records] == [0, 1, 2, 3]
    assert history.records[3]["resumed"]
    assert history.records[3]["cohort"] == list(range(NODES))
    assert "nodes" not in history.records[3], "the same nodes are the same clients"
    with raises(RunError, key="run_dir"):
        forgetting(strategy.FedAvg(), Net, TEST, run_dir=tmp_path, resume=True)


def test_nothing_can_be_trained_from_the_record_alone(tmp_path: Path) -> None:
    interrupted(tmp_path)
    with raises(ConfigError, key="run_dir", value=str(tmp_path)):
        fk.resume(tmp_path)
    with raises(ConfigError, key="run_dir", value=str(tmp_path)):
        open_run(tmp_path)
    with raises(RunError, key="engine", value="flower-app"):
        Strategy("fedavg", lambda: nn.Linear(4, 3), num_clients=2, n_classes=3, run_dir=tmp_path)


def test_without_saved_models_rounds_are_recorded_all_the_same(tmp_path: Path) -> None:
    start(forgetting(strategy.FedAvg(), Net, TEST, run_dir=tmp_path, keep=0, every=2, label="mine"))
    history = fk.load_run(tmp_path, weights=False)
    assert not list(tmp_path.glob("*.safetensors"))
    assert history.rounds.tolist() == [2, 3]
    assert history.ended == "finished"
    assert read_runs([tmp_path]).groups[0].label == "mine"
