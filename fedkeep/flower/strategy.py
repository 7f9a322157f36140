"""Server side of a federation: a Flower Strategy that calls the same `aggregate` as the simulation.

A round is requested, collected and checked before anything changes; then it is applied, recorded and saved at once.
If too few valid replies arrive, the same round is requested again, from the clients that are still missing. What a
client computes in a round depends only on the round, so it does not matter how often it is asked.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedkeep import losses, tree
from fedkeep._util.text import one_line
from fedkeep._util.validate import require_number, require_whole
from fedkeep.data import seeds
from fedkeep.engine import device, privacy, robust, server_hooks
from fedkeep.engine.settings import SettingsDict
from fedkeep.engine.user_metrics import Metrics
from fedkeep.errors import FedkeepError, MethodError
from fedkeep.flower import messages, records
from fedkeep.flower.client_keys import ClientKeys
from fedkeep.flower.evaluation_replies import average_metrics
from fedkeep.flower.federation_server import build_server
from fedkeep.flower.messages import TrainRequest
from fedkeep.flower.nodes import Nodes
from fedkeep.flower.pending_round import PendingRound
from fedkeep.flower.round_loop import RoundLoop
from fedkeep.flower.trial import Trial, outlier
from fedkeep.flower.update_checks import ExpectedUpload, Limits, RejectedUpdate
from fedkeep.method import FedAvg
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

POLL_SECONDS = 3.0  # between two looks for nodes that are not connected yet
SCORES_SHOWN = 5  # in the alert about a round that is not applied


class Strategy(RoundLoop):
    """Runs a fedkeep method over a Flower grid; `start` has the arguments of every Flower strategy.

    Parameters
    ----------
    method
        One of `fedkeep.methods`, or its name.
    model_fn
        Returns the model, a `torch.nn.Module` from inputs to logits.
    num_clients
        How many clients there are in all. Sampling, plans and some methods depend on it.
    data_fn
        Returns the server's data: (x, y) to test with, or a data set with a test part and, for the methods that need
        one, a public part. Without it the global model is not evaluated.
    n_classes
        The number of classes; needed without `data_fn`.
    run_dir
        The run folder. Every round is saved there; if it already contains this run, the run is resumed.
    keep
        How many checkpoints stay in the run folder; by default 3.
    from_round
        Go back to the checkpoint of this round and repeat the later ones.
    criterion
        The loss of logits and labels, per example.
    metrics
        Your own metrics of the server's test data, as in `fedkeep.simulate`.
    timeout
        Seconds that a round waits for replies.
    min_replies
        How many valid replies a round needs: a share of the sampled clients (a float), or a number (an int).
    attempts
        How often a round is requested, in all, before the run ends with an error.
    patience
        Seconds to wait for clients to connect.
    limits
        Updates beyond these limits are rejected.
    max_examples
        The largest number of examples that a client can have; an update that claims more is rejected.
    client_keys
        Which node may be which client: "connected", "first", or a file of the clients' public keys
        (`fedkeep.flower.client_keys`).
    trial
        Whether a round is tried by a client on the server's own test data before it is applied.
    fraction_evaluate
        The share of the connected nodes that run the app's own `@app.evaluate()` after every round.
    run_config
        The app's config. Its keys `method.*`, `train.*` and `seed` take precedence over the arguments.
    **settings
        The settings of `fedkeep.simulate`, such as `rounds`, `participation` and `lr`.
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
        keep: int | None = None,
        from_round: int | None = None,
        criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
        metrics: Metrics = None,
        timeout: float = 600.0,
        min_replies: float | int = 0.5,
        attempts: int = 3,
        patience: float = 120.0,
        limits: Limits | None = None,
        max_examples: int | None = None,
        client_keys: Any = None,
        trial: bool = True,
        fraction_evaluate: float = 0.0,
        run_config: Mapping[str, Any] | None = None,
        **settings: Unpack[SettingsDict],
    ) -> None:
        self.timeout, self.attempts, self.patience = require_number("timeout", timeout, above=0), attempts, patience
        self.min_replies, self.limits = min_replies, limits or Limits()
        if max_examples is not None:
            self.limits = replace(self.limits, examples=require_whole("max_examples", max_examples, low=1))
        self.fraction_evaluate = fraction_evaluate
        config = run_config or {}
        resolved = messages.resolve_settings(cast(Any, settings), config)
        self.require_private_evaluation(resolved)  # before a run folder is created or changed, as the keys
        folder = Path(str(run_dir)).expanduser() if run_dir else None
        keys = ClientKeys(client_keys, require_whole("num_clients", num_clients, low=1), folder)
        self.federation = build_server(
            method=messages.resolve_method(method, config),
            settings=resolved,
            model_fn=model_fn,
            num_clients=num_clients,
            data_fn=data_fn,
            n_classes=n_classes,
            run_dir=run_dir,
            criterion=criterion,
            keep=keep,
            from_round=from_round,
            metrics=metrics,
        )
        self.nodes = Nodes(num_clients, patience, keys)
        self.trial = Trial(self.federation, self.limits, trains=None if trial else False)
        self.pending = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return a message for each of the round's clients that is still missing and can be asked."""
        federation, number = self.federation, self.federation.state.round + 1
        if self.pending is None or self.pending.number != number:
            self.pending = self._new_round(number)
        pending = self.pending
        pending.collect(self.nodes.collect_late(grid), self.nodes, late=True)
        self._wait_for_nodes(pending, grid)
        broadcast = server_hooks.broadcast(federation.method, federation.state.server)
        absent = [k for k in pending.missing() if k not in self.nodes.of_client]
        busy = [k for k in pending.missing() if self.nodes.of_client.get(k) in self.nodes.busy]
        pending.failed.update(dict.fromkeys(absent, "not connected"))
        pending.failed.update(dict.fromkeys(busy, "still busy with an earlier round"))
        asked = [k for k in pending.missing() if k not in absent and k not in busy]
        pending.sent = [self._message(k, self._tree_for(k, broadcast, pending), config) for k in asked]
        return pending.sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and aggregate them if there are enough; `commit` applies the result."""
        pending = self.pending
        if pending is None:
            raise FedkeepError("there is no round to aggregate: call configure_train first")
        received = list(replies)
        pending.collect(received, self.nodes, bounds=not self.wrapped)  # those for a wrapper were checked before it
        pending.mark_busy(received, self.nodes, self.timeout)
        while len(pending.uploads) >= self._needed(pending):
            server, problem = self._try_round(pending)
            if problem is None:
                pending.server = server
                return self.arrays(server), MetricRecord({"replies": len(pending.uploads)})
            self._drop_outlier(pending, problem)
        valid, needed, failures = len(pending.uploads), self._needed(pending), pending.failure_summary()
        log.warning("round %d: %d valid replies, %d are needed (%s)", pending.number, valid, needed, failures)
        return None, None

    def replace_clients(self, failed_too: bool) -> bool:
        """Put connected clients in the place of those whose updates were rejected; return whether there were any.

        With `failed_too`, clients that did not reply are replaced as well. The order of those who replace others
        depends on seed and round alone. With differential privacy nobody is replaced: no client may decide who counts.
        """
        pending, federation, nodes = self.pending, self.federation, self.nodes
        if pending is None or federation.settings.private:
            return False
        order = seeds.generator(seeds.SAMPLING, federation.settings.seed, pending.number, 1)
        free = [
            int(k) for k in order.permutation(federation.n_clients) if nodes.of_client.get(int(k), 0) not in nodes.busy
        ]
        chosen = pending.replace([k for k in free if k in nodes.of_client], failed_too)
        if chosen:
            log.warning("round %d: clients %s are asked in place of others", pending.number, chosen)
        return bool(chosen)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return messages that ask a share of the connected nodes for the app's own evaluation."""
        connected = sorted(self.nodes.of_client)
        asked = connected[: math.ceil(self.fraction_evaluate * len(connected) - 1e-9)]
        content = RecordDict({"arrays": self.federation.state_dict(), "config": config})
        return [Message(content, self.nodes.of_client[k], MessageType.EVALUATE) for k in asked]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the metrics of the app's own evaluation, weighted by each node's `num-examples`."""
        return average_metrics(replies, self.limits.value)

    def summary(self) -> None:
        """Log the method and the number of clients."""
        federation = self.federation
        log.info("%s, %d clients, %d per round", federation.method, federation.n_clients, federation.cohort_size)

    def _needed(self, pending: PendingRound) -> int:
        """Return how many valid replies the round needs, also for robust averaging."""
        return max(pending.needed(self.min_replies), self.federation.settings.smallest_cohort)

    def _tree_for(self, client: int, broadcast: Tree, pending: PendingRound) -> Tree:
        """Return what one client gets, and count its bytes."""
        method, server = self.federation.method, self.federation.state.server
        sent = server_hooks.broadcast_to(method, server, client)
        pending.bytes_down += tree.nbytes(broadcast) + tree.nbytes(sent)
        return {**broadcast, messages.SENT: sent} if method.uses("broadcast_to") else broadcast

    def _message(self, client: int, broadcast: Tree, config: Mapping[str, Any]) -> Message:
        federation, state = self.federation, self.federation.state
        request = TrainRequest(
            run=federation.run,
            round=state.round + 1,
            client=client,
            state=state.clients.rounds.get(client, 0),
            lr=federation.settings.lr_in(state.round + 1),
            n_clients=federation.n_clients,
            n_classes=federation.task.n_classes,
            constants=federation.constants,
            method=messages.method_id(federation.method),
            settings=messages.pack_settings(federation.settings),
        )
        content: RecordDict = records.to_records(broadcast, {**config, **request.to_config()})
        node, ttl = self.nodes.of_client[client], 2 * self.timeout
        return Message(content, node, MessageType.TRAIN, ttl=ttl, group_id=str(request.round))

    def _new_round(self, number: int) -> PendingRound:
        federation = self.federation
        sampled = seeds.sample_cohort(federation.settings.seed, number, federation.n_clients, federation.cohort_size)
        expected = ExpectedUpload.of(federation, federation.state.server, number, self.limits)
        return PendingRound(number, sampled.tolist(), time.perf_counter(), expected)

    def _try_round(self, pending: PendingRound) -> tuple[Tree, str | None]:
        """Return the server's tree after this round, and why it must not be applied, or None."""
        present = self.federation.state.server
        if not pending.uploads:
            log.warning("round %d: none of the sampled clients has examples; nothing changes", pending.number)
            return present, None
        if self.federation.settings.private:  # clipping bounds every client; none may decide whether others count
            return self._aggregate(pending), None
        try:
            server = self._aggregate(pending)
        except MethodError:
            raise
        except Exception as error:
            return present, f"it cannot be aggregated: {type(error).__name__}: {one_line(error)}"
        return server, self.trial.problem(server, pending.number)

    def _aggregate(self, pending: PendingRound) -> Tree:
        """Return the server's tree after this round."""
        federation, task, ids = self.federation, self.federation.task, sorted(pending.uploads)
        uploads = tree.stack([tree.to(pending.uploads[k], task.device) for k in ids])
        if self.equal_weights:
            uploads = robust.with_equal_n(uploads)
        cohort = server_hooks.make_cohort(federation.settings, ids, pending.number)
        if federation.settings.private:
            cohorts = [*federation.releases.cohorts, ids]
            federation.releases.add(pending.number, ids, privacy.epsilon(federation.settings, cohorts))
        with device.numerics(federation.settings, task.device, federation.threads):
            method, settings, source = federation.method, federation.settings, privacy.system_bytes
            return server_hooks.aggregate(method, task, federation.state.server, uploads, cohort, settings, source)

    def _drop_outlier(self, pending: PendingRound, problem: str) -> None:
        """Reject the upload that is furthest from the others': with it, the round must not be applied."""
        client, scores = outlier(pending.uploads, self.federation.state.server)
        largest = sorted(scores, key=lambda k: -scores[k])[:SCORES_SHOWN]
        sizes = ", ".join(f"client {k}: {scores[k]:.3g}" for k in largest)
        pending.alert(f"the round is not applied: {problem}; the largest sizes relative to the median: {sizes}")
        reason = f"it is the largest of a round that must not be applied: {problem}"
        pending.reject(client, self.nodes, RejectedUpdate(reason, key="round", value=client))

    def _wait_for_nodes(self, pending: PendingRound, grid: Grid) -> None:
        """Wait until enough of the sampled clients are connected; before the first round, all of them."""
        deadline = time.monotonic() + self.patience
        while True:
            self.nodes.refresh(grid)
            missing = pending.missing()
            connected = [k for k in missing if k in self.nodes.of_client]
            first = self.federation.state.round == self.federation.resumed_from and not pending.failed
            wanted = len(missing) if first else self._needed(pending) - len(pending.uploads)
            if len(connected) >= wanted or time.monotonic() > deadline:
                return
            self.nodes.rejected.clear()  # a rejected node may have been fixed since
            time.sleep(min(POLL_SECONDS, self.patience))
