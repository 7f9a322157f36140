"""Round in progress: the replies received so far, and why others are missing."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from fedkeep import tree
from fedkeep._util.text import one_line
from fedkeep.errors import FedkeepError
from fedkeep.flower import records
from fedkeep.flower.exchange import UNREADABLE
from fedkeep.flower.nodes import NODE_UNAVAILABLE, Nodes, add_alert, last_line, sender
from fedkeep.flower.update_checks import ExpectedUpload, RejectedUpdate, unreadable
from fedkeep.runs.history import Record
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")


@dataclass
class PendingRound:
    """A round that is not applied yet. Nothing in here has an effect until the whole round is applied."""

    number: int
    sampled: list[int]  # its clients, with those that replace others
    began: float
    expected: ExpectedUpload | None = None
    sent: list[Message] = field(default_factory=list)  # the messages of the last attempt
    uploads: dict[int, Tree] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)  # clients without examples
    lost_state: set[int] = field(default_factory=set)  # clients that replied, but had lost their state
    failed: dict[int, str] = field(default_factory=dict)  # why a client's update is missing
    rejected: dict[int, RejectedUpdate] = field(default_factory=dict)  # clients not to be asked again in this round
    replaced: set[int] = field(default_factory=set)  # clients in whose place others were asked
    answered: set[str] = field(default_factory=set)  # ids of messages that have a reply, of whatever kind
    stored_errors: set[str] = field(default_factory=set)  # those of them whose errors `screen` has stored
    alerts: list[str] = field(default_factory=list)  # what no honest node does
    bytes_down: int = 0
    server: Tree | None = None  # the server's tree after aggregation

    def missing(self) -> list[int]:
        """Return the clients to ask, or to ask again."""
        done = {*self.uploads, *self.skipped, *self.rejected, *self.replaced}
        return [client for client in self.sampled if client not in done]

    def needed(self, share: float | int) -> int:
        """Return how many valid replies the round needs: a share of its clients, or a number.

        >>> [PendingRound(1, [0, 1, 2], 0.0).needed(share) for share in (0.5, 1.0, 2, 9)]
        [2, 3, 2, 3]
        """
        size = len(self.sampled) - len(self.skipped) - len(self.replaced)
        return min(size, max(1, share if isinstance(share, int) else math.ceil(share * size - 1e-9)))

    def replace(self, candidates: Iterable[int], failed_too: bool) -> list[int]:
        """Put other clients in the place of those whose updates were rejected, or are missing if `failed_too`."""
        gone = [k for k in self.sampled if k in self.rejected or (failed_too and k in self.failed)]
        gone = [k for k in gone if k not in self.replaced and k not in self.uploads]
        chosen = [k for k in candidates if k not in self.sampled][: len(gone)]
        self.replaced.update(gone[: len(chosen)])
        self.sampled += chosen
        return chosen

    def collect(self, replies: Iterable[Message], nodes: Nodes, late: bool = False, bounds: bool = True) -> None:
        """Check and store replies to the last messages or, with `late`, to earlier ones."""
        for reply in replies:
            if reply.has_error() and reply.metadata.reply_to_message_id in self.stored_errors:
                continue
            if (asked := self._asked(reply, nodes, late)) is None:
                continue
            client, node = asked
            if reply.has_error():
                self._store_error(client, node, reply, nodes, late)
                continue
            with self._rejecting(client, nodes):
                self._store_reply(client, reply.content, late, bounds)

    def screen(self, replies: Iterable[Message], nodes: Nodes) -> list[Message]:
        """Return the replies that one of Flower's wrappers may read: those that would be accepted, and nodes' errors.

        Errors are stored here, since a wrapper may skip a round with errors without a call of `collect`.
        """
        kept = []
        for reply in replies:
            self.answered.add(reply.metadata.reply_to_message_id)
            if (asked := self._asked(reply, nodes)) is None:
                continue
            client, node = asked
            if reply.has_error():
                self._store_error(client, node, reply, nodes, late=False)
                self.stored_errors.add(reply.metadata.reply_to_message_id)
                if client not in self.rejected:
                    kept.append(reply)
                continue
            with self._rejecting(client, nodes):
                config = _config_of(client, reply.content)
                self._require_round(config)
                self._upload_of(config, reply.content, bounds=True)
                kept.append(reply)
        return kept

    def mark_busy(self, replies: Iterable[Message], nodes: Nodes, timeout: float) -> None:
        """Mark the nodes that have not replied in time as busy; they get no other message until they reply."""
        self.answered.update(reply.metadata.reply_to_message_id for reply in replies)
        for message in self.sent:
            node = int(message.metadata.dst_node_id)
            if message.metadata.message_id not in self.answered and (client := nodes.client(node)) is not None:
                nodes.busy[node] = message.metadata.message_id
                self.fail(client, f"no reply within {timeout:g} seconds")

    def reject(self, client: int, nodes: Nodes, error: RejectedUpdate) -> None:
        """Drop a client's update, and do not ask for another in this round."""
        self.uploads.pop(client, None)
        self.losses.pop(client, None)
        self.lost_state.discard(client)
        self.rejected[client] = error
        self.failed[client] = f"its update was rejected: {error}"
        node = nodes.of_client.get(client)
        log.warning("round %d: the update of client %d (node %s) was rejected: %s", self.number, client, node, error)

    def fail(self, client: int, reason: str) -> None:
        """Record why a client's update is missing."""
        self.failed[client] = reason
        log.warning("round %d, client %d: %s", self.number, client, reason)

    def alert(self, text: str) -> None:
        """Log what no honest node does; the round's record keeps it."""
        add_alert(self.alerts, text, f"round {self.number}: {text}")

    def _asked(self, reply: Message, nodes: Nodes, late: bool = False) -> tuple[int, int] | None:
        """Return the client that a reply is of, and its node; None, with an alert, if it was not asked."""
        node = int(reply.metadata.src_node_id) if late else sender(reply, self.sent)
        client = nodes.client(node) if node is not None else None
        if node is None or client is None:
            self.alert(f"a reply of node {node} belongs to no request of this round and was dropped")
            return None
        return client, node

    def failure_summary(self) -> str:
        """Return in one line why updates are missing."""
        return format_failures(dict(sorted(self.failed.items())))

    def record(self, lr: float) -> Record:
        """Return the round's record: the fields of a simulation and, unless empty, what went wrong."""
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
            "replaced": sorted(self.replaced),
            "security": self.alerts,
        }
        return {**record, **{key: value for key, value in optional.items() if value}}

    def _store_error(self, client: int, node: int, reply: Message, nodes: Nodes, late: bool) -> None:
        """Record why a node did not train, or that its reply cannot be read."""
        reason = last_line(reply.error.reason)
        if reply.error.code == NODE_UNAVAILABLE:
            nodes.forget(node)
        if late:
            log.warning("round %d, client %d: an earlier request failed: %s", self.number, client, reason)
        elif reply.error.code == UNREADABLE:
            self.reject(client, nodes, RejectedUpdate(reason, key="reply"))
        else:
            self.fail(client, reason)

    @contextmanager
    def _rejecting(self, client: int, nodes: Nodes) -> Iterator[None]:
        """Reject a client's update on any error: whatever a reply contains, it is the fault of one node."""
        try:
            yield
        except RejectedUpdate as error:
            self.reject(client, nodes, error)
        except Exception as error:
            self.reject(client, nodes, unreadable(error))

    def _store_reply(self, client: int, content: RecordDict, late: bool, bounds: bool) -> None:
        """Check one client's reply and store its upload, if it is a reply to this round."""
        config = _config_of(client, content)
        number = config.get("round")
        if late and type(number) is int and 0 < number < self.number:
            log.warning("round %d: a late reply of client %d to round %d is not used", self.number, client, number)
            return
        self._require_round(config)
        if client not in self.missing():
            self.alert(f"another reply of client {client} was dropped")
            return
        upload = self._upload_of(config, content, bounds)
        if upload is None:
            self.skipped.add(client)
        else:
            self.uploads[client] = upload
            if type(loss := config.get("loss")) is float and math.isfinite(loss):
                self.losses[client] = loss
            if config.get("fresh") is True:
                self.lost_state.add(client)
                log.warning("client %d has lost its state and was treated as new", client)
        self.failed.pop(client, None)

    def _require_round(self, config: ConfigRecord) -> None:
        """Raise RejectedUpdate unless a reply is for this round."""
        number = config.get("round")
        if type(number) is not int or number != self.number:
            text = one_line(repr(number), 40)
            raise RejectedUpdate(f"its reply is for round {text}, not {self.number}", key="round", value=number)

    def _upload_of(self, config: ConfigRecord, content: RecordDict, bounds: bool) -> Tree | None:
        """Return the upload in a reply, or None if the client has no examples; raise RejectedUpdate if it is wrong."""
        if config.get("empty") is True:
            return None
        if self.expected is None:
            raise FedkeepError("there is no round to collect replies for: call configure_train first")
        return self.expected.unpack(content, bounds)


def _config_of(client: int, content: RecordDict) -> ConfigRecord:
    """Return the config in a client's reply; raise RejectedUpdate unless it names this client."""
    config: ConfigRecord | None = content.config_records.get(records.CONFIG)
    if config is None or type(config.get("client")) is not int or config["client"] != client:
        raise RejectedUpdate(f"its reply does not contain client = {client}", key="client")
    return config


def format_failures(failed: Mapping[Any, str]) -> str:
    """Format why clients' updates are missing.

    >>> format_failures({1: "not connected", 4: "no reply within 600 seconds"})
    'client 1: not connected; client 4: no reply within 600 seconds'
    """
    return "; ".join(f"client {client}: {reason}" for client, reason in failed.items())
