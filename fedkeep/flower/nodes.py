"""Connected nodes: which client each one is, and which are busy."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedkeep._util.text import one_line
from fedkeep.flower import messages, records
from fedkeep.flower.client_keys import ClientKeys, key_fingerprint
from fedkeep.flower.exchange import UNSENT, exchange, fetch_reply
from fedkeep.flower.update_checks import RejectedUpdate

log = logging.getLogger("fedkeep")

NODE_UNAVAILABLE = 5  # Flower's error code for a node that is no longer connected
MOST_ALERTS = 100  # of a round, and between two rounds


class Nodes:
    """The connected nodes, by client."""

    def __init__(self, n_clients: int, patience: float, client_keys: ClientKeys | None = None) -> None:
        self.n_clients, self.patience = n_clients, patience
        self.client_keys = client_keys or ClientKeys(None, n_clients, None)
        self.keys: dict[int, str] = {}  # node -> fingerprint of its public key
        self.of_client: dict[int, int] = {}  # client -> node
        self.waiting: dict[int, int] = {}  # node -> its client, while another node is connected as the same client
        self.rejected: dict[int, str] = {}  # node -> why it cannot be a client
        self.queries: dict[int, str] = {}  # node -> id of the query for its client id that it has not answered yet
        self.slow: set[int] = set()  # nodes that did not answer a query in time; `refresh` waits for others only
        self.busy: dict[int, str] = {}  # node -> id of the message that it has not answered yet
        self.alerts: list[str] = []  # since the last round: who claimed to be somebody else

    def refresh(self, grid: Grid) -> None:
        """Drop the nodes that have disconnected, and ask the new ones for their client id."""
        present = {int(info.node_id): info for info in grid.get_nodes()}
        self.keys = {
            node: self.keys.get(node) or key_fingerprint(one.public_key, node) for node, one in present.items()
        }
        self.of_client = {client: node for client, node in self.of_client.items() if node in present}
        self.rejected = {node: reason for node, reason in self.rejected.items() if node in present}
        self.busy = {node: message for node, message in self.busy.items() if node in present}
        waiting, self.waiting = self.waiting, {}
        for node, client in waiting.items():
            if node in present:
                self._claim(node, client, again=True)
        self.queries = {node: message for node, message in self.queries.items() if node in present}
        self.slow &= present.keys()
        self._collect_answers(grid)
        known = {*self.of_client.values(), *self.rejected, *self.waiting, *self.queries}
        new = present.keys() - known
        self._ask(grid, sorted(new & self.slow), 0.0)
        self._ask(grid, sorted(new - self.slow), self.patience)

    def _ask(self, grid: Grid, new: list[int], timeout: float) -> None:
        """Ask nodes for their client id, and remember those that do not answer in time."""
        queries = [Message(records.to_records({}), node, f"{MessageType.QUERY}.{messages.QUERY}") for node in new]
        silent = {int(query.metadata.dst_node_id) for query in queries}
        for reply in exchange(grid, queries, timeout):
            if (node_id := sender(reply, queries)) is not None:
                silent.discard(node_id)
                self._register(node_id, reply)
        self.slow |= silent
        for query in queries:
            if (node_id := int(query.metadata.dst_node_id)) in silent:
                self.queries[node_id] = query.metadata.message_id

    def _collect_answers(self, grid: Grid) -> None:
        """Register the nodes that have answered an earlier query since, without waiting for any."""
        for node, reply in _arrived(grid, self.queries):
            if isinstance(reply, RejectedUpdate):
                self._reject(node, str(reply))
            else:
                self._register(node, reply)

    def forget(self, node: int) -> None:
        """Drop a node; if it is still connected, the next `refresh` asks it for its client id again."""
        self.of_client = {client: other for client, other in self.of_client.items() if other != node}

    def client(self, node: int) -> int | None:
        """Return which client a node is, or None."""
        return next((client for client, other in self.of_client.items() if other == node), None)

    def collect_late(self, grid: Grid) -> list[Message]:
        """Return the replies of busy nodes that have arrived since, and mark those nodes as free."""
        late = []
        for node, reply in _arrived(grid, self.busy):
            if isinstance(reply, RejectedUpdate):
                self.alert(f"a late reply of node {node} was dropped: {reply}")
            else:
                reply.metadata.__dict__["_src_node_id"] = node  # also of an error that the SuperLink reports
                late.append(reply)
        return late

    def alert(self, text: str) -> None:
        """Log a claim or reply that no honest node makes; the record of the round keeps it."""
        add_alert(self.alerts, text, text)

    def _register(self, node: int, reply: Message) -> None:
        """Store which client a node is, or why it cannot be one."""
        if reply.has_error():
            if reply.error.code not in (NODE_UNAVAILABLE, UNSENT):
                self._reject(node, last_line(reply.error.reason))
            return
        config = reply.content.config_records.get(records.CONFIG)
        client = config.get("client") if config is not None else None
        if isinstance(client, bool) or not isinstance(client, int) or not 0 <= client < self.n_clients:
            self._reject(
                node, f"its client-id is {one_line(repr(client), 60)}, but the clients are 0 to {self.n_clients - 1}"
            )
        else:
            self._claim(node, client)

    def _claim(self, node: int, client: int, again: bool = False) -> None:
        """Make a node a client, if it may be that one and no other node is; the owner of the id has precedence."""
        key, other = self.keys.get(node, f"node:{node}"), self.of_client.get(client)
        problem = self.client_keys.problem(client, key)
        if problem is not None:
            self._reject(node, problem)
            self.alert(f"node {node} claims to be client {client}: {problem}")
            return
        owner = self.client_keys.owns(client, key)
        if other is not None and not (owner and not self.client_keys.owns(client, self.keys.get(other, ""))):
            self.waiting[node] = client
            if not again:
                self.alert(f"node {node} ({key}) has the client-id {client}, which node {other} has too")
            return
        if other is not None:
            self.alert(f"node {node} ({key}) is client {client} again; node {other} stood in for it")
            self.waiting[other] = client
        elif not owner and client in self.client_keys.bound:
            self.alert(f"node {node} ({key}) stands in for client {client}, whose own node is not connected")
        self.client_keys.bind(client, key)
        self.of_client[client] = node

    def _reject(self, node: int, reason: str) -> None:
        self.rejected[node] = reason
        log.warning("node %d cannot take part: %s", node, reason)


def _arrived(grid: Grid, waiting: dict[int, str]) -> Iterator[tuple[int, Message | RejectedUpdate]]:
    """Yield the nodes whose replies to these messages have arrived, with the reply or why it cannot be read.

    They are removed from `waiting`.
    """
    for node, message in list(waiting.items()):
        reply: Message | RejectedUpdate | None
        try:
            reply = fetch_reply(grid, message, node)
        except RejectedUpdate as error:
            reply = error
        if reply is not None:
            del waiting[node]
            yield node, reply


def add_alert(alerts: list[str], text: str, logged: str) -> None:
    """Log an alert and keep its text, unless it repeats one or there are too many."""
    if text not in alerts and len(alerts) < MOST_ALERTS:
        alerts.append(text)
        log.warning("security: %s", logged)


def sender(reply: Message, sent: Iterable[Message]) -> int | None:
    """Return the node that a reply is about; for a node that has disconnected, the SuperLink replies instead."""
    for message in sent:
        if message.metadata.message_id == reply.metadata.reply_to_message_id:
            return int(message.metadata.dst_node_id)
    return None


def last_line(reason: str | None) -> str:
    """Return an error's message without its traceback, fit for a log."""
    lines = [line.strip() for line in (reason or "")[-4000:].splitlines() if line.strip()]
    return one_line(lines[-1], 500) if lines else "no reason given"
