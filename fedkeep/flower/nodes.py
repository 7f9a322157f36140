"""Connected nodes: which client each one is, and which are busy."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedkeep.flower import messages, records

log = logging.getLogger("fedkeep")

NODE_UNAVAILABLE = 5  # Flower's error code for a node that is no longer connected


class Nodes:
    """The connected nodes, by client."""

    def __init__(self, n_clients: int, patience: float) -> None:
        self.n_clients, self.patience = n_clients, patience
        self.of_client: dict[int, int] = {}  # client -> node
        self.waiting: dict[int, int] = {}  # node -> its client, while another node is connected as the same client
        self.rejected: dict[int, str] = {}  # node -> why it cannot be a client
        self.busy: dict[int, str] = {}  # node -> id of the message that it has not answered yet

    def refresh(self, grid: Grid) -> None:
        """Drop the nodes that have disconnected, and ask the new ones for their client id."""
        present = set(grid.get_node_ids())
        self.of_client = {client: node for client, node in self.of_client.items() if node in present}
        self.rejected = {node: reason for node, reason in self.rejected.items() if node in present}
        self.busy = {node: message for node, message in self.busy.items() if node in present}
        for node, client in list(self.waiting.items()):
            if node not in present or client not in self.of_client:
                del self.waiting[node]
                if node in present:
                    self.of_client[client] = node
        new = sorted(present - {*self.of_client.values(), *self.rejected, *self.waiting})
        if not new:
            return
        queries = [Message(records.to_records({}), node, f"{MessageType.QUERY}.{messages.QUERY}") for node in new]
        for reply in grid.send_and_receive(queries, timeout=self.patience):
            if (node_id := sender(reply, queries)) is not None:
                self._register(node_id, reply)

    def forget(self, node: int) -> None:
        """Drop a node; if it is still connected, the next `refresh` asks it for its client id again."""
        self.of_client = {client: other for client, other in self.of_client.items() if other != node}

    def client(self, node: int) -> int | None:
        """Return which client a node is, or None."""
        return next((client for client, other in self.of_client.items() if other == node), None)

    def collect_late(self, grid: Grid) -> list[Message]:
        """Return the replies of busy nodes that have arrived since, and mark those nodes as free."""
        if not self.busy:
            return []
        late = list(grid.pull_messages(list(self.busy.values())))
        answered = {reply.metadata.reply_to_message_id for reply in late}
        self.busy = {node: message for node, message in self.busy.items() if message not in answered}
        return late

    def _register(self, node: int, reply: Message) -> None:
        """Store which client a node is, or why it cannot be one."""
        if reply.has_error():
            if reply.error.code != NODE_UNAVAILABLE:
                self._reject(node, last_line(reply.error.reason))
            return
        config = reply.content.config_records.get(records.CONFIG)
        client = config.get("client") if config is not None else None
        if isinstance(client, bool) or not isinstance(client, int) or not 0 <= client < self.n_clients:
            self._reject(node, f"its client-id is {client!r}, but the clients are 0 to {self.n_clients - 1}")
        elif client in self.of_client:
            log.warning("node %d has the client-id %d, which node %d has too", node, client, self.of_client[client])
            self.waiting[node] = client
        else:
            self.of_client[client] = node

    def _reject(self, node: int, reason: str) -> None:
        self.rejected[node] = reason
        log.warning("node %d cannot take part: %s", node, reason)


def sender(reply: Message, sent: Iterable[Message]) -> int | None:
    """Return the node that a reply is about; for a node that has disconnected, the SuperLink replies instead."""
    for message in sent:
        if message.metadata.message_id == reply.metadata.reply_to_message_id:
            return int(message.metadata.dst_node_id)
    return None


def last_line(reason: str | None) -> str:
    """Return an error's message without its traceback."""
    lines = [line.strip() for line in (reason or "no reason given").splitlines() if line.strip()]
    return lines[-1][:500] if lines else "no reason given"
