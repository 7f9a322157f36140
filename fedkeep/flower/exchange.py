"""Exchange of messages with nodes: one node's reply, whatever it contains, concerns that node alone.

A reply's bytes are written by the node. Flower's SuperLink checks who answers which message, but the sender and the
message that are named inside the reply are the node's own claims, and its bytes may be no message at all. So every
reply is fetched by itself, under the id of the message that it answers, and what it says of its sender is replaced by
what the server knows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fedkeep.flower.update_checks import RejectedUpdate, unreadable

log = logging.getLogger("fedkeep")

POLL_SECONDS = 3.0  # between two looks for replies
UNREADABLE = 590  # error code of a reply that cannot be read; Flower's own codes are below 100
UNSENT = 591  # error code of a request that the server could not send


def exchange(grid: Grid, messages: Iterable[Message], timeout: float) -> list[Message]:
    """Send messages, and return the replies that arrive in time: readable ones, and errors in place of others."""
    sent = list(messages)
    if not sent:
        return []
    pushed = list(grid.push_messages(sent))
    accepted = {key for key in pushed if key}
    replies, waiting = [], {}
    for message in sent:
        if message.metadata.message_id in accepted:
            waiting[message.metadata.message_id] = message
        else:
            reason = "the request could not be sent: is it larger than the SuperLink accepts?"
            replies.append(Message(Error(UNSENT, reason), reply_to=message))
    deadline = time.monotonic() + timeout
    while True:
        for key, message in list(waiting.items()):
            reply = _reply_to(grid, message)
            if reply is not None:
                replies.append(reply)
                del waiting[key]
        left = deadline - time.monotonic()
        if not waiting or left <= 0:
            return replies
        time.sleep(min(POLL_SECONDS, left))


def fetch_reply(grid: Grid, message_id: str, node: int) -> Message | None:
    """Return the reply to one message to a node, or None; raise RejectedUpdate if it cannot be read."""
    try:
        found = list(grid.pull_messages([message_id]))
        if not found:
            return None
        reply = found[0]
        if not isinstance(reply, Message) or not (reply.has_error() or isinstance(reply.content, RecordDict)):
            raise TypeError("it is not a message with records")
        claims = reply.metadata.__dict__
        claims["_reply_to_message_id"] = message_id
        if not reply.has_error():
            claims["_src_node_id"] = node
    except Exception as error:
        if _is_lost_connection(error):
            raise
        raise unreadable(error) from error
    return reply


def _reply_to(grid: Grid, message: Message) -> Message | None:
    try:
        return fetch_reply(grid, message.metadata.message_id, int(message.metadata.dst_node_id))
    except RejectedUpdate as error:
        return Message(Error(UNREADABLE, str(error)), reply_to=message)


def _is_lost_connection(error: Exception) -> bool:
    """Return whether an error comes from the connection to the SuperLink, and not from a reply's contents."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("httpx", "httpcore")
