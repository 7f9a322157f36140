"""Flower's two interfaces of strategies, seen alike: that of messages, and the older one of parameters and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.common import parameters_to_ndarrays
from flwr.server.strategy import Strategy as OlderStrategy
from flwr.serverapp.strategy import Strategy as MessageStrategy
from torch import Tensor, from_numpy

from fedkeep.errors import ConfigError
from fedkeep.flower import records
from fedkeep.flower.evaluation_replies import WEIGHT
from fedkeep.flower.nodes import last_line, sender

NO_REPLY = "no reply"


@dataclass(frozen=True)
class Reply:
    """What one node has sent after training."""

    node: int | str
    nbytes: int = 0
    arrays: Any = None  # as the app has them
    metrics: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0  # its number of examples, if it says so
    failure: str | None = None  # why there is no update


class StrategyApi(Protocol):
    """The methods of a strategy that are observed, and how to read what they are given and return."""

    configure: str  # (round, arrays, ...) -> what is sent to train
    aggregate: str  # (round, replies, ...) -> (arrays, metrics)
    after: str  # (round, arrays, ...): called after every round with the global model

    def bytes_sent(self, result: Sequence[Any]) -> int:
        """Return how many bytes of arrays the nodes are sent that are asked to train."""
        ...

    def replies(self, replies: Iterable[Any], asked: Sequence[Any]) -> list[Reply]:
        """Return what the nodes have sent; also of those that have not replied, if that is known."""
        ...

    def tensors(self, arrays: Any) -> dict[str, Tensor]:
        """Return arrays as tensors by name."""
        ...

    def copied(self, arrays: Any) -> Any:
        """Return arrays for a function of the user's own, in the form that Flower gives to an `evaluate_fn`."""
        ...


class MessageApi:
    """Strategies of `flwr.serverapp.strategy`."""

    configure, aggregate, after = "configure_train", "aggregate_train", "configure_evaluate"

    def bytes_sent(self, result: Sequence[Message]) -> int:
        """Return how many bytes of arrays the nodes are sent that are asked to train."""
        return sum(_nbytes(message.content) for message in result if message.has_content())

    def replies(self, replies: Iterable[Message], asked: Sequence[Message]) -> list[Reply]:
        """Return what the nodes have sent, and that others have not replied."""
        found = [self._reply(reply, asked) for reply in replies]
        silent = {int(m.metadata.dst_node_id) for m in asked} - {reply.node for reply in found}
        return [*found, *(Reply(node, failure=NO_REPLY) for node in sorted(silent))]

    def tensors(self, arrays: ArrayRecord) -> dict[str, Tensor]:
        """Return arrays as tensors by name."""
        return {name: records.from_array(array) for name, array in arrays.items()}

    def copied(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return a copy of the record; the arrays in it cannot be changed."""
        return ArrayRecord(dict(arrays))

    def _reply(self, reply: Message, asked: Sequence[Message]) -> Reply:
        node = sender(reply, asked)
        node = int(reply.metadata.src_node_id) if node is None else node
        if not reply.has_content():
            return Reply(node, failure=last_line(reply.error.reason))
        content = reply.content
        metrics = {name: value for one in content.metric_records.values() for name, value in one.items()}
        arrays = next(iter(content.array_records.values()), None)
        return Reply(node, _nbytes(content), arrays, metrics, _weight(metrics.get(WEIGHT)))


class OlderApi:
    """Strategies of `flwr.server.strategy`, for a `server_fn`."""

    configure, aggregate, after = "configure_fit", "aggregate_fit", "evaluate"

    def bytes_sent(self, result: Sequence[Any]) -> int:
        """Return how many bytes of arrays the nodes are sent that are asked to train."""
        return sum(_length(one.parameters) for _, one in result)

    def replies(self, replies: Iterable[Any], asked: Sequence[Any]) -> list[Reply]:
        """Return what the nodes have sent, and that others have not replied; failures do not always name a node."""
        found = [
            Reply(proxy.cid, _length(one.parameters), one.parameters, one.metrics or {}, _weight(one.num_examples))
            for proxy, one in replies
        ]
        silent = {proxy.cid for proxy, _ in asked} - {reply.node for reply in found}
        return [*found, *(Reply(node, failure=NO_REPLY) for node in sorted(silent))]

    def tensors(self, arrays: Any) -> dict[str, Tensor]:
        """Return arrays as tensors; their names are their numbers."""
        return {str(k): from_numpy(array.copy()) for k, array in enumerate(parameters_to_ndarrays(arrays))}

    def copied(self, arrays: Any) -> Any:
        """Return the arrays as a list of numpy arrays."""
        return parameters_to_ndarrays(arrays)


def api_of(strategy: Any) -> StrategyApi:
    """Return the interface of a strategy; raise if it has none of the two."""
    if isinstance(strategy, MessageStrategy):
        return MessageApi()
    if isinstance(strategy, OlderStrategy):
        return OlderApi()
    if isinstance(strategy, type):
        message = f"strategy must be an object, {strategy.__name__}(), not the class"
        raise ConfigError(message, key="strategy", value=strategy.__name__)
    kind = type(strategy).__name__
    valid = [f"{one.__module__.rpartition('.')[0]}.Strategy" for one in (MessageStrategy, OlderStrategy)]
    message = f"strategy must be a {' or a '.join(valid)} of Flower, not {kind}"
    raise ConfigError(message, key="strategy", value=kind, valid=valid)


def _nbytes(content: RecordDict) -> int:
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def _length(parameters: Any) -> int:
    return sum(len(one) for one in parameters.tensors)


def _weight(value: Any) -> float:
    usable = isinstance(value, int | float) and 0 < value < float("inf")
    return float(value) if usable else 1.0
