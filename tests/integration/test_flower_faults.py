"""Faults of nodes in a federation on Flower: broken updates, lost replies, wrong methods, models and data."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.errors import raises
from support.problems import Problem, same

import fedkeep as fk

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from support.flower_grid import MemoryGrid, grid_of, node, strategy_of, through_bytes

from fedkeep.errors import DataError, FedkeepError, ModelError, RunError
from fedkeep.flower import Strategy, records
from fedkeep.flower.client import Examples
from fedkeep.flower.update_checks import RejectedUpdate


def poisoned(change):
    """Return a fault that changes a node's upload."""

    def fault(message, work):
        reply = work()
        upload = records.from_records(reply.content)
        config = {k: v for k, v in reply.content["fedkeep"].items() if k != "leaves"}
        return Message(records.to_records(change(upload), config), reply_to=message)

    return fault


def with_weight(change):
    """Return a change of an upload's first weight."""

    def changed(upload):
        name = sorted(upload["params"])[0]
        return {**upload, "params": {**upload["params"], name: change(upload["params"][name])}}

    return changed


FIRST = "params/body.1.bias"  # the weight that `with_weight` changes
BROKEN = {  # a change of the upload, and the key and value of the error
    "nan": (with_weight(lambda w: w * float("nan")), FIRST, None),
    "infinite": (with_weight(lambda w: w / 0), FIRST, None),
    "huge": (with_weight(lambda w: w + 1e12), "params", pytest.approx(8e12)),
    "shape": (with_weight(lambda w: w[:1]), FIRST, ((1,), "float64")),
    "dtype": (with_weight(lambda w: w.float()), FIRST, ((64,), "float32")),
    "n too large": (lambda upload: {**upload, "n": upload["n"] * 1e12}, "n", 12e12),
    "n negative": (lambda upload: {**upload, "n": -upload["n"]}, "n", -12),
    "n not scalar": (lambda upload: {**upload, "n": upload["n"].expand(2).clone()}, "n", ((2,), "float64")),
    "extra leaf": (lambda upload: {**upload, "extra": torch.zeros(3)}, "extra", ((3,), "float32")),
    "missing leaf": (lambda upload: {"params": upload["params"]}, "n", None),
    "too many bytes": (
        lambda upload: {**upload, "extra": torch.zeros(1 << 18, dtype=torch.float64)},
        "limits.models",
        pytest.approx(2.1e6, rel=0.05),
    ),
    "no weights": (lambda upload: {"params": torch.zeros(3), "n": upload["n"]}, "params", ((3,), "float32")),
}


def collect_rejected(strategy: Strategy) -> list[dict[int, RejectedUpdate]]:
    """Return a list to which every applied round adds its rejected updates."""
    rejected = []
    commit = strategy.commit

    def collect(*args):
        rejected.append(strategy.pending.rejected)
        return commit(*args)

    strategy.commit = collect
    return rejected


@pytest.mark.parametrize("what", BROKEN)
def test_broken_update_is_rejected_and_the_others_are_used(three: Problem, what: str, caplog) -> None:
    method = fk.methods.FedNTD()
    grid = grid_of(three, method)
    change, key, value = BROKEN[what]
    grid.node_of(2).fault = poisoned(change)
    strategy = strategy_of(three, method)
    rejected = collect_rejected(strategy)
    strategy.start(grid)
    assert len(rejected) == 3
    for record, errors in zip(strategy.federation.state.history.records[1:], rejected, strict=True):
        assert record["cohort"] == [0, 1]
        assert (errors[2].key, errors[2].value) == (key, value)
        assert str(errors[2]) in record["failed"]["2"]
        assert key in record["failed"]["2"]
    node_id = next(number for number, one in grid.nodes.items() if one is grid.node_of(2))
    logged = [r.args for r in caplog.records if r.args and r.args[-1] in [errors[2] for errors in rejected]]
    assert [args[:3] for args in logged] == [(number, 2, node_id) for number in (1, 2, 3)]
    others = dataclasses.replace(three, clients=three.clients[:2], settings={**three.settings, "participation": 2})
    assert same(others.run(method).server, strategy.federation.state.server), "as if client 2 had never been there"


def test_reply_with_invalid_records_is_rejected(three: Problem) -> None:
    grid = grid_of(three, fk.methods.FedNTD())
    evil = Array("float32", (1 << 40,), "numpy.ndarray", b"\x93NUMPY\x01\x00")
    grid.node_of(0).fault = lambda message, work: Message(
        RecordDict({"params": ArrayRecord({"w": evil}), "fedkeep": ConfigRecord({"round": 1, "client": 0})}),
        reply_to=message,
    )
    grid.node_of(1).fault = lambda message, work: Message(RecordDict(), reply_to=message)
    strategy = strategy_of(three, fk.methods.FedNTD(), rounds=1, min_replies=1)
    rejected = collect_rejected(strategy)
    strategy.start(grid)
    record = strategy.federation.state.history.records[1]
    assert record["cohort"] == [2]
    assert set(record["failed"]) == {"0", "1"}
    assert [rejected[0][client].key for client in (0, 1)] == ["header", "client"]


def test_failed_client_is_asked_again_if_too_few_replied(three: Problem) -> None:
    """The others are not asked twice, and the result is that of a round without faults."""
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
    assert same(three.run(method).server, strategy.federation.state.server)
    assert "failed" not in strategy.federation.state.history.records[2]
    trained = [m.metadata.message_type for m in grid.node_of(0).received]
    assert trained.count("train") == 3


def test_failed_round_changes_nothing_and_the_run_can_be_resumed(three: Problem, tmp_path: Path) -> None:
    method = fk.methods.FedNTD()
    grid = grid_of(three, method)

    def fault(message, work):
        return None if message.content["fedkeep"]["round"] == 2 else work()

    for one in grid.nodes.values():
        one.fault = fault
    strategy = strategy_of(three, method, run_dir=tmp_path / "run", attempts=2)
    with raises(RunError, key="round", value=2, mentions=["client 0", "client 1", "client 2"]):
        strategy.start(grid)
    assert strategy.federation.state.round == 1
    for one in grid.nodes.values():
        one.fault = None
    again = strategy_of(three, method, run_dir=tmp_path / "run")
    again.start(grid)
    assert same(three.run(method).server, again.federation.state.server)


def test_busy_node_is_not_asked_until_it_has_replied(three: Problem) -> None:
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
        if strategy.federation.state.round == 2:
            grid.late[slow.held.metadata.reply_to_message_id] = slow.held
        return record

    strategy.commit = commit
    strategy.start(grid)
    records = strategy.federation.state.history.records
    assert [r["cohort"] for r in records[1:]] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert [set(r.get("failed", {})) for r in records[1:]] == [{"2"}, {"2"}, set(), set()]
    asked = [m.content["fedkeep"]["round"] for m in slow.received if m.metadata.message_type == "train"]
    assert asked == [1, 3, 4], "not asked in round 2, while it was busy"


def test_node_is_replaced_by_another_of_the_same_client(three: Problem) -> None:
    method = fk.methods.FedNTD()
    grid = grid_of(three, method)
    gone = next(key for key, one in grid.nodes.items() if one.config["client-id"] == 1)
    strategy = strategy_of(three, method, rounds=4)
    old = strategy.commit

    def commit(*args):
        record = old(*args)
        if strategy.federation.state.round == 1:
            grid.nodes[999] = node(
                three, method, 1
            )  # the same client, before the server knows that the old node is gone
        if strategy.federation.state.round == 2:
            del grid.nodes[gone]
        return record

    strategy.commit = commit
    strategy.start(grid)
    assert [r["cohort"] for r in strategy.federation.state.history.records[1:]] == [[0, 1, 2]] * 4
    assert strategy.nodes.of_client[1] == 999


def test_nodes_with_an_invalid_client_id_are_logged(three: Problem, caplog) -> None:
    method = fk.methods.FedNTD()
    nodes = [node(three, method, k) for k in range(3)]
    nodes[0].config = {"client-id": 17}
    nodes[1].config = {}
    strategy = strategy_of(three, method, rounds=1, min_replies=1)
    strategy.start(MemoryGrid(nodes))
    assert strategy.federation.state.history.records[1]["cohort"] == [2]
    logged = [r.args for r in caplog.records if r.args and r.args[0] in (101, 108)]  # the ids of nodes 0 and 1
    assert {args[0] for args in logged} == {101, 108}
    assert "17" in caplog.text
    assert {error.key for error in nodes[1].errors} == {"client-id"}
    assert "--node-config 'client-id=K'" in caplog.text


def test_client_without_examples_is_skipped_as_in_the_simulation(three: Problem) -> None:
    problem = dataclasses.replace(three, clients=[*three.clients[:2], np.array([], dtype=int)])
    method = fk.methods.FedNTD()
    strategy = strategy_of(problem, method, min_replies=1.0)
    strategy.start(grid_of(problem, method))
    assert same(problem.run(method).server, strategy.federation.state.server)
    assert [r["skipped"] for r in strategy.federation.state.history.records[1:]] == [[2]] * 3


def run_with_node_errors(strategy: Strategy, grid: MemoryGrid) -> list[Exception]:
    """Run a federation whose first round fails, and return the error of each node."""
    with raises(RunError, key="round", value=1) as caught:
        strategy.start(grid)
    errors = [one.errors[-1] for one in grid.nodes.values()]
    assert all(str(error) in str(caught.value) for error in errors), "the server's error has the nodes' messages"
    return errors


def test_node_rejects_another_method_or_model_and_what_its_config_forbids(three: Problem) -> None:
    method = fk.methods.FedNTD()
    grid = grid_of(three, method, methods="fedavg, fedprox")
    for error in run_with_node_errors(strategy_of(three, method, attempts=1), grid):
        assert (type(error), error.key, error.value) == (FedkeepError, "methods", "fedntd")
        assert error.valid == ("fedavg", "fedprox")
    other = strategy_of(three, fk.methods.FedNTD(beta=0.5), attempts=1)
    for error in run_with_node_errors(other, grid_of(three, method)):
        assert (type(error), error.key) == (FedkeepError, "method")
        assert json.loads(error.value)["beta"] == 0.5
    frozen = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    frozen[1].requires_grad_(False)
    server = strategy_of(dataclasses.replace(three, model=frozen), method, attempts=1)
    frozen = copy.deepcopy(frozen)
    frozen[1].weight.data += 1
    grid = grid_of(dataclasses.replace(three, model=frozen), method)
    for error in run_with_node_errors(server, grid):
        assert (type(error), error.key) == (ModelError, "model_fn")
        assert error.value != server.federation.constants


def test_node_rejects_another_protocol_version_another_client_and_unknown_classes(three: Problem) -> None:
    method = fk.methods.FedNTD()
    grid = grid_of(three, method)
    strategy_of(three, method, rounds=1).start(grid)
    one = grid.node_of(1)
    message = next(m for m in one.received if m.metadata.message_type == "train")
    context = Context(1, 101, one.config, RecordDict(), {})

    def with_config(**changes) -> Message:
        config = {**message.content["fedkeep"], **{key.replace("_", "-"): value for key, value in changes.items()}}
        changed = copy.deepcopy(message)
        changed.content["fedkeep"] = ConfigRecord(config)
        return changed

    with raises(FedkeepError, key="version", value=2, valid=[1]):
        one.app(with_config(version=2), context)
    with raises(FedkeepError, key="client-id", value=1, mentions=["2"]):
        one.app(with_config(client=2), context)
    label = int(three.data.y_train[three.clients[1]].max())
    with raises(DataError, key="data_fn", value=label):
        one.app(with_config(n_classes=label), context)


@pytest.mark.parametrize("data", [3, [1, 2, 3], torch.utils.data.Subset([{"x": 1.0, "z": 2}], [0])])
def test_data_fn_with_a_wrong_result_raises(data) -> None:
    with raises(DataError, key="data_fn"):
        Examples.load(data, fk.Settings(), torch.device("cpu"))
