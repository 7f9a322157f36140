"""Flower grid in one process: the real apps and messages, sent as bytes, with faults that a test can add."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedkeep.flower import Strategy, client_app
from support.problems import Problem

# Flower's messages name the task of their process; a test may make one before there is a grid
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

Fault = Callable[[Message, Callable[[], Message]], Message | None]


def through_bytes(message: Message) -> Message:
    """Serialise a message as Flower does, and build it again from the bytes."""
    objects = get_all_nested_objects(message)
    contents = {key: one.deflate() for key, one in objects.items()}
    copy = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(copy, Message)
    copy.metadata.__dict__["_message_id"] = message.metadata.message_id or message.object_id
    return copy


@dataclass
class SuperNode:
    """A node: its app, its config and the state in its context.

    `fault` may change or drop its replies. `received` are the messages it got, `errors` what its app raised.
    """

    app: ClientApp
    config: dict[str, Any]
    state: RecordDict = field(default_factory=RecordDict)
    public_key: bytes = b""
    fault: Fault | None = None
    received: list[Message] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def answer(self, node: int, message: Message, run_config: dict[str, Any]) -> Message | None:
        def work() -> Message:
            context = Context(1, node, self.config, self.state, run_config)
            try:
                return self.app(message, context)
            except Exception as error:
                self.errors.append(error)
                return Message(Error(2, f"Traceback\n{type(error).__name__}: {error}"), reply_to=message)

        self.received.append(message)
        if self.fault is not None and message.metadata.message_type == "train":
            return self.fault(message, work)
        return work()


class MemoryGrid(Grid):
    """Passes messages to nodes and returns their replies."""

    def __init__(self, nodes: Iterable[SuperNode], run_config: dict[str, Any] | None = None) -> None:
        ids = itertools.count(101, 7)
        self.nodes = {next(ids): node for node in nodes}
        self.run_config = run_config or {}
        self.late: dict[str, Any] = {}  # message id -> the reply, or a function that returns it
        self._run: Any = None

    def node_of(self, client: int) -> SuperNode:
        """Return the node of a client."""
        return next(n for n in self.nodes.values() if n.config.get("client-id", n.config.get("partition-id")) == client)

    def set_run(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        return self._run

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=number, public_key=one.public_key) for number, one in self.nodes.items()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Let every node answer at once; a reply waits until it is pulled."""
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = message.object_id
            if node not in self.nodes:
                lost = Message(Error(5, "node unavailable"), reply_to=message)
                lost.metadata.__dict__["_src_node_id"] = 1
                self.late[message.object_id] = lost
                continue
            reply = self.nodes[node].answer(node, through_bytes(message), self.run_config)
            if reply is not None:
                self.late[message.object_id] = reply
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return replies as Flower does: built from the bytes that a node has sent."""
        replies = [self.late.pop(key) for key in message_ids if key in self.late]
        return [reply() if callable(reply) else through_bytes(reply) for reply in replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send and fetch all at once, as Flower's own strategies do."""
        return self.pull_messages(self.push_messages(list(messages)))


def node(problem: Problem, method, client: int, **config) -> SuperNode:
    """Return the node of one of the problem's clients."""
    index = torch.from_numpy(problem.clients[client])
    part = dataclasses.replace(problem.data, x_train=problem.data.x_train[index], y_train=problem.data.y_train[index])
    app = client_app(method, lambda: problem.model, lambda context: part, report_loss=True)
    return SuperNode(app, {"client-id": client, **config})


def grid_of(problem: Problem, method, **config) -> MemoryGrid:
    """Return a grid with a node for each of the problem's clients."""
    return MemoryGrid([node(problem, method, k, **config) for k in reversed(range(len(problem.clients)))])


def strategy_of(problem: Problem, method, **options) -> Strategy:
    """Return the strategy of the problem's federation."""
    settings = {**problem.settings, "engine": "auto", **options}
    return Strategy(
        method,
        lambda: problem.model,
        num_clients=len(problem.clients),
        data_fn=lambda: problem.data,
        **{"patience": 0.05, "timeout": 0.3, **settings},
    )
