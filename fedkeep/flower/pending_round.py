"""A round that is not applied yet: who was asked, what came back, and why the rest is missing."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict

from fedkeep import tree
from fedkeep.flower import records, update_checks
from fedkeep.flower.nodes import UNAVAILABLE, Nodes, last_line, sender
from fedkeep.flower.update_checks import Limits, Refused
from fedkeep.runs.history import Record
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")


@dataclass
class Pending:
    """What is known of a round so far. Nothing of it counts until the whole round is applied."""

    number: int
    sampled: list[int]
    began: float
    sent: list[Message] = field(default_factory=list)  # of the last attempt
    uploads: dict[int, Tree] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)  # clients without examples
    fresh: set[int] = field(default_factory=set)  # clients that came back without their state
    failed: dict[int, str] = field(default_factory=dict)  # why a client's update is missing
    refused: set[int] = field(default_factory=set)  # clients that are not asked again in this round
    bytes_down: int = 0
    server: Tree | None = None  # what the aggregation made

    def missing(self) -> list[int]:
        """Return the clients to ask, or to ask again."""
        done = {*self.uploads, *self.skipped, *self.refused}
        return [client for client in self.sampled if client not in done]

    def needed(self, share: float | int) -> int:
        """Return how many good replies the round needs: a share of its clients, or a number.

        >>> [Pending(1, [0, 1, 2], 0.0).needed(share) for share in (0.5, 1.0, 2, 9)]
        [2, 3, 2, 3]
        """
        size = len(self.sampled) - len(self.skipped)
        return min(size, max(1, share if isinstance(share, int) else math.ceil(share * size - 1e-9)))

    def collect(self, replies: Iterable[Message], nodes: Nodes, params: Tree, limits: Limits, late: bool) -> None:
        """Take in what nodes said, to the messages sent last or, `late`, to earlier ones."""
        for reply in replies:
            node = int(reply.metadata.src_node_id) if late else sender(reply, self.sent)
            client = nodes.client(node) if node is not None else None
            if node is None or client is None:
                continue
            if reply.has_error():
                if reply.error.code == UNAVAILABLE:
                    nodes.forget(node)
                if not late:
                    self.fail(client, last_line(reply.error.reason))
                continue
            try:
                self._take(client, reply.content, params, limits)
            except Refused as error:
                self.refuse(client, nodes, str(error))

    def note_silence(self, replies: Iterable[Message], nodes: Nodes, timeout: float) -> None:
        """Note who has not answered: those nodes are still at work, and are not asked for more."""
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        for message in self.sent:
            node = int(message.metadata.dst_node_id)
            if message.metadata.message_id not in answered and (client := nodes.client(node)) is not None:
                nodes.busy[node] = message.metadata.message_id
                self.fail(client, f"no reply within {timeout:g} seconds")

    def refuse(self, client: int, nodes: Nodes, why: str) -> None:
        """Leave a client's update out, and do not ask for another in this round."""
        self.uploads.pop(client, None)
        self.refused.add(client)
        self.failed[client] = f"its update was refused: {why}"
        node = nodes.of_client.get(client)
        log.warning("round %d: the update of client %d (node %s) was refused: %s", self.number, client, node, why)

    def fail(self, client: int, why: str) -> None:
        """Note why a client's update is missing."""
        self.failed[client] = why
        log.warning("round %d, client %d: %s", self.number, client, why)

    def why(self) -> str:
        """Say in one line why updates are missing."""
        return "; ".join(f"client {k}: {why}" for k, why in sorted(self.failed.items()))

    def record(self, lr: float) -> Record:
        """Write down the round: the simulation's fields and, where there were any, `failed` and `fresh` clients."""
        cohort = sorted(self.uploads)
        told = [self.losses[k] for k in cohort if k in self.losses]
        record: Record = {
            "round": self.number,
            "lr": lr,
            "cohort": cohort,
            "skipped": sorted(self.skipped),
            "bytes_down": self.bytes_down,
            "bytes_up": sum(tree.nbytes(upload) for upload in self.uploads.values()),
            "train_loss": sum(told) / len(told) if told and len(told) == len(cohort) else None,
        }
        more: dict[str, Any] = {
            "failed": {str(k): why for k, why in sorted(self.failed.items()) if k not in cohort},
            "fresh": sorted(self.fresh),
        }
        return {**record, **{key: value for key, value in more.items() if value}}

    def _take(self, client: int, content: RecordDict, params: Tree, limits: Limits) -> None:
        """Check one client's reply and keep what it holds, if it is of this round."""
        said = content.config_records.get(records.CONFIG)
        if said is None or said.get("client") != client:
            raise Refused("its reply does not say that it is this client's")
        if said.get("round") != self.number or client not in self.missing():
            return
        if said.get("empty"):
            self.skipped.add(client)
        else:
            self.uploads[client] = update_checks.unpack_upload(content, params, limits)
            if isinstance(loss := said.get("loss"), float) and math.isfinite(loss):
                self.losses[client] = loss
            if said.get("fresh"):
                self.fresh.add(client)
                log.warning("client %d came back without its state and was treated as new", client)
        self.failed.pop(client, None)
