"""Methods over Flower: the real apps and messages in one process, equal to the loop bit for bit, and its faults."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from support.problems import Problem, same

import fedkeep as fk

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedkeep[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from support.flower_grid import MemoryGrid, grid_of, node, strategy_of, through_bytes

from fedkeep.errors import ConfigError, RunError
from fedkeep.flower import records, server_app


@pytest.mark.parametrize("name", fk.methods.REGISTRY)
def test_a_federation_gives_the_loops_weights_exactly(three: Problem, name: str) -> None:
    method = fk.methods.get(name)()
    alone = three.run(method)
    strategy = strategy_of(three, method)
    strategy.start(grid_of(three, method))
    assert same(alone.server, strategy.bench.server)
    for mine, theirs in zip(alone.history.records, strategy.bench.history.records, strict=True):
        assert mine.keys() == theirs.keys()
        assert theirs.get("train_loss", 0) == pytest.approx(mine.get("train_loss", 0), rel=1e-12)
        assert all(theirs[key] == mine[key] for key in mine.keys() - {"seconds", "train_loss"})


def test_sampling_and_dropout_and_augmentation_are_the_simulations(three: Problem) -> None:
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
    assert same(alone.server, strategy.bench.server)
    assert [r.get("cohort") for r in alone.history.records] == [r.get("cohort") for r in strategy.bench.history.records]


# State on the nodes


@pytest.mark.parametrize("kept", ["context", "folder"])
def test_state_survives_a_server_that_is_killed_and_started_again(three: Problem, tmp_path: Path, kept: str) -> None:
    method = fk.methods.get("scaffold")()
    config = {"state-dir": str(tmp_path / "nodes")} if kept == "folder" else {}
    grid = grid_of(three, method, **config)
    first = strategy_of(three, method, run_dir=tmp_path / "run")
    old = first.commit

    def die(*args):
        record = old(*args)
        if first.bench.round == 2:
            raise KeyboardInterrupt
        return record

    first.commit = die
    with pytest.raises(KeyboardInterrupt):
        first.start(grid)
    second = strategy_of(three, method, run_dir=tmp_path / "run")
    assert second.bench.round == 2
    second.start(grid)
    alone = three.run(method)
    assert same(alone.server, second.bench.server)
    assert fk.load_run(tmp_path / "run").summary()["final"] == alone.history.summary()["final"]
    assert not any("fresh" in r for r in second.bench.history.records)


def test_a_round_that_the_server_lost_is_repeated_from_the_same_state(three: Problem, tmp_path: Path) -> None:
    """Clients trained round 2 and kept its state, but the server died before it had applied the round."""
    method = fk.methods.get("scaffold")()
    grid = grid_of(three, method, **{"state-dir": str(tmp_path / "nodes")})
    first = strategy_of(three, method, run_dir=tmp_path / "run")
    old = first.commit

    def die(*args):
        if first.bench.round == 1:
            raise KeyboardInterrupt
        return old(*args)

    first.commit = die
    with pytest.raises(KeyboardInterrupt):
        first.start(grid)
    second = strategy_of(three, method, run_dir=tmp_path / "run")
    assert second.bench.round == 1
    second.start(grid)
    assert same(three.run(method).server, second.bench.server)
    assert len(list((tmp_path / "nodes").rglob("*.safetensors"))) == 2 * 3, "the newest state and the one before"


def test_a_node_that_comes_back_empty_is_new_and_the_server_knows(three: Problem, tmp_path: Path) -> None:
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
    assert [r.get("fresh") for r in strategy.bench.history.records] == [None, None, [1], None]


# Faults


def poisoned(change):
    def fault(message, work):
        reply = work()
        upload = records.from_records(reply.content)
        said = {k: v for k, v in reply.content["fedkeep"].items() if k != "leaves"}
        return Message(records.to_records(change(upload), said), reply_to=message)

    return fault


def with_weight(change):
    def changed(upload):
        name = sorted(upload["params"])[0]
        return {**upload, "params": {**upload["params"], name: change(upload["params"][name])}}

    return changed


BROKEN = {
    "nan": (with_weight(lambda w: w * float("nan")), "not finite"),
    "infinite": (with_weight(lambda w: w / 0), "not finite"),
    "huge": (with_weight(lambda w: w + 1e12), "moved by"),
    "shape": (with_weight(lambda w: w[:1]), "the model's is"),
    "type": (with_weight(lambda w: w.float()), "the model's is"),
    "many": (lambda upload: {**upload, "n": upload["n"] * 1e12}, "at most 1e"),
    "negative": (lambda upload: {**upload, "n": -upload["n"]}, "examples"),
    "scalar n": (lambda upload: {**upload, "n": upload["n"].expand(2).clone()}, "n is"),
    "more": (lambda upload: {**upload, "extra": torch.zeros(3)}, "extra"),
    "less": (lambda upload: {"params": upload["params"]}, "n is missing"),
    "size": (lambda upload: {**upload, "extra": torch.zeros(1 << 18, dtype=torch.float64)}, "bytes"),
    "no tree": (lambda upload: {"params": torch.zeros(3), "n": upload["n"]}, "no weights"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_update_is_refused_by_name_and_the_others_go_on(three: Problem, what: str, caplog) -> None:
    method = fk.methods.FedNTD()
    grid = grid_of(three, method)
    change, why = BROKEN[what]
    grid.node_of(2).fault = poisoned(change)
    strategy = strategy_of(three, method)
    strategy.start(grid)
    for record in strategy.bench.history.records[1:]:
        assert record["cohort"] == [0, 1]
        assert why in record["failed"]["2"], record["failed"]
    assert "client 2 (node" in caplog.text
    others = dataclasses.replace(three, clients=three.clients[:2], settings={**three.settings, "participation": 2})
    assert same(others.run(method).server, strategy.bench.server), "as if client 2 had never been there"


def test_a_reply_that_is_no_message_of_ours_is_refused(three: Problem) -> None:
    grid = grid_of(three, fk.methods.FedNTD())
    evil = Array("float32", (1 << 40,), "numpy.ndarray", b"\x93NUMPY\x01\x00")
    grid.node_of(0).fault = lambda message, work: Message(
        RecordDict({"params": ArrayRecord({"w": evil}), "fedkeep": ConfigRecord({"round": 1, "client": 0})}),
        reply_to=message,
    )
    grid.node_of(1).fault = lambda message, work: Message(RecordDict(), reply_to=message)
    strategy = strategy_of(three, fk.methods.FedNTD(), rounds=1, min_replies=1)
    strategy.start(grid)
    record = strategy.bench.history.records[1]
    assert record["cohort"] == [2]
    assert "header" in record["failed"]["0"]
    assert "does not say" in record["failed"]["1"]


def test_a_client_that_fails_is_asked_again_when_too_few_answered(three: Problem) -> None:
    """The survivors are not asked twice, and the outcome is that of a round without faults."""
    method = fk.methods.get("scaffold")()
    grid = grid_of(three, method)
    failures = {"left": 2}

    def fault(message, work):
        if message.content["fedkeep"]["round"] == 2 and failures["left"]:
            failures["left"] -= 1
            return Message(Error(2, "Traceback\nOutOfMemory: too little"), reply_to=message)
        return work()

    grid.node_of(1).fault = fault
    strategy = strategy_of(three, method, min_replies=1.0)
    strategy.start(grid)
    assert same(three.run(method).server, strategy.bench.server)
    assert "failed" not in strategy.bench.history.records[2]
    trained = [m.metadata.message_type for m in grid.node_of(0).seen]
    assert trained.count("train") == 3


def test_a_round_that_fails_for_good_changes_nothing_and_can_be_gone_on_with(three: Problem, tmp_path: Path) -> None:
    method = fk.methods.FedNTD()
    grid = grid_of(three, method)

    def fault(message, work):
        return None if message.content["fedkeep"]["round"] == 2 else work()

    for one in grid.nodes.values():
        one.fault = fault
    strategy = strategy_of(three, method, run_dir=tmp_path / "run", attempts=2)
    with pytest.raises(RunError, match=r"round 2 was asked for 2 times.*client 0"):
        strategy.start(grid)
    assert strategy.bench.round == 1
    for one in grid.nodes.values():
        one.fault = None
    again = strategy_of(three, method, run_dir=tmp_path / "run")
    again.start(grid)
    assert same(three.run(method).server, again.bench.server)


def test_a_busy_node_is_left_alone_until_it_has_answered(three: Problem) -> None:
    method = fk.methods.FedNTD()
    grid = grid_of(three, method)
    slow = grid.node_of(2)

    def fault(message, work):
        number = message.content["fedkeep"]["round"]
        if number == 1:  # it answers, but only when round 3 begins
            slow.held = through_bytes(work())
            return None
        return work()

    slow.fault = fault
    strategy = strategy_of(three, method, rounds=4)
    old = strategy.commit

    def commit(*args):
        record = old(*args)
        if strategy.bench.round == 2:
            grid.late[slow.held.metadata.reply_to_message_id] = slow.held
        return record

    strategy.commit = commit
    strategy.start(grid)
    records = strategy.bench.history.records
    assert [r["cohort"] for r in records[1:]] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert "no reply" in records[1]["failed"]["2"]
    assert "busy" in records[2]["failed"]["2"]


def test_a_node_that_goes_and_one_that_takes_its_place(three: Problem) -> None:
    method = fk.methods.FedNTD()
    grid = grid_of(three, method)
    gone = next(key for key, one in grid.nodes.items() if one.config["client-id"] == 1)
    strategy = strategy_of(three, method, rounds=4)
    old = strategy.commit

    def commit(*args):
        record = old(*args)
        if strategy.bench.round == 1:
            grid.nodes[999] = node(three, method, 1)  # the same client, before the old node is known to have gone
        if strategy.bench.round == 2:
            del grid.nodes[gone]
        return record

    strategy.commit = commit
    strategy.start(grid)
    assert [r["cohort"] for r in strategy.bench.history.records[1:]] == [[0, 1, 2]] * 4
    assert strategy.nodes.of_client[1] == 999


def test_nodes_that_cannot_be_clients_are_named(three: Problem, caplog) -> None:
    method = fk.methods.FedNTD()
    nodes = [node(three, method, k) for k in range(3)]
    nodes[0].config = {"client-id": 17}
    nodes[1].config = {}
    strategy = strategy_of(three, method, rounds=1, min_replies=1)
    strategy.start(MemoryGrid(nodes))
    assert strategy.bench.history.records[1]["cohort"] == [2]
    assert "client 17" in caplog.text
    assert "--node-config 'client-id=K'" in caplog.text


def test_a_client_without_examples_is_skipped_as_in_the_simulation(three: Problem) -> None:
    problem = dataclasses.replace(three, clients=[*three.clients[:2], np.array([], dtype=int)])
    method = fk.methods.FedNTD()
    strategy = strategy_of(problem, method, min_replies=1.0)
    strategy.start(grid_of(problem, method))
    assert same(problem.run(method).server, strategy.bench.server)
    assert [r["skipped"] for r in strategy.bench.history.records[1:]] == [[2]] * 3


def test_a_node_refuses_another_method_another_model_and_what_its_config_forbids(three: Problem) -> None:
    grid = grid_of(three, fk.methods.FedNTD(), methods="fedavg")
    strategy = strategy_of(three, fk.methods.FedNTD(), attempts=1)
    with pytest.raises(RunError, match="takes part in fedavg alone"):
        strategy.start(grid)
    strategy = strategy_of(three, fk.methods.FedNTD(beta=0.5), attempts=1)
    with pytest.raises(RunError, match="the server asks for"):
        strategy.start(grid_of(three, fk.methods.FedNTD()))
    frozen = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    frozen[1].requires_grad_(False)
    other = dataclasses.replace(three, model=frozen)
    server = strategy_of(other, fk.methods.FedNTD(), attempts=1)
    frozen = copy.deepcopy(frozen)
    frozen[1].weight.data += 1
    with pytest.raises(RunError, match="differs from the server's in what is not trained"):
        server.start(grid_of(dataclasses.replace(three, model=frozen), fk.methods.FedNTD()))


def test_a_run_folder_of_another_run_is_refused(three: Problem, tmp_path: Path) -> None:
    strategy_of(three, fk.methods.FedNTD(), run_dir=tmp_path / "run").bench.close()
    with pytest.raises(RunError, match="another method"):
        strategy_of(three, fk.methods.FedNTD(beta=0.3), run_dir=tmp_path / "run")
    with pytest.raises(RunError, match="another train"):
        strategy_of(three, fk.methods.FedNTD(), run_dir=tmp_path / "run", lr=0.7)


# Through the apps, with the app's config


def test_the_apps_take_their_config(three: Problem, tmp_path: Path) -> None:
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
    with pytest.raises(ConfigError, match="valid: mu"):
        app(grid, Context(1, 1, {}, RecordDict(), {**config, "method.mo": 1.0}))
    with pytest.raises(ConfigError, match="did you mean lr"):
        app(grid, Context(1, 1, {}, RecordDict(), {**config, "train.lrr": 1.0}))
    with pytest.raises(ConfigError, match="num-clients"):
        app(grid, Context(1, 1, {}, RecordDict(), {}))
