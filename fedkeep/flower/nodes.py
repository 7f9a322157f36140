"""Which node is which client, and which of them can be asked now."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedkeep.flower import messages, records

log = logging.getLogger("fedkeep")

UNAVAILABLE = 5  # Flower's code for a node that has gone


class Nodes:
    """The connected nodes, by the client that each says it is."""

    def __init__(self, n_clients: int, patience: float) -> None:
        self.n_clients, self.patience = n_clients, patience
        self.of_client: dict[int, int] = {}  # client -> node
        self.waiting: dict[int, int] = {}  # node -> the client it says it is, as another node does
        self.refused: dict[int, str] = {}  # node -> why it can be no client
        self.busy: dict[int, str] = {}  # node -> the message that it has not answered yet

    def refresh(self, grid: Grid) -> None:
        """Drop the nodes that have gone, and ask the new ones which client they are."""
        present = set(grid.get_node_ids())
        self.of_client = {client: node for client, node in self.of_client.items() if node in present}
        self.refused = {node: why for node, why in self.refused.items() if node in present}
        self.busy = {node: sent for node, sent in self.busy.items() if node in present}
        for node, client in list(self.waiting.items()):
            if node not in present or client not in self.of_client:
                del self.waiting[node]
                if node in present:
                    self.of_client[client] = node
        new = sorted(present - {*self.of_client.values(), *self.refused, *self.waiting})
        if not new:
            return
        asked = [Message(records.to_records({}), node, f"{MessageType.QUERY}.{messages.QUERY}") for node in new]
        for reply in grid.send_and_receive(asked, timeout=self.patience):
            if (found := sender(reply, asked)) is not None:
                self._enter(found, reply)

    def forget(self, node: int) -> None:
        """Drop a node that did not answer as one should; if it is still there, it is asked again who it is."""
        self.of_client = {client: other for client, other in self.of_client.items() if other != node}

    def client(self, node: int) -> int | None:
        """Return which client a node is."""
        return next((client for client, other in self.of_client.items() if other == node), None)

    def collect_late(self, grid: Grid) -> list[Message]:
        """Look whether busy nodes have answered in the meantime, and return what they said."""
        if not self.busy:
            return []
        late = list(grid.pull_messages(list(self.busy.values())))
        answered = {reply.metadata.reply_to_message_id for reply in late}
        self.busy = {node: sent for node, sent in self.busy.items() if sent not in answered}
        return late

    def _enter(self, node: int, reply: Message) -> None:
        """Note which client a node is, or why it can be none."""
        if reply.has_error():
            if reply.error.code != UNAVAILABLE:
                self._refuse(node, last_line(reply.error.reason))
            return
        config = reply.content.config_records.get(records.CONFIG)
        client = config.get("client") if config is not None else None
        if isinstance(client, bool) or not isinstance(client, int) or not 0 <= client < self.n_clients:
            self._refuse(node, f"it says it is client {client!r}; there are clients 0 to {self.n_clients - 1}")
        elif client in self.of_client:
            log.warning("node %d says it is client %d, but so does node %d", node, client, self.of_client[client])
            self.waiting[node] = client
        else:
            self.of_client[client] = node

    def _refuse(self, node: int, why: str) -> None:
        self.refused[node] = why
        log.warning("node %d cannot take part: %s", node, why)


def sender(reply: Message, sent: Iterable[Message]) -> int | None:
    """Return the node that a reply is about: the SuperLink answers in the place of nodes that have gone."""
    for message in sent:
        if message.metadata.message_id == reply.metadata.reply_to_message_id:
            return int(message.metadata.dst_node_id)
    return None


def last_line(reason: str | None) -> str:
    """Return what an error says, without the trail that led to it."""
    lines = [line.strip() for line in (reason or "no reason given").splitlines() if line.strip()]
    return lines[-1][:500] if lines else "no reason given"
