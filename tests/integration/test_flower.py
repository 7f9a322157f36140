"""Methods on Flower: the real apps and messages in one process, bit for bit equal to the loop."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from support.errors import raises
from support.methods import quick
from support.problems import Problem, gap, same

import fedkeep as fk

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.app import ConfigRecord, Context, RecordDict
from support.flower_grid import MemoryGrid, grid_of, node, strategy_of

from fedkeep.errors import ConfigError, RunError
from fedkeep.flower import server_app
from fedkeep.runs.experiment_file import read_experiment, write_experiment


@pytest.mark.parametrize("name", fk.methods.REGISTRY)
def test_federation_equals_loop_bit_for_bit(three: Problem, name: str) -> None:
    method = quick(name)
    alone = three.run(method)
    strategy = strategy_of(three, method)
    strategy.start(grid_of(three, method))
    assert same(alone.server, strategy.federation.state.server)
    for mine, theirs in zip(alone.history.records, strategy.federation.state.history.records, strict=True):
        assert mine.keys() == theirs.keys()
        assert theirs.get("train_loss", 0) == pytest.approx(mine.get("train_loss", 0), rel=1e-12)
        assert all(theirs[key] == mine[key] for key in mine.keys() - {"seconds", "train_loss"})


def test_sampling_dropout_and_augmentation_equal_the_simulation(three: Problem) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4))
    problem = dataclasses.replace(
        three,
        model=model,
        settings={**three.settings, "participation": 2, "augment": fk.data.Augment(crop=1, flip=True), "rounds": 4},
    )
    alone = problem.run(fk.methods.FedNTD())
    strategy = strategy_of(problem, fk.methods.FedNTD())
    strategy.start(grid_of(problem, fk.methods.FedNTD()))
    assert same(alone.server, strategy.federation.state.server)
    assert [r.get("cohort") for r in alone.history.records] == [
        r.get("cohort") for r in strategy.federation.state.history.records
    ]


@pytest.mark.parametrize("name", ["fedavg", "fednova", "scaffold", "fedcurv"])
def test_dropped_batches_and_reflected_images_equal_the_simulation(three: Problem, name: str) -> None:
    """The server also knows how many steps a client takes: no update is rejected."""
    augment = fk.data.Augment(crop=2, flip=True, padding="reflect")
    problem = dataclasses.replace(three, settings={**three.settings, "augment": augment, "drop_last": True})
    method = fk.methods.get(name)()
    alone = problem.run(method)
    strategy = strategy_of(problem, method)
    strategy.start(grid_of(problem, method))
    assert same(alone.server, strategy.federation.state.server)
    for changes in ({"drop_last": False}, {"augment": dataclasses.replace(augment, padding="zeros")}):
        assert gap(alone.params, problem.run(method, **changes).params) > 1e-6


def test_batch_norm_and_a_split_from_a_file_equal_the_simulation(three: Problem, tmp_path: Path) -> None:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(8, track_running_stats=False)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(16, 8), norm, torch.nn.ReLU(), torch.nn.Linear(8, 4)
    )
    fk.save_federation(tmp_path / "split.json", three.clients, y=three.data.y_train)
    clients = list(fk.data.partition.from_file(three.data.y_train, tmp_path / "split.json"))
    problem = dataclasses.replace(three, model=model, clients=clients)
    alone = problem.run(fk.methods.FedNTD())
    strategy = strategy_of(problem, fk.methods.FedNTD())
    strategy.start(grid_of(problem, fk.methods.FedNTD()))
    assert same(alone.server, strategy.federation.state.server)
    records = alone.history.records, strategy.federation.state.history.records
    for key in ("confusion", "auc", "ece"):
        assert [r[key] for r in records[0]] == [r[key] for r in records[1]]


def test_wire_format_is_that_of_protocol_version_1(three: Problem) -> None:
    """Nodes and servers of different releases understand each other as long as these names and types stay."""
    method = fk.methods.get("scaffold")()
    grid = grid_of(three, method)
    replies = []

    def keep(message, work):
        replies.append(work())
        return replies[-1]

    grid.node_of(1).fault = keep
    strategy_of(three, method, rounds=2).start(grid)
    query, first, second = grid.node_of(1).received
    assert query.metadata.message_type == "query.fedkeep"
    config = dict(second.content["fedkeep"])
    assert {key: type(value) for key, value in config.items()} == {
        "version": int, "run": str, "round": int, "client": int, "state": int, "lr": float, "n-clients": int,
        "n-classes": int, "constants": str, "method": str, "settings": str,
    }  # fmt: skip
    assert (config["version"], config["round"], config["client"], config["state"]) == (1, 2, 1, 1)
    assert first.content["fedkeep"]["state"] == 0
    assert json.loads(config["method"])["name"] == "scaffold"
    assert json.loads(config["settings"]).keys() == {
        "epochs", "batch_size", "momentum", "weight_decay", "optimizer", "clip_norm", "augment", "seed", "dtype",
        "autocast", "tf32", "deterministic", "threads",
    }  # fmt: skip
    assert set(second.content.array_records) == {"params", "c"}
    reply = replies[-1].content
    assert {key: type(value) for key, value in reply["fedkeep"].items()} == {
        "round": int, "client": int, "fresh": bool, "loss": float, "leaves": bytes,
    }  # fmt: skip
    assert set(reply.array_records) == {"params", "dc"}


# State on the nodes


@pytest.mark.parametrize("storage", ["context", "folder"])
def test_client_state_survives_a_killed_server(three: Problem, tmp_path: Path, storage: str) -> None:
    method = fk.methods.get("scaffold")()
    config = {"state-dir": str(tmp_path / "nodes")} if storage == "folder" else {}
    grid = grid_of(three, method, **config)
    first = strategy_of(three, method, run_dir=tmp_path / "run")
    old = first.commit

    def die(*args):
        record = old(*args)
        if first.federation.state.round == 2:
            raise KeyboardInterrupt
        return record

    first.commit = die
    with pytest.raises(KeyboardInterrupt):
        first.start(grid)
    second = strategy_of(three, method, run_dir=tmp_path / "run")
    assert second.federation.state.round == 2
    second.start(grid)
    alone = three.run(method)
    assert same(alone.server, second.federation.state.server)
    assert fk.load_run(tmp_path / "run").summary()["final"] == alone.history.summary()["final"]
    assert not any("fresh" in r for r in second.federation.state.history.records)


def test_lost_round_is_repeated_from_the_same_state(three: Problem, tmp_path: Path) -> None:
    """Clients have trained round 2 and saved its state, but the server dies before it applies the round."""
    method = fk.methods.get("scaffold")()
    grid = grid_of(three, method, **{"state-dir": str(tmp_path / "nodes")})
    first = strategy_of(three, method, run_dir=tmp_path / "run")
    old = first.commit

    def die(*args):
        if first.federation.state.round == 1:
            raise KeyboardInterrupt
        return old(*args)

    first.commit = die
    with pytest.raises(KeyboardInterrupt):
        first.start(grid)
    second = strategy_of(three, method, run_dir=tmp_path / "run")
    assert second.federation.state.round == 1
    second.start(grid)
    assert same(three.run(method).server, second.federation.state.server)
    assert len(list((tmp_path / "nodes").rglob("*.safetensors"))) == 3 * 3, "the states of all three rounds"


def test_node_that_lost_its_state_is_new_and_recorded(three: Problem, tmp_path: Path) -> None:
    method = fk.methods.get("scaffold")()
    grid = grid_of(three, method, **{"state-dir": str(tmp_path)})

    def lose(message, work):
        if message.content["fedkeep"]["round"] == 2:
            for file in tmp_path.rglob("client-1/*"):
                file.unlink()
        return work()

    grid.node_of(1).fault = lose
    strategy = strategy_of(three, method)
    strategy.start(grid)
    assert [r.get("fresh") for r in strategy.federation.state.history.records] == [None, None, [1], None]


# Run folders and settings


def test_run_folder_of_another_run_raises(three: Problem, tmp_path: Path) -> None:
    strategy_of(three, fk.methods.FedNTD(), run_dir=tmp_path / "run").federation.state.close()
    with raises(RunError, key="method", mentions=[str(tmp_path / "run")]):
        strategy_of(three, fk.methods.FedNTD(beta=0.3), run_dir=tmp_path / "run")
    with raises(RunError, key="train", mentions=[str(tmp_path / "run")]):
        strategy_of(three, fk.methods.FedNTD(), run_dir=tmp_path / "run", lr=0.7)
    simulated = tmp_path / "simulated"
    fk.simulate("fedntd", three.model, three.data, three.clients, **three.settings, run_dir=simulated)
    with raises(RunError, key="engine", value="loop", mentions=[str(simulated)]):
        strategy_of(three, fk.methods.FedNTD(), run_dir=simulated)


def test_the_run_folder_has_the_class_names_of_the_servers_data(three: Problem, tmp_path: Path) -> None:
    names = tuple(f"class {c}!" for c in range(three.data.n_classes))
    named = dataclasses.replace(three, data=dataclasses.replace(three.data, class_names=names))
    strategy = strategy_of(named, fk.methods.FedAvg(), run_dir=tmp_path / "run", rounds=1)
    strategy.start(grid_of(named, fk.methods.FedAvg()))
    assert strategy.federation.state.history.class_name(1) == "class 1!"
    assert fk.load_run(tmp_path / "run").class_names == names


def test_labels_that_are_texts_need_names_in_a_federation(three: Problem) -> None:
    x, y = three.data.x_test[:2], ["a", "b"]
    for data_fn in (lambda: (x, y), lambda: (x, torch.tensor([0.5, 1.0]))):
        with pytest.raises(fk.errors.DataError) as error:
            fk.flower.Strategy(fk.methods.FedAvg(), lambda: three.model, num_clients=2, data_fn=data_fn)
        assert error.value.key == "data_fn"


def test_a_run_folder_of_an_older_version_is_resumed(three: Problem, tmp_path: Path) -> None:
    """What it does not record, because it did not exist, has the value of its time: M was inside FedSSD's square."""
    method, augment = fk.methods.FedSSD(form="inside"), fk.data.Augment(crop=1)
    strategy_of(three, method, run_dir=tmp_path, augment=augment).federation.state.close()
    about = read_experiment(tmp_path)
    for table, key in (
        (about["method"], "form"),
        (about["train"], "drop_last"),
        (about["train"]["augment"], "padding"),
    ):
        del table[key]
    write_experiment(tmp_path, about)
    strategy_of(three, method, run_dir=tmp_path, augment=augment).federation.state.close()
    with raises(RunError, key="method"):
        strategy_of(three, fk.methods.FedSSD(form="outside"), run_dir=tmp_path, augment=augment)
    with raises(RunError, key="train"):
        strategy_of(three, method, run_dir=tmp_path, augment=augment, drop_last=True)
    with raises(RunError, key="train"):
        strategy_of(three, method, run_dir=tmp_path, augment=dataclasses.replace(augment, padding="reflect"))


@pytest.mark.parametrize("name", ["fedntd", "fedkeep", "fedcm"])
def test_settings_of_start_are_used_unless_a_run_folder_records_them(three: Problem, tmp_path: Path, name: str) -> None:
    """FedKeep's server sends the learning rate, FedCM's divides by it."""
    method = fk.methods.get(name)()
    strategy = strategy_of(three, method)
    strategy.start(grid_of(three, method), num_rounds=1, train_config=ConfigRecord({"lr": 0.5, "batch-size": 4}))
    alone = three.run(method, rounds=1, lr=0.5, batch_size=4)
    assert same(alone.server, strategy.federation.state.server)
    strategy = strategy_of(three, method, run_dir=tmp_path / "run")
    with raises(RunError, key="lr", value=0.5):
        strategy.start(grid_of(three, method), train_config=ConfigRecord({"lr": 0.5}))
    strategy.start(grid_of(three, method), num_rounds=1)
    assert len(fk.load_run(tmp_path / "run").records) == 2


def test_another_optimizer_of_start_has_its_own_weight_decay(three: Problem) -> None:
    settings = {name: value for name, value in three.settings.items() if name != "weight_decay"}
    three, method = dataclasses.replace(three, settings=settings), fk.methods.FedAvg()
    for decay in ({}, {"weight-decay": 1e-3}):
        strategy = strategy_of(three, method)
        strategy.start(grid_of(three, method), num_rounds=1, train_config=ConfigRecord({"optimizer": "adam", **decay}))
        alone = three.run(method, rounds=1, optimizer="adam", weight_decay=decay.get("weight-decay", 0.0))
        assert same(alone.server, strategy.federation.state.server)


# Through the apps, with the app's config


def test_apps_read_their_config(three: Problem, tmp_path: Path) -> None:
    config = {
        "num-clients": 3,
        "run-dir": str(tmp_path / "run"),
        "method.name": "fedprox",
        "method.mu": 0.5,
        "train.rounds": 2,
        "train.participation": 3,
        "train.batch-size": 4,
        "train.epochs": 1,
        "seed": 4,
    }
    grid = MemoryGrid([node(three, None, k) for k in range(3)], config)
    app = server_app(None, lambda: three.model, lambda context: three.data)
    app(grid, Context(1, 1, {}, RecordDict(), config))
    history = fk.load_run(tmp_path / "run")
    assert history.about["method"] == {"name": "fedprox", "mu": 0.5}
    assert len(history.records) == 3
    assert history.about["train"]["batch_size"] == 4
    with raises(ConfigError, key="method.mo", valid=["method.mu"]):
        app(grid, Context(1, 1, {}, RecordDict(), {**config, "method.mo": 1.0}))
    with raises(ConfigError, key="lrr", valid=["lr"]):
        app(grid, Context(1, 1, {}, RecordDict(), {**config, "train.lrr": 1.0}))
    with raises(ConfigError, key="num-clients"):
        app(grid, Context(1, 1, {}, RecordDict(), {}))
