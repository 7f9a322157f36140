"""The rounds of a federation, one after the other, until the last."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedkeep import forgetting
from fedkeep.engine import server_hooks
from fedkeep.errors import FedkeepError, RunError
from fedkeep.flower import records
from fedkeep.runs.history import Record

if TYPE_CHECKING:
    from fedkeep.flower.strategy import Strategy


log = logging.getLogger("fedkeep")


def drive(
    inner: Strategy,
    outer: FlowerStrategy,
    grid: Grid,
    initial_arrays: ArrayRecord | None = None,
    num_rounds: int | None = None,
    timeout: float | None = None,
    train_config: ConfigRecord | None = None,
    evaluate_config: ConfigRecord | None = None,
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
) -> Result:
    """Run every round through `outer`: the strategy itself, or one of Flower's wrappers around it.

    Nothing is applied, recorded or saved before `outer` has had its say, so that what a wrapper adds is in all of it.
    """
    bench, config = inner.bench, train_config or ConfigRecord()
    bench.retune({**config, **({} if num_rounds is None else {"rounds": num_rounds})})
    inner.timeout = timeout or inner.timeout
    outer.summary()
    if initial_arrays is not None and not bench.history.records:
        _begin_from(inner, initial_arrays)
    result = Result()
    try:
        bench.begin()
        _seen(inner, result, bench.history.records[-1], evaluate_fn)
        while bench.round < bench.settings.rounds:
            record = _round(inner, outer, grid, config)
            log.info(format_round(record, bench.settings.rounds))
            _seen(inner, result, record, evaluate_fn)
            asked = list(outer.configure_evaluate(bench.round, ArrayRecord(), evaluate_config or ConfigRecord(), grid))
            if asked:
                found = outer.aggregate_evaluate(bench.round, grid.send_and_receive(asked, timeout=inner.timeout))
                result.evaluate_metrics_clientapp[bench.round] = found or MetricRecord()
    finally:
        bench.close()
    result.arrays = bench.state_dict()
    return result


def _round(inner: Strategy, outer: FlowerStrategy, grid: Grid, config: ConfigRecord) -> Record:
    """Run one round, asking again where too few answer; never apply half of it."""
    number = inner.bench.round + 1
    for _ in range(inner.attempts):
        arrays = ArrayRecord() if outer is inner else inner.arrays()
        messages = list(outer.configure_train(number, arrays, config, grid))
        replies = list(grid.send_and_receive(messages, timeout=inner.timeout)) if messages else []
        made, _ = outer.aggregate_train(number, replies)
        if made is not None:
            return inner.commit(None if outer is inner else made)
    why = inner.pending.why() if inner.pending else ""
    raise RunError(
        f"round {number} was asked for {inner.attempts} times, and too few clients answered ({why}); what was saved is "
        "intact: start the app again to go on from there"
    )


def _begin_from(inner: Strategy, arrays: ArrayRecord) -> None:
    """Start from the weights given instead of those that model_fn makes."""
    bench = inner.bench
    given = {name: records.from_array(array) for name, array in arrays.items()}
    missing = sorted(bench.task.init.keys() - given.keys())
    if missing:
        raise FedkeepError(f"the initial arrays lack {missing[0]}: they are not those of the model that model_fn makes")
    bench.task.init = {name: given[name].to(w) for name, w in bench.task.init.items()}
    bench.server = server_hooks.init_server(bench.method, bench.task)


def _seen(
    inner: Strategy,
    result: Result,
    record: Record,
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
) -> None:
    """Put what was measured into Flower's result."""
    metrics = MetricRecord()
    if "confusion" in record:
        metrics["accuracy"] = float(forgetting.accuracy(record["confusion"]))
        metrics["loss"] = record["test_loss"]
    if evaluate_fn is not None:
        metrics.update(evaluate_fn(record["round"], inner.bench.state_dict()) or {})
    if len(metrics):
        result.evaluate_metrics_serverapp[record["round"]] = metrics
    if record.get("train_loss") is not None:
        result.train_metrics_clientapp[record["round"]] = MetricRecord({"train_loss": record["train_loss"]})


def format_round(record: Record, rounds: int) -> str:
    """Say in one line what a round was.

    >>> record = {"round": 2, "cohort": [0, 1], "skipped": [], "confusion": [[3, 1], [0, 4]], "failed": {"2": "gone"}}
    >>> format_round(record, 5)
    'round 2 of 5: 2 clients (client 2: gone), accuracy 0.875'
    """
    failed = "; ".join(f"client {k}: {why}" for k, why in record.get("failed", {}).items())
    fresh = ", ".join(str(k) for k in record.get("fresh", []))
    notes = [failed, f"without their state: {fresh}" if fresh else ""]
    aside = f" ({'; '.join(note for note in notes if note)})" if any(notes) else ""
    shown = f", accuracy {float(forgetting.accuracy(record['confusion'])):.3f}" if "confusion" in record else ""
    return f"round {record['round']} of {rounds}: {len(record['cohort'])} clients{aside}{shown}"
