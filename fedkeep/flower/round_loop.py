"""Round loop of a federation: every round is requested, aggregated, applied and evaluated in turn."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedkeep import forgetting, tree
from fedkeep.engine.settings import Settings
from fedkeep.errors import ConfigError, FedkeepError, RunError
from fedkeep.flower import privacy_mods, records
from fedkeep.flower.exchange import exchange
from fedkeep.flower.federation_server import FederationServer
from fedkeep.flower.nodes import Nodes
from fedkeep.flower.pending_round import PendingRound, format_failures
from fedkeep.runs.history import Record
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class RoundLoop(FlowerStrategy):
    """Runs the rounds of a federation; `fedkeep.flower.Strategy` adds what a round sends and how it is aggregated."""

    federation: FederationServer
    pending: PendingRound | None
    timeout: float
    attempts: int
    fraction_evaluate: float = 0.0
    equal_weights: bool = False  # a wrapper for differential privacy computes its noise for equal weights
    nodes: Nodes
    wrapped: bool = False  # whether one of Flower's wrappers sees every reply first

    def replace_clients(self, failed_too: bool) -> bool:
        """Ask other clients in place of those whose updates cannot be used; return whether there are any."""
        raise NotImplementedError

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        *,
        outer: FlowerStrategy | None = None,
    ) -> Result:
        """Run all rounds and return Flower's result.

        Nothing is applied, recorded or saved before `outer` has returned its result, so all of it includes what a
        wrapper adds.

        Parameters
        ----------
        grid
            The connection to the nodes.
        initial_arrays
            Weights to start from, instead of those that `model_fn` returns. A checkpoint in the run folder takes
            precedence.
        num_rounds
            The number of rounds; by default the setting `rounds`.
        timeout
            Seconds that a round waits for replies; by default the `timeout` of the strategy.
        train_config
            Settings such as `lr`, and keys of the app's own that are sent to the nodes.
        evaluate_config
            What is sent to the nodes with a request to evaluate.
        evaluate_fn
            Called with the round and the model after every round; the metrics it returns are added to the result.
        outer
            One of Flower's wrappers around this strategy, through which every round is run.
        """
        federation, through, config = self.federation, outer or self, train_config or ConfigRecord()
        federation.retune({**config, **({} if num_rounds is None else {"rounds": num_rounds})})
        self.require_private_evaluation(federation.settings)
        privacy_mods.require_covered(through, federation.method, federation.settings)
        for key in ("average_weights", "read_out"):
            if through is not self and getattr(federation.settings, key) is not None:
                message = f"{key} is computed before a wrapper changes the weights: use one of the two"
                raise ConfigError(message, key="wrap", value=type(through).__name__)
        self.equal_weights = privacy_mods.is_privacy_wrapper(through)
        self.timeout, self.wrapped = timeout or self.timeout, through is not self
        through.summary()
        state = federation.state
        if initial_arrays is not None and not state.history.records:
            federation.start_from({name: records.from_array(array) for name, array in initial_arrays.items()})
        result = Result()
        try:
            federation.begin()
            self._add_metrics(result, state.history.records[-1], evaluate_fn)
            while state.round < federation.settings.rounds:
                record = self._run_round(through, grid, config)
                log.info(format_round(record, federation.settings.rounds))
                self._add_metrics(result, record, evaluate_fn)
                self._evaluate_on_nodes(result, through, grid, evaluate_config or ConfigRecord())
            state.finish("finished")
        finally:
            state.close()
        result.arrays = federation.state_dict()
        return result

    def require_private_evaluation(self, settings: Settings) -> None:
        """Raise if nodes are to evaluate in a differentially private run."""
        if self.fraction_evaluate and settings.private:
            raise ConfigError(
                "fraction_evaluate collects metrics of single clients, which differential privacy does not cover",
                key="fraction_evaluate",
                value=self.fraction_evaluate,
            )

    def arrays(self, server: Tree | None = None) -> ArrayRecord:
        """Return the weights as Flower's arrays."""
        params = (server or self.federation.state.server)["params"]
        return ArrayRecord({name: records.to_array(leaf) for name, leaf in sorted(tree.flatten(params).items())})

    def commit(self, arrays: ArrayRecord | None = None) -> Record:
        """Apply the aggregated round, evaluate, record and save it. The server's tree changes nowhere else.

        `arrays` are the weights as changed by a wrapper, such as Flower's differential privacy.
        """
        pending, federation = self.pending, self.federation
        if pending is None or pending.server is None:
            raise FedkeepError("there is no aggregated round to apply: call aggregate_train first")
        pending.alerts, self.nodes.alerts = [*self.nodes.alerts, *pending.alerts], []
        record = pending.record(federation.settings.lr_in(pending.number))
        server = pending.server
        if arrays is not None:
            weights = tree.unflatten({name: records.from_array(array) for name, array in arrays.items()})
            server = {**server, "params": tree.to(weights, federation.task.device)}
        federation.apply(server, record, pending.began)
        self.pending = None
        return record

    def _run_round(self, through: FlowerStrategy, grid: Grid, config: ConfigRecord) -> Record:
        """Run one round, with another attempt while too few clients reply; a round is applied completely or not.

        Clients whose updates were rejected are replaced by others at once, those that do not reply after all attempts.
        """
        number, tries = self.federation.state.round + 1, 0
        while True:
            arrays = self.arrays() if self.wrapped else ArrayRecord()
            messages = list(through.configure_train(number, arrays, config, grid))
            replies = exchange(grid, messages, self.timeout)
            if self.wrapped and self.pending is not None:
                replies = self.pending.screen(replies, self.nodes)
            aggregated, _ = through.aggregate_train(number, replies)
            if aggregated is not None:
                uploads = self.pending.uploads.values() if self.pending else ()
                privacy_mods.require_covered_uploads(through, self.federation.method, uploads)
                return self.commit(aggregated if self.wrapped else None)
            tries += 1
            if self.replace_clients(failed_too=tries >= self.attempts):
                tries = 0
            elif tries >= self.attempts:
                break
        failures = self.pending.failure_summary() if self.pending else ""
        raise RunError(
            f"round {number} failed: too few clients replied in {self.attempts} attempts ({failures}); earlier rounds "
            "are saved if there is a run-dir: start the app again to resume",
            key="round",
            value=number,
        )

    def _evaluate_on_nodes(self, result: Result, through: FlowerStrategy, grid: Grid, config: ConfigRecord) -> None:
        """Run the app's own evaluation on the nodes and add its metrics to Flower's result."""
        number = self.federation.state.round
        messages = list(through.configure_evaluate(number, ArrayRecord(), config, grid))
        if messages:
            replies = exchange(grid, messages, self.timeout)
            metrics = through.aggregate_evaluate(number, replies)
            result.evaluate_metrics_clientapp[number] = metrics or MetricRecord()

    def _add_metrics(self, result: Result, record: Record, evaluate_fn: EvaluateFn | None) -> None:
        """Add a round's accuracy and losses to Flower's result."""
        metrics = MetricRecord()
        if "confusion" in record:
            metrics["accuracy"] = float(forgetting.accuracy(record["confusion"]))
            metrics["loss"] = record["test_loss"]
        if evaluate_fn is not None:
            metrics.update(evaluate_fn(record["round"], self.federation.state_dict()) or {})
        if len(metrics):
            result.evaluate_metrics_serverapp[record["round"]] = metrics
        if record.get("train_loss") is not None:
            result.train_metrics_clientapp[record["round"]] = MetricRecord({"train_loss": record["train_loss"]})


def drive(inner: RoundLoop, outer: FlowerStrategy, grid: Grid, *args: Any, **kwargs: Any) -> Result:
    """Run every round of `inner` through `outer`, one of Flower's wrappers around it.

    The other arguments are those of `Strategy.start`.
    """
    return inner.start(grid, *args, outer=outer, **kwargs)


def format_round(record: Record, rounds: int) -> str:
    """Format a round's record as one line.

    >>> record = {"round": 2, "cohort": [0, 1], "skipped": [], "confusion": [[3, 1], [0, 4]], "failed": {"2": "gone"}}
    >>> format_round(record, 5)
    'round 2 of 5: 2 clients (client 2: gone), accuracy 0.875'
    >>> format_round({**record, "epsilon": 3.21987, "failed": {}}, 5)
    'round 2 of 5: 2 clients, accuracy 0.875, epsilon 3.22'
    """
    lost_state = ", ".join(str(client) for client in record.get("fresh", []))
    remarks = [format_failures(record.get("failed", {})), f"without their state: {lost_state}" if lost_state else ""]
    in_brackets = f" ({'; '.join(remark for remark in remarks if remark)})" if any(remarks) else ""
    accuracy = f", accuracy {float(forgetting.accuracy(record['confusion'])):.3f}" if "confusion" in record else ""
    epsilon = f", epsilon {record['epsilon']:.2f}" if "epsilon" in record else ""
    return f"round {record['round']} of {rounds}: {len(record['cohort'])} clients{in_brackets}{accuracy}{epsilon}"
