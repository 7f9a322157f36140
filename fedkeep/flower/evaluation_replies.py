"""Replies of the app's own evaluation: unusable ones are logged and left out, node by node."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from flwr.app import Message, MetricRecord

from fedkeep._util.text import one_line
from fedkeep.flower.nodes import last_line

log = logging.getLogger("fedkeep")

WEIGHT = "num-examples"


def average_metrics(replies: Iterable[Message], largest: float) -> MetricRecord | None:
    """Average the nodes' metrics, weighted by `num-examples`; None if there is nothing to average.

    A metric counts if more than half of the usable replies have it. `largest` is the largest absolute value of a metric
    and of `num-examples`.
    """
    usable = []
    for reply in replies:
        node = int(reply.metadata.src_node_id)
        try:
            usable.append(_read_metrics(reply, largest))
        except Exception as error:  # whatever a reply contains, it is the fault of one node
            log.warning("the evaluation of node %d is not used: %s", node, one_line(error))
    counts = Counter(name for _, metrics in usable for name in metrics)
    averages: dict[str, Any] = {}
    for name in sorted(name for name, count in counts.items() if 2 * count > len(usable)):
        pairs = [(weight, metrics[name]) for weight, metrics in usable if name in metrics]
        averages[name] = sum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs)
    return MetricRecord(averages) if averages else None


def _read_metrics(reply: Message, largest: float) -> tuple[float, dict[str, float]]:
    """Return the weight and the metrics of one reply; raise a ValueError if they are unusable."""
    if reply.has_error():
        raise ValueError(last_line(reply.error.reason))
    record = next(iter(reply.content.metric_records.values()), None)
    if record is None:
        raise ValueError("it has no metrics")
    weight = _number(WEIGHT, record.get(WEIGHT, 1.0), largest)
    if not weight > 0:
        raise ValueError(f"{WEIGHT} is {weight:g}")
    values = {key: value for key, value in record.items() if key != WEIGHT and isinstance(value, float)}
    return weight, {key: _number(key, value, largest) for key, value in values.items()}


def _number(key: str, value: object, largest: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= largest:
        raise ValueError(f"{one_line(key, 60)} is {one_line(repr(value), 60)}, not a number of at most {largest:g}")
    return float(value)
