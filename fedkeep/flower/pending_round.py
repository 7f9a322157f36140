"""Round in progress: the replies received so far, and why others are missing."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict

from fedkeep import tree
from fedkeep.flower import records
from fedkeep.flower.nodes import NODE_UNAVAILABLE, Nodes, last_line, sender
from fedkeep.flower.update_checks import Limits, RejectedUpdate, unpack_upload
from fedkeep.runs.history import Record
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")


@dataclass
class PendingRound:
    """A round that is not applied yet. Nothing in here has an effect until the whole round is applied."""

    number: int
    sampled: list[int]
    began: float
    sent: list[Message] = field(default_factory=list)  # the messages of the last attempt
    uploads: dict[int, Tree] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)  # clients without examples
    lost_state: set[int] = field(default_factory=set)  # clients that replied, but had lost their state
    failed: dict[int, str] = field(default_factory=dict)  # why a client's update is missing
    rejected: dict[int, RejectedUpdate] = field(default_factory=dict)  # clients not to be asked again in this round
    bytes_down: int = 0
    server: Tree | None = None  # the server's tree after aggregation

    def missing(self) -> list[int]:
        """Return the clients to ask, or to ask again."""
        done = {*self.uploads, *self.skipped, *self.rejected}
        return [client for client in self.sampled if client not in done]

    def needed(self, share: float | int) -> int:
        """Return how many valid replies the round needs: a share of its clients, or a number.

        >>> [PendingRound(1, [0, 1, 2], 0.0).needed(share) for share in (0.5, 1.0, 2, 9)]
        [2, 3, 2, 3]
        """
        size = len(self.sampled) - len(self.skipped)
        return min(size, max(1, share if isinstance(share, int) else math.ceil(share * size - 1e-9)))

    def collect(self, replies: Iterable[Message], nodes: Nodes, params: Tree, limits: Limits, late: bool) -> None:
        """Check and store replies to the last messages or, with `late`, to earlier ones."""
        for reply in replies:
            node = int(reply.metadata.src_node_id) if late else sender(reply, self.sent)
            client = nodes.client(node) if node is not None else None
            if node is None or client is None:
                continue
            if reply.has_error():
                if reply.error.code == NODE_UNAVAILABLE:
                    nodes.forget(node)
                if not late:
                    self.fail(client, last_line(reply.error.reason))
                continue
            try:
                self._store_reply(client, reply.content, params, limits)
            except RejectedUpdate as error:
                self.reject(client, nodes, error)

    def mark_busy(self, replies: Iterable[Message], nodes: Nodes, timeout: float) -> None:
        """Mark the nodes that have not replied in time as busy; they get no other message until they reply."""
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        for message in self.sent:
            node = int(message.metadata.dst_node_id)
            if message.metadata.message_id not in answered and (client := nodes.client(node)) is not None:
                nodes.busy[node] = message.metadata.message_id
                self.fail(client, f"no reply within {timeout:g} seconds")

    def reject(self, client: int, nodes: Nodes, error: RejectedUpdate) -> None:
        """Drop a client's update, and do not ask for another in this round."""
        self.uploads.pop(client, None)
        self.rejected[client] = error
        self.failed[client] = f"its update was rejected: {error}"
        node = nodes.of_client.get(client)
        log.warning("round %d: the update of client %d (node %s) was rejected: %s", self.number, client, node, error)

    def fail(self, client: int, reason: str) -> None:
        """Record why a client's update is missing."""
        self.failed[client] = reason
        log.warning("round %d, client %d: %s", self.number, client, reason)

    def failure_summary(self) -> str:
        """Return in one line why updates are missing."""
        return format_failures(dict(sorted(self.failed.items())))

    def record(self, lr: float) -> Record:
        """Return the round's record: the fields of a simulation and, unless empty, `failed` and `fresh` clients."""
        cohort = sorted(self.uploads)
        losses = [self.losses[k] for k in cohort if k in self.losses]
        record: Record = {
            "round": self.number,
            "lr": lr,
            "cohort": cohort,
            "skipped": sorted(self.skipped),
            "bytes_down": self.bytes_down,
            "bytes_up": sum(tree.nbytes(upload) for upload in self.uploads.values()),
            "train_loss": sum(losses) / len(losses) if losses and len(losses) == len(cohort) else None,
        }
        optional: dict[str, Any] = {
            "failed": {str(k): reason for k, reason in sorted(self.failed.items()) if k not in cohort},
            "fresh": sorted(self.lost_state),
        }
        return {**record, **{key: value for key, value in optional.items() if value}}

    def _store_reply(self, client: int, content: RecordDict, params: Tree, limits: Limits) -> None:
        """Check one client's reply and store its upload, if it is a reply to this round."""
        config = content.config_records.get(records.CONFIG)
        if config is None or config.get("client") != client:
            raise RejectedUpdate(f"its reply does not contain client = {client}", key="client")
        if config.get("round") != self.number or client not in self.missing():
            return
        if config.get("empty"):
            self.skipped.add(client)
        else:
            self.uploads[client] = unpack_upload(content, params, limits)
            if isinstance(loss := config.get("loss"), float) and math.isfinite(loss):
                self.losses[client] = loss
            if config.get("fresh"):
                self.lost_state.add(client)
                log.warning("client %d has lost its state and was treated as new", client)
        self.failed.pop(client, None)


def format_failures(failed: Mapping[Any, str]) -> str:
    """Format why clients' updates are missing.

    >>> format_failures({1: "not connected", 4: "no reply within 600 seconds"})
    'client 1: not connected; client 4: no reply within 600 seconds'
    """
    return "; ".join(f"client {client}: {reason}" for client, reason in failed.items())
