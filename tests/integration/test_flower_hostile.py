"""Hostile nodes in a federation on Flower: one node can neither end nor own the server, nor spoil it for good."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from support.errors import raises
from support.problems import Problem, same

import fedkeep as fk
from fedkeep import tree
from fedkeep._util.text import one_line

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from support.flower_grid import grid_of, strategy_of
from support.hostile import MALFORMED, far_away, filled, scaled, with_upload

from fedkeep.data.seeds import sample_cohort
from fedkeep.errors import ConfigError, RunError
from fedkeep.flower import Strategy, drive, messages, nodes
from fedkeep.flower.evaluation_replies import average_metrics
from fedkeep.flower.exchange import exchange
from fedkeep.flower.pending_round import PendingRound
from fedkeep.flower.trial import outlier
from fedkeep.flower.update_checks import Limits
from fedkeep.method import FedAvg
from fedkeep.tree import Tree


def records_of(strategy: Strategy) -> list[dict]:
    return strategy.federation.state.history.records[1:]


def without_client(problem: Problem, client: int) -> Problem:
    """Return the problem as if this client, the last one, had never been there."""
    assert client == len(problem.clients) - 1
    settings = {**problem.settings, "participation": client}
    return dataclasses.replace(problem, clients=problem.clients[:client], settings=settings)


# A reply that cannot be read is its node's failure and no more


@pytest.fixture(scope="module")
def two_honest(three: Problem) -> Tree:
    """The server's tree after two rounds of FedAvg with the first two of the three clients."""
    settings = {**three.settings, "participation": 2, "rounds": 2}
    return dataclasses.replace(without_client(three, 2), settings=settings).run(fk.methods.FedAvg()).server


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_reply_costs_its_own_update_and_no_more(three: Problem, two_honest: Tree, what: str) -> None:
    method = fk.methods.FedAvg()
    grid = grid_of(three, method)
    grid.node_of(2).fault = MALFORMED[what]
    strategy = strategy_of(three, method, rounds=2)
    strategy.start(grid)
    assert [(r["cohort"], set(r["failed"])) for r in records_of(strategy)] == [([0, 1], {"2"})] * 2
    assert same(two_honest, strategy.federation.state.server)


@pytest.mark.parametrize("error", [TypeError, KeyError, ValueError, RecursionError, MemoryError, AssertionError])
def test_reply_that_flower_itself_cannot_read_is_rejected(three: Problem, error: type[Exception]) -> None:
    """Its bytes are no message: Flower raises when the server fetches it."""
    method = fk.methods.FedAvg()
    grid = grid_of(three, method)

    def fault(message: Message, work):
        def unreadable():
            raise error("no message")

        grid.late[message.metadata.message_id] = unreadable
        return None

    grid.node_of(2).fault = fault
    strategy = strategy_of(three, method, rounds=2)
    strategy.start(grid)
    assert [r["cohort"] for r in records_of(strategy)] == [[0, 1]] * 2
    assert all(error.__name__ in r["failed"]["2"] for r in records_of(strategy))


def test_lost_connection_to_the_superlink_is_no_nodes_failure(three: Problem) -> None:
    grid = grid_of(three, fk.methods.FedAvg())

    def lost():
        raise ConnectionError("the SuperLink is gone")

    def fault(message, work):
        grid.late[message.metadata.message_id] = lost

    grid.node_of(2).fault = fault
    with pytest.raises(ConnectionError):
        strategy_of(three, fk.methods.FedAvg(), rounds=1).start(grid)


def test_sender_named_in_a_reply_is_not_believed(three: Problem) -> None:
    """A node's bytes may claim to come from another node, and to answer another node's message."""
    method = fk.methods.FedAvg()
    grid = grid_of(three, method)
    victim = next(number for number, one in grid.nodes.items() if one.config["client-id"] == 0)
    asked: dict[int, str] = {}

    def honest(message: Message, work):
        asked[0] = message.metadata.message_id
        return work()

    def fault(message: Message, work):
        reply = work()
        reply.content["fedkeep"]["client"] = 0
        reply.metadata.__dict__["_src_node_id"] = victim
        reply.metadata.__dict__["_reply_to_message_id"] = asked.get(0, "nothing")
        return reply

    grid.node_of(0).fault, grid.node_of(2).fault = honest, fault
    strategy = strategy_of(three, method, rounds=2)
    strategy.start(grid)
    assert [(r["cohort"], set(r["failed"])) for r in records_of(strategy)] == [([0, 1], {"2"})] * 2


def test_replayed_reply_is_rejected_and_logged(three: Problem) -> None:
    method = fk.methods.FedAvg()
    grid = grid_of(three, method)
    first: list[RecordDict] = []

    def fault(message: Message, work):
        reply = work()
        first.append(reply.content)
        return Message(first[0], reply_to=message)

    grid.node_of(2).fault = fault
    strategy = strategy_of(three, method)
    strategy.start(grid)
    assert [r["cohort"] for r in records_of(strategy)] == [[0, 1, 2], [0, 1], [0, 1]]
    assert ["round 1" in r.get("failed", {}).get("2", "") for r in records_of(strategy)] == [False, True, True]


@pytest.mark.parametrize("what", ["n empty", "key a//b", "header quotes", "no content"])
def test_wrapper_of_flower_does_not_see_malformed_replies(three: Problem, what: str) -> None:
    method = fk.methods.FedAvg()
    grid = grid_of(three, method)
    grid.node_of(2).fault = MALFORMED[what]
    strategy = strategy_of(three, method, rounds=2)
    outer = DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 1e6, 2)
    drive(strategy, outer, grid)
    assert [(r["cohort"], set(r["failed"])) for r in records_of(strategy)] == [([0, 1], {"2"})] * 2


def test_node_that_leaves_under_a_wrapper_is_no_alert(three: Problem) -> None:
    method = fk.methods.FedAvg()
    grid = grid_of(three, method)
    gone = next(number for number, one in grid.nodes.items() if one.config["client-id"] == 2)

    def leave(message: Message, work):
        del grid.nodes[gone]
        return Message(Error(5, "node unavailable"), reply_to=message)

    grid.node_of(2).fault = leave
    strategy = strategy_of(three, method, rounds=1)
    drive(strategy, DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 1e6, 2), grid)
    record = records_of(strategy)[0]
    assert (record["cohort"], record["failed"]) == ([0, 1], {"2": "not connected"})
    assert "security" not in record


def test_errors_that_a_wrapper_does_not_pass_on_are_named(three: Problem) -> None:
    """Flower's wrapper skips a round in which a node reports an error; the reason is known all the same."""
    grid = grid_of(three, fk.methods.FedAvg())
    grid.node_of(2).fault = lambda message, work: Message(Error(2, "no disk"), reply_to=message)
    strategy = strategy_of(three, fk.methods.FedAvg(), rounds=1)
    with raises(RunError, key="round", mentions=["client 2: no disk"]):
        drive(strategy, DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 1e6, 2), grid)


def test_reply_that_a_wrapper_does_not_see_is_rejected_once(three: Problem, caplog) -> None:
    grid = grid_of(three, fk.methods.FedAvg())
    grid.node_of(2).fault = with_upload(filled("n", -1.0))
    strategy = strategy_of(three, fk.methods.FedAvg(), rounds=1)
    drive(strategy, DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 1e6, 2), grid)
    assert caplog.text.count("was rejected") == 1
    assert "2" in records_of(strategy)[0]["failed"]


# The form of an upload comes from the method, not from a majority


@pytest.mark.parametrize(
    "change",
    [
        lambda upload: {**upload, "extra": torch.zeros(3)},
        lambda upload: {"params": upload["params"]},
        lambda upload: {"n": upload["n"]},
        lambda upload: {**upload, "mu": upload["mu"][:1]},
    ],
)
@pytest.mark.parametrize("hostile", [1, 2])
def test_majority_of_hostile_clients_does_not_decide_the_form(three: Problem, change, hostile: int) -> None:
    method = fk.methods.get("flashback")()
    grid = grid_of(three, method)
    for client in range(3 - hostile, 3):
        grid.node_of(client).fault = with_upload(change)
    strategy = strategy_of(three, method, rounds=2, min_replies=1)
    strategy.start(grid)
    assert [r["cohort"] for r in records_of(strategy)] == [list(range(3 - hostile))] * 2


@pytest.mark.parametrize("name", fk.methods.REGISTRY)
def test_form_is_known_without_data_on_the_server(three: Problem, name: str) -> None:
    method = fk.methods.get(name)()
    strategy = strategy_of(three, method, rounds=1)
    strategy.federation.test = None
    strategy.start(grid_of(three, method))
    assert records_of(strategy)[0]["cohort"] == [0, 1, 2]


# No client is indispensable: whose updates are rejected is replaced


def first_client(problem: Problem) -> int:
    """Return the client of round 1, if a cohort has one."""
    return int(sample_cohort(problem.settings["seed"], 1, len(problem.clients), 1)[0])


def test_rejected_client_of_a_cohort_of_one_is_replaced(three: Problem) -> None:
    method, hostile = fk.methods.FedAvg(), first_client(three)
    grid = grid_of(three, method)
    grid.node_of(hostile).fault = with_upload(filled("n", -1.0))
    settings = {"participation": 1, "rounds": 6}
    strategy = strategy_of(three, method, **settings)
    strategy.start(grid)
    rounds = records_of(strategy)
    assert len(rounds) == 6
    assert all(len(r["cohort"]) == 1 and r["cohort"] != [hostile] for r in rounds)
    assert rounds[0]["replaced"] == [hostile]
    again = strategy_of(three, method, **settings)
    again.start(grid)
    assert same(strategy.federation.state.server, again.federation.state.server), "who replaces whom is reproducible"


def test_client_that_always_fails_is_replaced_after_all_attempts(three: Problem) -> None:
    method, hostile = fk.methods.FedAvg(), first_client(three)
    grid = grid_of(three, method)
    grid.node_of(hostile).fault = lambda message, work: Message(Error(2, "no\x1b[2J"), reply_to=message)
    strategy = strategy_of(three, method, participation=1, rounds=6, attempts=2)
    strategy.start(grid)
    assert all(r["cohort"] != [hostile] for r in records_of(strategy))
    assert records_of(strategy)[0]["replaced"] == [hostile]
    assert not any("\x1b" in str(r) for r in records_of(strategy))


def test_run_ends_if_nobody_is_left_to_ask(three: Problem) -> None:
    grid = grid_of(three, fk.methods.FedAvg())
    for one in grid.nodes.values():
        one.fault = with_upload(filled("n", -1.0))
    strategy = strategy_of(three, fk.methods.FedAvg(), participation=1, attempts=2)
    with raises(RunError, key="round", value=1, mentions=["client 0", "client 1", "client 2"]):
        strategy.start(grid)
    assert strategy.federation.state.round == 0


def test_without_faults_nobody_is_replaced(three: Problem) -> None:
    method = fk.methods.FedAvg()
    strategy = strategy_of(three, method, participation=1, rounds=5)
    strategy.start(grid_of(three, method))
    settings = {**three.settings, "participation": 1, "rounds": 5}
    assert same(dataclasses.replace(three, settings=settings).run(method).server, strategy.federation.state.server)
    assert not any(key in r for r in records_of(strategy) for key in ("replaced", "failed", "security"))


# Bounds by meaning: one hostile message of four costs its own update, and all later rounds work


@functools.cache
def digits() -> Problem:
    """Return four clients of the digits."""
    data = fk.data.load("digits", public=0.1)
    data = dataclasses.replace(data, x_train=data.x_train[:320], y_train=data.y_train[:320])
    data = dataclasses.replace(data, x_test=data.x_test[:160], y_test=data.y_test[:160])
    clients = fk.data.partition.shards(data.y_train, n_clients=4, s=5, seed=0)
    settings = {"rounds": 4, "participation": 4, "epochs": 1, "batch_size": 10, "lr": 0.1, "engine": "loop"}
    return Problem(fk.models.build("mlp", (1, 8, 8), 10), data, clients, settings)


def method_of(name: str) -> FedAvg:
    """Return the method, with less work where it has much."""
    return fk.methods.get(name)(**{"flashback": {"E_s": 1}, "fedcurv": {"s": 20}}.get(name, {}))


@functools.cache
def without_one_update(name: str) -> Tree:
    """Return the server's tree at the end of a run in which client 1 sends no update in round 2."""

    def fault(message: Message, work):
        failed = message.content["fedkeep"]["round"] == 2
        return Message(Error(2, "no update"), reply_to=message) if failed else work()

    grid = grid_of(digits(), method_of(name))
    grid.node_of(1).fault = fault
    strategy = strategy_of(digits(), method_of(name))
    strategy.start(grid)
    return strategy.federation.state.server


ATTACKS = {  # method, the attack on the upload, and the entry that is out of bounds
    "scaffold dc=1e3": ("scaffold", filled("dc", 1e3), "dc"),
    "scaffold dc=1": ("scaffold", filled("dc", 1.0), "dc"),
    "scaffold -dc": ("scaffold", scaled("dc", -1.0), "dc"),
    "fedcurv u=-1e3": ("fedcurv", filled("u", -1e3), "u"),
    "fedcurv u=1e3": ("fedcurv", filled("u", 1e3), "u"),
    "fedcurv v=1e3": ("fedcurv", filled("v", 1e3), "v"),
    **{f"fednova tau={tau}": ("fednova", filled("tau", tau), "tau") for tau in (1e-30, 0.0, -1.0, 1.0, 1e9)},
    "fednova n=900": ("fednova", filled("n", 900.0), "tau"),
    "flashback mu=-1e9": ("flashback", filled("mu", -1e9), "mu"),
    "flashback -3 mu": ("flashback", scaled("mu", -3.0), "mu"),
    "flashback 3 mu": ("flashback", scaled("mu", 3.0), "mu"),
    "flashback mu=1e9": ("flashback", filled("mu", 1e9), "mu"),
    "flashback r=0": ("flashback", filled("r", 0.0), "r"),
    "flashback r=1e6": ("flashback", filled("r", 1e6), "r"),
    "fedavg n=1e6": ("fedavg", filled("n", 1e6), "n"),
    "fedavg n=0.5": ("fedavg", filled("n", 0.5), "n"),
}


@pytest.mark.parametrize("what", ATTACKS)
def test_upload_that_no_honest_client_sends_is_rejected(what: str) -> None:
    name, attack, entry = ATTACKS[what]
    method = method_of(name)
    grid = grid_of(digits(), method)
    grid.node_of(1).fault = with_upload(attack, rounds=(2,))
    strategy = strategy_of(digits(), method, max_examples=1000)
    strategy.start(grid)
    rounds = records_of(strategy)
    assert [r["cohort"] for r in rounds] == [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert rounds[1]["failed"]["1"].split(": ")[1].startswith(f"{entry} ")
    assert same(without_one_update(name), strategy.federation.state.server), "as if it had sent nothing"


# A round after which honest clients would be rejected is not applied


def stiff(upload, server):
    """Return FedCurv's upload with a u and v that fit each other, but make every client's training unstable."""
    u = tree.map(lambda t: torch.full_like(t, 150.0), upload["u"])
    return {**upload, "u": u, "v": tree.map(torch.mul, u, upload["params"])}


def far_with_dc(upload, server):
    """Return SCAFFOLD's upload with weights far away, and the dc that follows from them."""
    far = far_away(9.9)(upload, server)["params"]
    n = int(upload["n"])
    steps = -(-n // 10)
    effective = (steps - 0.9 * (1 - 0.9**steps) / 0.1) / 0.1
    dc = tree.map(lambda g, w, c: (g - w) / (effective * 0.1 * 0.99) - c, server["params"], far, server["c"])
    return {**upload, "params": far, "dc": dc}


@pytest.mark.parametrize(
    ("name", "attack", "applied"),
    [("fedcurv", stiff, False), ("feddyn", far_away(9.9), None), ("scaffold", far_with_dc, None)],
)
def test_round_after_which_nobody_could_train_is_not_applied(name: str, attack, applied: bool | None) -> None:
    """Whether or not the attacked round is applied, all honest clients' updates are accepted afterwards."""
    method = method_of(name)
    grid = grid_of(digits(), method)
    strategy = strategy_of(digits(), method)
    state = strategy.federation.state
    grid.node_of(1).fault = with_upload(lambda upload: attack(upload, state.server), rounds=(2,))
    strategy.start(grid)
    rounds = records_of(strategy)
    assert [r["cohort"] for r in rounds[2:]] == [[0, 1, 2, 3]] * 2
    if applied is False:
        assert rounds[1]["cohort"] == [0, 2, 3]
        assert "client 1" in rounds[1]["security"][0], "the largest upload is named"
        assert same(without_one_update(name), strategy.federation.state.server), "as if it had sent nothing"


def test_round_that_is_not_applied_changes_nothing(three: Problem, tmp_path: Path) -> None:
    method = fk.methods.FedAvg()
    strategy = strategy_of(three, method, run_dir=tmp_path / "run", attempts=1, rounds=2)
    strategy.trial.problem = lambda server, number: "no client could train" if number == 2 else None
    with raises(RunError, key="round", value=2, mentions=["no client could train"]):
        strategy.start(grid_of(three, method))
    one_round = dataclasses.replace(three, settings={**three.settings, "rounds": 1}).run(method)
    assert strategy.federation.state.round == 1
    assert same(one_round.server, strategy.federation.state.server)
    again = strategy_of(three, method, run_dir=tmp_path / "run", rounds=2)
    again.start(grid_of(three, method))
    assert same(dataclasses.replace(three, settings={**three.settings, "rounds": 2}).run(method).server,
                again.federation.state.server)  # fmt: skip


def test_outlier_is_the_upload_with_the_largest_entry() -> None:
    server = {"params": {"w": torch.zeros(2)}}
    uploads = {k: {"params": {"w": torch.ones(2)}, "n": torch.tensor(10.0)} for k in range(3)}
    uploads[1] = {**uploads[1], "n": torch.tensor(1000.0)}
    client, scores = outlier(uploads, server)
    assert (client, scores) == (1, {0: 1.0, 1: 100.0, 2: 1.0})


# Replies of the app's own evaluation


def evaluation(node_id: int, **metrics) -> Message:
    ask = Message(RecordDict(), node_id, "evaluate")
    reply = Message(RecordDict({"metrics": MetricRecord({k.replace("_", "-"): v for k, v in metrics.items()})}),
                    reply_to=ask)  # fmt: skip
    reply.metadata.__dict__["_src_node_id"] = node_id
    return reply


HOSTILE_METRICS = {
    "weight a list": {"acc": 0.0, "num_examples": [1, 2]},
    "weight NaN": {"acc": 0.0, "num_examples": float("nan")},
    "weight infinite": {"acc": 0.0, "num_examples": float("inf")},
    "weight negative": {"acc": 0.0, "num_examples": -5},
    "weight huge": {"acc": 0.0, "num_examples": 10**30},
    "metric NaN": {"acc": float("nan"), "num_examples": 10},
    "metric infinite": {"acc": float("-inf"), "num_examples": 10},
    "other names": {"foo": 0.5, "num_examples": 10**6},
}


@pytest.mark.parametrize("what", HOSTILE_METRICS)
@pytest.mark.parametrize("first", [True, False])
def test_hostile_evaluation_is_logged_and_left_out(what: str, first: bool, caplog) -> None:
    honest = [evaluation(1, acc=0.5, num_examples=10), evaluation(2, acc=1.0, num_examples=30)]
    hostile = evaluation(17, **HOSTILE_METRICS[what])
    metrics = average_metrics([hostile, *honest] if first else [*honest, hostile], 1e9)
    assert dict(metrics) == {"acc": pytest.approx(0.875)}
    assert what == "other names" or [r.args[0] for r in caplog.records] == [17]


def test_evaluation_errors_are_logged_by_node(caplog) -> None:
    failed = Message(Error(2, "Traceback\nKeyError: 'x'"), reply_to=Message(RecordDict(), 17, "evaluate"))
    failed.metadata.__dict__["_src_node_id"] = 17
    empty = Message(RecordDict(), reply_to=Message(RecordDict(), 18, "evaluate"))
    empty.metadata.__dict__["_src_node_id"] = 18
    assert average_metrics([failed, empty], 1e9) is None
    assert [r.args[0] for r in caplog.records] == [17, 18]


def test_text_of_a_node_is_printable() -> None:
    assert one_line("a\x1b]0;title\x07b\nc\u202e") == r"a\x1b]0;title\x07b c\u202e"
    assert len(one_line("x" * 10**6)) == 240


def test_request_that_cannot_be_sent_is_no_clients_fault(three: Problem, monkeypatch) -> None:
    grid = grid_of(three, fk.methods.FedAvg())
    push = grid.push_messages
    monkeypatch.setattr(
        grid,
        "push_messages",
        lambda sent: [k if m.metadata.message_type != "train" else "" for k, m in zip(push(sent), sent, strict=True)],
    )
    strategy = strategy_of(three, fk.methods.FedAvg(), attempts=1)
    with raises(RunError, key="round", mentions=["could not be sent"]):
        strategy.start(grid)
    assert not strategy.pending.rejected


def test_silent_node_is_waited_for_once(three: Problem, monkeypatch) -> None:
    grid = grid_of(three, fk.methods.FedAvg())
    silent = grid.node_of(2)
    answer, waits = silent.answer, []
    monkeypatch.setattr(silent, "answer", lambda *args: None)
    monkeypatch.setattr(nodes, "exchange", lambda grid, sent, timeout: (
        waits.append((len(sent), timeout)) if sent else None, exchange(grid, sent, 0.0))[1])  # fmt: skip
    known = nodes.Nodes(3, 50.0)
    for _ in range(3):
        known.refresh(grid)
    assert (waits, sorted(known.of_client)) == ([(3, 50.0)], [0, 1])
    ((node, key),) = known.queries.items()
    monkeypatch.undo()
    reply = answer(node, Message(RecordDict(), node, f"query.{messages.QUERY}"), {})
    reply.metadata.__dict__["_reply_to_message_id"] = key
    grid.late[key] = reply
    known.refresh(grid)
    assert (sorted(known.of_client), known.queries) == ([0, 1, 2], {})


def test_alerts_are_bounded() -> None:
    pending = PendingRound(1, [0], 0.0)
    for number in range(1000):
        pending.alert(f"alert {number}")
    assert len(pending.alerts) == nodes.MOST_ALERTS


def test_refused_start_leaves_no_folder(three: Problem, tmp_path: Path) -> None:
    with raises(ConfigError, key="client-keys"):
        strategy_of(three, fk.methods.FedAvg(), run_dir=tmp_path / "run", client_keys=tmp_path / "none")
    with raises(ConfigError, key="fraction_evaluate"):
        private = {"dp_clip": 1.0, "dp_noise": 1.0, "fraction_evaluate": 0.5}
        strategy_of(three, fk.methods.FedAvg(), run_dir=tmp_path / "run", **private)
    assert not (tmp_path / "run").exists()


def test_limit_of_examples_can_be_set(three: Problem) -> None:
    method, most = fk.methods.FedAvg(), len(three.clients[0])
    strategy = strategy_of(three, method, rounds=1, max_examples=most, min_replies=1)
    strategy.start(grid_of(three, method))
    expected = [k for k, part in enumerate(three.clients) if len(part) <= most]
    assert records_of(strategy)[0]["cohort"] == expected
    assert Limits().examples > most
