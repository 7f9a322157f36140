"""The server half: a Flower Strategy around the very `aggregate` that the simulation runs.

A round is asked for, collected and checked before anything changes; then it is applied, recorded and saved at once.
Where too few good replies came, the same round is asked for again, of those that are still missing. What a client does
in a round is a function of the round, so that it does not matter how often it was asked.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from torch import Tensor

from fedkeep import losses, tree
from fedkeep.data.seeds import sample_cohort
from fedkeep.engine import device, server_hooks
from fedkeep.errors import FedkeepError
from fedkeep.flower import messages, records, update_checks
from fedkeep.flower.messages import TrainRequest
from fedkeep.flower.nodes import Nodes
from fedkeep.flower.pending_round import Pending
from fedkeep.flower.server_state import Bench, set_up
from fedkeep.flower.update_checks import Limits
from fedkeep.method import FedAvg
from fedkeep.runs.history import Record
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

POLL = 3.0  # seconds between looks for nodes that are still to come


class Strategy(FlowerStrategy):
    """Runs a method of fedkeep over a Flower grid; `start` is as every Flower strategy's.

    `num_clients` is how many clients there are in all: sampling, plans and some methods count on it. `data_fn()`
    returns what the server tests with, (x, y), or a data set with a test part and, for the methods that need one, a
    public part. With `run_dir` every round is written there, and a strategy that is started again goes on from it.
    The settings are those of `fedkeep.simulate`.

    A round waits at most `timeout` seconds for its replies, and is applied with at least `min_replies` good ones (a
    share of the sampled clients, or a number); with fewer it is asked for again, `attempts` times in all. With
    `fraction_evaluate` that share of the connected nodes also runs the app's own `@app.evaluate()` after every round.
    """

    def __init__(
        self,
        method: FedAvg | str,
        model_fn: Callable[[], torch.nn.Module],
        *,
        num_clients: int,
        data_fn: Callable[[], Any] | None = None,
        n_classes: int | None = None,
        run_dir: Any = None,
        criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
        timeout: float = 600.0,
        min_replies: float | int = 0.5,
        attempts: int = 3,
        patience: float = 120.0,
        limits: Limits | None = None,
        fraction_evaluate: float = 0.0,
        run_config: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.timeout, self.attempts, self.patience = _positive("timeout", timeout), attempts, patience
        self.min_replies, self.limits = min_replies, limits or Limits()
        self.fraction_evaluate = fraction_evaluate
        config = run_config or {}
        self.bench: Bench = set_up(
            messages.chosen_method(method, config),
            messages.chosen_settings(settings, config),
            model_fn,
            num_clients,
            data_fn,
            n_classes,
            run_dir,
            criterion,
        )
        self.nodes = Nodes(num_clients, patience)
        self.form: update_checks.TreeSpec | None = None
        self.pending: Pending | None = None

    # What Flower calls

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run to the last round. A run folder's checkpoint comes before `initial_arrays`."""
        from fedkeep.flower.round_loop import drive

        return drive(self, self, grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask the round's clients that are still missing, each with its own message."""
        bench, number = self.bench, self.bench.round + 1
        if self.pending is None or self.pending.number != number:
            sampled = sample_cohort(bench.settings.seed, number, bench.n_clients, bench.cohort_size).tolist()
            self.pending = Pending(number, sampled, time.perf_counter())
        pending = self.pending
        late = self.nodes.collect_late(grid)
        pending.collect(late, self.nodes, bench.params, self.limits, late=True)
        self._wait_for_nodes(grid)
        shared = server_hooks.broadcast(bench.method, bench.server)
        absent = [k for k in pending.missing() if k not in self.nodes.of_client]
        busy = [k for k in pending.missing() if self.nodes.of_client.get(k) in self.nodes.busy]
        pending.failed.update(dict.fromkeys(absent, "not connected"))
        pending.failed.update(dict.fromkeys(busy, "still busy with an earlier round"))
        asked = [k for k in pending.missing() if k not in absent and k not in busy]
        pending.sent = [self._message(k, shared, config) for k in asked]
        pending.bytes_down += tree.nbytes(shared) * len(pending.sent)
        return pending.sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and aggregate, if there are enough; what comes of it counts once it is applied."""
        pending, bench = self.pending, self.bench
        if pending is None:
            raise FedkeepError("aggregate_train comes after configure_train")
        came = list(replies)
        pending.collect(came, self.nodes, bench.params, self.limits, late=False)
        pending.note_silence(came, self.nodes, self.timeout)
        for client, why in update_checks.mismatched(pending.uploads, self.form).items():
            pending.refuse(client, self.nodes, why)
        found, needed = len(pending.uploads), pending.needed(self.min_replies)
        if found < needed:
            log.warning("round %d: %d good replies, %d are needed (%s)", pending.number, found, needed, pending.why())
            return None, None
        ids = sorted(pending.uploads)
        pending.server = bench.server
        if ids:
            self.form = update_checks.tree_spec(pending.uploads[ids[0]])
            uploads = tree.stack([tree.to(pending.uploads[k], bench.task.device) for k in ids])
            cohort = server_hooks.make_cohort(bench.settings, ids, pending.number)
            with device.numerics(bench.settings, bench.task.device, bench.threads):
                pending.server = server_hooks.aggregate(bench.method, bench.task, bench.server, uploads, cohort)
        else:
            log.warning("round %d: none of the sampled clients has any examples; nothing changes", pending.number)
        return self.arrays(pending.server), MetricRecord({"replies": len(ids)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask connected nodes to run the app's own evaluation, where `fraction_evaluate` says so."""
        there = sorted(self.nodes.of_client)
        asked = there[: math.ceil(self.fraction_evaluate * len(there) - 1e-9)]
        content = RecordDict({"arrays": self.bench.state_dict(), "config": config})
        return [Message(content, self.nodes.of_client[k], MessageType.EVALUATE) for k in asked]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average what the app's own evaluation said, by the examples that each node says it has."""
        good = [reply.content.metric_records for reply in replies if reply.has_content()]
        metrics: list[dict[str, Any]] = [dict(next(iter(one.values()))) for one in good if one]
        weights = [float(m.pop("num-examples", 1.0)) for m in metrics]
        names = [key for key in (metrics[0] if metrics else {}) if all(isinstance(m.get(key), float) for m in metrics)]
        if not names or not sum(weights) > 0:
            return None
        pairs = list(zip(weights, metrics, strict=True))
        return MetricRecord({key: sum(w * m[key] for w, m in pairs) / sum(weights) for key in names})

    def summary(self) -> None:
        """Log what is run."""
        bench = self.bench
        log.info("%s over %d clients, %d a round", bench.method, bench.n_clients, bench.cohort_size)

    # What the driver calls

    def arrays(self, server: Tree | None = None) -> ArrayRecord:
        """Return the weights as Flower's arrays."""
        params = (server or self.bench.server)["params"]
        return ArrayRecord({name: records.to_array(leaf) for name, leaf in sorted(tree.flatten(params).items())})

    def commit(self, arrays: ArrayRecord | None = None) -> Record:
        """Apply the aggregated round: the one place where the server's tree changes. Test, record and save it.

        `arrays` are the weights after a wrapper (Flower's differential privacy) has changed them.
        """
        pending, bench = self.pending, self.bench
        if pending is None or pending.server is None:
            raise FedkeepError("there is no aggregated round to apply")
        record = pending.record(bench.settings.lr_in(pending.number))
        server = pending.server
        if arrays is not None:
            server = {**server, "params": tree.to(_weights(arrays), bench.task.device)}
        bench.apply(server, record, pending.began)
        self.pending = None
        return record

    # Within

    def _message(self, client: int, shared: Tree, config: Mapping[str, Any]) -> Message:
        bench = self.bench
        ask = TrainRequest(
            bench.run,
            bench.round + 1,
            client,
            bench.visits.rounds.get(client, 0),
            bench.settings.lr_in(bench.round + 1),
            bench.n_clients,
            bench.task.n_classes,
            bench.constants,
            messages.method_id(bench.method),
            messages.pack_settings(bench.settings),
        )
        content: RecordDict = records.to_records(shared, {**config, **ask.to_config()})
        node, ttl = self.nodes.of_client[client], 2 * self.timeout
        return Message(content, node, MessageType.TRAIN, ttl=ttl, group_id=str(ask.round))

    def _wait_for_nodes(self, grid: Grid) -> None:
        """Wait until enough of the sampled clients are there: before the first round, all of them."""
        assert self.pending is not None
        deadline = time.monotonic() + self.patience
        while True:
            self.nodes.refresh(grid)
            there = [k for k in self.pending.missing() if k in self.nodes.of_client]
            first = self.bench.round == self.bench.begun_at and not self.pending.failed
            wanted = (
                len(self.pending.missing())
                if first
                else self.pending.needed(self.min_replies) - len(self.pending.uploads)
            )
            if len(there) >= wanted or time.monotonic() > deadline:
                return
            self.nodes.refused.clear()  # who was refused may have been put right
            time.sleep(min(POLL, self.patience))


def _weights(arrays: ArrayRecord) -> Tree:
    return tree.unflatten({name: records.from_array(array) for name, array in arrays.items()})


def _positive(name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise FedkeepError(f"{name} must be a finite number of seconds above 0, not {value!r}")
    return value
