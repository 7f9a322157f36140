"""Mutated replies of one node at the server: an update, an evaluation, or the answer to who it is.

The two honest clients must be used whatever the third one sends, and the server's tree must stay finite.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message, MetricRecord, RecordDict
from support.flower_grid import MemoryGrid, node
from support.problems import Problem, three_clients

import fedkeep as fk
from fedkeep import tree
from fedkeep.flower import Strategy
from fedkeep.flower.exchange import exchange
from fedkeep.flower.nodes import Nodes, sender
from fedkeep.flower.pending_round import PendingRound
from fuzz._mutations import mutate

METHODS = ("fedavg", "scaffold", "fedcurv", "fednova", "flashback", "feddyn")
WHOLE = 0.02  # the share of tries that run a whole round, honest replies and trial client included


class ReplayGrid(MemoryGrid):
    """A grid that returns given replies: each is a function that builds it."""

    def __init__(self, replies: dict[int, Callable[[], Message]]) -> None:
        super().__init__([])
        self.replies = replies

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        self.late = {m.metadata.message_id: self.replies[m.metadata.dst_node_id] for m in messages}
        return [m.metadata.message_id for m in messages]


class Federation:
    """A strategy in its first round, with the requests and honest replies of three nodes."""

    def __init__(self, name: str) -> None:
        problem = _small(three_clients())
        method = fk.methods.get(name)(**({"E_s": 1} if name == "flashback" else {}))
        self.strategy = Strategy(
            method,
            lambda: problem.model,
            num_clients=3,
            data_fn=lambda: problem.data,
            patience=0.01,
            timeout=0.01,
            **problem.settings,
        )
        grid = MemoryGrid([node(problem, method, k) for k in range(3)])
        self.sent = self.strategy.configure_train(1, None, {}, grid)
        grid.push_messages(self.sent)
        self.replies = {m.metadata.dst_node_id: grid.pull_messages([m.metadata.message_id])[0] for m in self.sent}
        self.hostile = next(node for client, node in self.strategy.nodes.of_client.items() if client == 2)
        self.of_client = dict(self.strategy.nodes.of_client)
        self.expected = self.strategy.pending.expected
        assert self.expected is not None
        self.honest = {k: self.expected.unpack(self.replies[self.of_client[k]].content) for k in (0, 1)}

    def start(self, whole: bool) -> None:
        """Begin round 1 anew; unless it is to be the `whole` round, with the honest updates already received."""
        sent = self.sent if whole else [m for m in self.sent if m.metadata.dst_node_id == self.hostile]
        self.strategy.pending = PendingRound(1, [0, 1, 2], 0.0, self.expected, sent)
        self.strategy.pending.uploads.update({} if whole else self.honest)
        self.strategy.nodes.busy, self.strategy.nodes.alerts = {}, []
        self.strategy.nodes.of_client = dict(self.of_client)


@functools.cache
def _federation(name: str) -> Federation:
    return Federation(name)


def try_one(seed: int, folder: Path) -> bool:
    """Let one of three nodes answer with a mutated message; return whether its answer was used."""
    rng = random.Random(seed)
    logging.disable(logging.CRITICAL)
    try:
        kind = rng.random()
        federation = _federation(rng.choice(METHODS))
        if kind < 0.05:
            return _evaluation(federation, rng)
        if kind < 0.1:
            return _registration(federation, rng)
        return _update(federation, rng)
    finally:
        logging.disable(logging.NOTSET)


def _update(federation: Federation, rng: random.Random) -> bool:
    whole = rng.random() < WHOLE
    federation.start(whole)
    strategy, pending, hostile = federation.strategy, federation.strategy.pending, federation.hostile
    strategy.trial.trains = None if whole else False
    replies: dict[int, Any] = {number: functools.partial(_same, reply) for number, reply in federation.replies.items()}
    replies[hostile] = mutate(federation.replies[hostile], rng)
    received = exchange(ReplayGrid(replies), pending.sent, 0.01)
    if not whole:
        pending.collect(received, strategy.nodes)
        pending.answered.update(m.metadata.message_id for m in pending.sent)
        assert 2 in {*pending.uploads, *pending.failed, *pending.skipped}, "the reply was lost without a word"
    if whole or 2 in pending.uploads:
        aggregated, _ = strategy.aggregate_train(1, received if whole else [])
        assert aggregated is not None, pending.failed
        assert {0, 1} <= set(pending.uploads), pending.failed
        assert all(bool(t.isfinite().all()) for t in tree.leaves(pending.server) if t.is_floating_point())
    pending.record(0.1)
    return 2 in pending.uploads


def _registration(federation: Federation, rng: random.Random) -> bool:
    """Answer the question for the client id with a mutated reply."""
    nodes, queries = Nodes(3, 0.01), [Message(RecordDict(), k, "query.fedkeep") for k in (5, 6)]
    for query in queries:
        query.metadata.__dict__["_message_id"] = query.object_id
    answers = {}
    for client, query in enumerate(queries):
        answers[query.metadata.dst_node_id] = functools.partial(_same, _answer(query, client))
    answers[6] = mutate(_answer(queries[1], 1), rng)
    for reply in exchange(ReplayGrid(answers), queries, 0.01):
        nodes._register(sender(reply, queries), reply)
    assert nodes.of_client.get(0) == 5 or 6 in nodes.of_client.values()
    return 6 in nodes.of_client.values()


def _evaluation(federation: Federation, rng: random.Random) -> bool:
    """Answer a request to evaluate with a mutated reply."""
    honest, ask = [], []
    for k in (5, 6, 7):
        ask.append(Message(RecordDict(), k, "evaluate"))
        ask[-1].metadata.__dict__["_message_id"] = ask[-1].object_id
        metrics = RecordDict({"metrics": MetricRecord({"acc": 0.5, "num-examples": 10})})
        honest.append(Message(metrics, reply_to=ask[-1]))
    replies: dict[int, Any] = {k: functools.partial(_same, one) for k, one in zip((5, 6, 7), honest, strict=True)}
    replies[7] = mutate(honest[2], rng)
    if rng.random() < 0.5:
        value = rng.choice([[1, 2], float("nan"), 10**30, -1, 0, float("inf"), [], 1e300])
        content = RecordDict({"metrics": MetricRecord({rng.choice(["acc", "num-examples", "other"]): value})})
        replies[7] = functools.partial(_same, Message(content, reply_to=ask[2]))
    metrics = federation.strategy.aggregate_evaluate(1, exchange(ReplayGrid(replies), ask, 0.01))
    assert metrics is not None
    assert abs(metrics["acc"]) <= federation.strategy.limits.value
    return metrics["acc"] != 0.5


def _answer(query: Message, client: int) -> Message:
    from fedkeep.flower import records

    return Message(records.to_records({}, {"version": 1, "client": client}), reply_to=query)


def _same(message: Message) -> Message:
    return message


def _small(problem: Problem) -> Problem:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4))
    settings = {**problem.settings, "epochs": 1, "engine": "auto", "dtype": "float32"}
    return Problem(model, problem.data, problem.clients, settings)
