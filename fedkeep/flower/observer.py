"""Observer of a strategy that a user already has: tests the global model after every round, and records what happened.

The strategy stays the same object and computes the same, bit for bit. Its methods are replaced, on this object alone,
by ones that call them and look at what goes in and comes out. The global random states of Python, numpy and torch are
left as they would be without the observer.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedkeep._util.rng import preserved
from fedkeep._util.text import one_line
from fedkeep.errors import ConfigError, FedkeepError, RunError
from fedkeep.flower.class_test import ClassTest
from fedkeep.flower.observed_run import ObservedRun, describe_run, is_plain
from fedkeep.flower.strategy_api import Reply, StrategyApi
from fedkeep.runs.history import Record
from fedkeep.runs.round_metrics import hits_of

log = logging.getLogger("fedkeep")

LOSS_KEYS = ("train_loss", "train-loss", "loss")  # of a node's metrics
LABEL_COUNTS = "label-counts"
MARK = "_fedkeep_observer"  # the attribute of a strategy that is observed
MOST_METRICS = 50  # of a node, or of a round


@dataclass
class _Round:
    """A round that is not recorded yet."""

    number: int
    began: float
    asked: list[Any] = field(default_factory=list)  # as the strategy has them: messages, or pairs
    bytes_down: int = 0
    record: Record = field(default_factory=dict)
    arrays: Any = None  # the aggregated ones


class Observer:
    """Tests and records the rounds of a strategy."""

    def __init__(
        self, strategy: Any, api: StrategyApi, test: ClassTest, run: ObservedRun, about: dict[str, Any], **options: Any
    ) -> None:
        self.strategy, self.api, self.test, self.run, self.about = strategy, api, test, run, about
        self.rounds: int | None = options["num_rounds"]
        self.every, self.local_every = options["every"], options["local_every"]
        self.config: dict[str, Any] = {}  # what `start` sends to the nodes
        self.clients: dict[str, int] = {}  # node -> client
        self.arrays: Any = None  # the global model of the last round
        self.pending: _Round | None = None
        self.starting = False  # whether `start` is running, which says when the last round is over
        self.logged: set[str] = set()

    def attach(self) -> None:
        """Replace the strategy's methods by ones that are observed."""
        methods = {
            self.api.configure: self._configure,
            self.api.aggregate: self._aggregate,
            self.api.after: self._after,
        }
        if hasattr(self.strategy, "start"):
            methods["start"] = self._start
        try:
            for name, observed in methods.items():
                inner = getattr(self.strategy, name)
                setattr(self.strategy, name, functools.wraps(inner)(functools.partial(observed, inner)))
            setattr(self.strategy, MARK, self)
        except AttributeError as error:
            kind = type(self.strategy).__name__
            message = f"{kind} cannot be observed, because its attributes cannot be set: {one_line(error)}"
            raise ConfigError(message, key="strategy", value=kind) from error

    def _start(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(inner).bind(*args, **kwargs)
        given.apply_defaults()
        values = {**given.arguments, **given.kwargs}
        if (rounds := values.get("num_rounds")) is not None:
            self.rounds = int(rounds)
        self.config = {key: value for key, value in (values.get("train_config") or {}).items() if is_plain(value)}
        if self.run.ended:
            log.warning("%s contains an earlier start of this strategy; this one is not recorded", self.run.path)
        elif values.get("initial_arrays") is not None:
            self._begin(values["initial_arrays"])
        self.starting = True
        try:
            result = inner(*args, **kwargs)
            if self.pending is not None and self.pending.record:
                self._close(self.pending.arrays)
            with self._continuing("the end of the run was not recorded"):
                self.run.finish()
            return result
        finally:
            self.starting = False
            self.run.close()

    def _configure(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _, arrays, *_ = _values(inner, args, kwargs)
        self._begin(arrays)
        if self.pending is not None and self.pending.record:
            self._close(arrays)  # the strategy's own loop has not shown the model since
        began = time.perf_counter()
        result = inner(*args, **kwargs)
        result = result if isinstance(result, list) else list(result)
        with self._continuing("what is sent to the nodes was not recorded"):
            self.arrays = arrays
            self.pending = self.pending or _Round(self.run.number + 1, began)
            self.pending.asked += result
            self.pending.bytes_down += self.api.bytes_sent(result)
        return result

    def _aggregate(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arrived = time.perf_counter()
        given = inspect.signature(inner).bind(*args, **kwargs)
        name = list(given.arguments)[1]
        if not isinstance(given.arguments[name], list):
            given.arguments[name] = list(given.arguments[name])
        with self._continuing("the replies were not recorded"):
            self._read(given.arguments[name])
        began = time.perf_counter()
        result = inner(*given.args, **given.kwargs)
        pending = self.pending
        with self._continuing("the result of a round was not recorded"):
            if pending is not None:
                arrays, metrics = result
                pending.record["seconds"] = arrived - pending.began + time.perf_counter() - began
                pending.record["train_metrics"] = _plain_metrics(metrics or {})
                pending.arrays = self.arrays if arrays is None else arrays
        if pending is not None and not self.starting and pending.number == self._last:
            self._after_last(pending)
        return result

    def _after(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number, arrays, *_ = _values(inner, args, kwargs)
        if number == 0:  # the older interface has the untrained model tested
            self._begin(arrays)
        elif self.pending is not None and self.pending.record:
            self._close(arrays)
            if not self.starting and self.run.number == self._last:
                with self._continuing("the end of the run was not recorded"):
                    self.run.finish()
        return inner(*args, **kwargs)

    @property
    def _last(self) -> int:
        return self.run.resumed + (self.rounds or 0)

    def _after_last(self, pending: _Round) -> None:
        """Close the last round of an app with a loop of its own, unless that one goes on to evaluate it."""
        if hasattr(self.strategy, "start"):
            self._close(pending.arrays)
            with self._continuing("the end of the run was not recorded"):
                self.run.finish()

    def _begin(self, arrays: Any) -> None:
        """Test and record the untrained model, unless that is done; whatever is wrong is raised here."""
        if self.run.state is not None:
            return
        if self.rounds is None:
            raise ConfigError(
                "the number of rounds is unknown: pass num_rounds to forgetting or, if another strategy wraps this "
                "one, call forgetting with that one",
                key="num_rounds",
            )
        with preserved():
            try:
                weights = self.api.tensors(arrays)
                record = {"round": 0, **self.test.run(weights, self.api.copied(arrays))}
            except FedkeepError:
                raise
            except Exception as error:
                message = f"the untrained model cannot be tested: {one_line(error)}"
                raise FedkeepError(message, key="test_data", value=type(error).__name__) from error
            train = {"rounds": self.rounds, "eval_every": self.every, "eval_local_every": self.local_every}
            settings = {**train, **({"config": self.config} if self.config else {})}
            self.run.open(describe_run(self.strategy, self.test.about(), weights, settings, **self.about), weights)
            if not self.run.records:
                self.run.add(record, weights)
            for one in self.run.records:
                self.clients.update({node: int(client) for client, node in one.get("nodes", {}).items()})

    def _read(self, replies: Sequence[Any]) -> None:
        """Write what the nodes have sent into the record of the round."""
        pending = self.pending
        if pending is None or self.run.ended:
            return
        nothing = {"cohort": [], "skipped": [], "bytes_up": 0, "seconds": 0.0}  # that is known, if the rest fails
        pending.record = {"round": pending.number, "bytes_down": pending.bytes_down, **nothing}
        found = self.api.replies(replies, pending.asked)
        new = self._number(reply.node for reply in found)
        valid = {self.clients[str(reply.node)]: reply for reply in found if reply.failure is None}
        cohort = sorted(valid)
        failed = {self.clients[str(reply.node)]: reply.failure for reply in found if reply.failure is not None}
        pending.record |= {
            "cohort": cohort,
            "bytes_up": sum(reply.nbytes for reply in valid.values()),
            "client_metrics": {str(k): _plain_metrics(valid[k].metrics) for k in cohort},
        }
        losses = [(r.weight, float(loss)) for r in valid.values() if (loss := _loss(r.metrics)) is not None]
        if losses and len(losses) == len(valid):
            pending.record["train_loss"] = sum(w * loss for w, loss in losses) / sum(w for w, _ in losses)
        optional = {"failed": {str(k): reason for k, reason in sorted(failed.items())}, "nodes": new}
        pending.record.update({key: value for key, value in optional.items() if value})
        if self.run.resumed and pending.number == self.run.resumed + 1:
            pending.record["resumed"] = True
        if self._due(self.local_every, pending.number) and cohort:
            with self._continuing("the local models were not tested"):
                pending.record["local"] = self._local([valid[k] for k in cohort])

    def _number(self, nodes: Iterator[int | str]) -> dict[str, str]:
        """Give nodes that are new a client's number, and return them by it."""
        new = sorted({str(node) for node in nodes} - self.clients.keys(), key=lambda node: (len(node), node))
        numbered = {str(len(self.clients) + k): node for k, node in enumerate(new)}
        self.clients.update({node: int(client) for client, node in numbered.items()})
        return numbered

    def _local(self, replies: list[Reply]) -> Record:
        """Return the class accuracies of the cohort's local models, and the label counts that nodes have sent."""
        tested = [hits_of(self.test.run(self.api.tensors(r.arrays), self.api.copied(r.arrays))) for r in replies]
        total = tested[0][1]
        return {
            "hits": np.stack([hits for hits, _ in tested]).tolist(),
            "total": total.tolist(),
            "label_counts": [_label_counts(reply.metrics, len(total)) for reply in replies],
        }

    def _close(self, arrays: Any) -> None:
        """Test the global model of a round, and record the round."""
        pending, self.pending = self.pending, None
        assert pending is not None
        if self.run.ended:
            return
        record, weights = pending.record, {}
        with self._continuing("the global model was not tested"):
            weights = self.api.tensors(arrays)
            if self._due(self.every, pending.number):
                record.update(self.test.run(weights, self.api.copied(arrays)))
        with self._continuing("the round was not recorded"):
            self.run.add(record, weights)
            log.info(self.run.summary())

    def _due(self, every: int, number: int) -> bool:
        return bool(every) and (number % every == 0 or number == self._last)

    @contextmanager
    def _continuing(self, problem: str) -> Iterator[None]:
        """Log what goes wrong in the block, once, and continue: an observer never ends a federation."""
        try:
            with preserved():
                yield
        except Exception as error:
            text = f"{problem} ({type(error).__name__}: {one_line(error)})"
            if isinstance(error, RunError):  # what was written before is intact, what comes after would not fit it
                text += f"; nothing more is recorded in {self.run.path}"
                self.run.close()
            if text not in self.logged and problem not in self.logged:
                log.warning("%s; the federation continues, and this is not logged again", text)
            self.logged.add(problem)


def _values(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call in the order of the function's parameters."""
    return list(inspect.signature(function).bind(*args, **kwargs).arguments.values())


def _plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that are single numbers, at most 50; those that are not finite are None."""
    numbers = [(key, value) for key, value in metrics.items() if isinstance(value, int | float)]
    finite = [(key, value if math.isfinite(value) else None) for key, value in numbers[:MOST_METRICS]]
    return {one_line(str(key), 80): value for key, value in finite}


def _loss(metrics: Mapping[str, Any]) -> float | None:
    loss = next((metrics[key] for key in LOSS_KEYS if key in metrics), None)
    return loss if isinstance(loss, int | float) and math.isfinite(loss) else None


def _label_counts(metrics: Mapping[str, Any], classes: int) -> list[int]:
    """Return how many examples of each class a node has; zeros if it does not say so in its metrics."""
    counts = metrics.get(LABEL_COUNTS)
    if not isinstance(counts, list) or len(counts) != classes or not all(0 <= n < 2**53 for n in counts):
        return [0] * classes
    return [int(n) for n in counts]
