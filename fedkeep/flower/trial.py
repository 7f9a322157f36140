"""Trial of an aggregated round before it is applied: could an honest client still train from it?

One hostile update within all limits can still make the server's tree such that every later update is rejected. So the
server trains a client of its own for a few steps, on some of its test examples, from what the round would send. If that
client's upload would be rejected, the round is not applied.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedkeep import tree
from fedkeep._util.batches import count_batches
from fedkeep._util.text import one_line
from fedkeep.data.plan import make_plan
from fedkeep.engine import device, server_hooks
from fedkeep.engine.local import LocalTraining
from fedkeep.errors import FedkeepError
from fedkeep.flower.federation_server import FederationServer
from fedkeep.flower.update_checks import ExpectedUpload, Limits, distance_between
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

STEPS = 20  # of the trial client


@dataclass
class Trial:
    """Tries rounds for a federation's server. Without test data, only the numbers of the server's tree are checked."""

    federation: FederationServer
    limits: Limits
    trains: bool | None = None  # None: not known yet

    def problem(self, server: Tree, number: int) -> str | None:
        """Return why the next tree of the server must not be applied, or None."""
        for path, leaf in tree.items(server):
            top = float(leaf.double().abs().max()) if leaf.numel() else 0.0
            if not path.startswith("params/") and not top <= self.limits.value:
                return f"{path} of the server would contain {top:.3g} (limits.value)"
        distance, norm = distance_between(server["params"], self.federation.state.server["params"])
        if not distance <= self.limits.update * max(norm, 1.0):
            return f"the server's params would move by {distance:.3g}, from a norm of {norm:.3g} (limits.update)"
        if not self._trains():
            return None
        problem = self._problem_of_client(server, number + 1)
        return None if problem is None else f"a client that trains from it would be rejected: {problem}"

    def _trains(self) -> bool:
        """Return whether a trial client works at all: it does so with the server's present tree."""
        if self.trains is None:
            state = self.federation.state
            problem = self._problem_of_client(state.server, state.round + 1) if self.federation.test else "no data"
            self.trains = problem is None
            if self.federation.test and problem is not None:
                log.warning("rounds are applied without a trial, since a trial client already fails: %s", problem)
        return self.trains

    def _problem_of_client(self, server: Tree, number: int) -> str | None:
        """Train a new client for a few steps; return why its upload would be rejected, or None."""
        federation = self.federation
        assert federation.test is not None
        settings, method = federation.settings, federation.method
        x, y = federation.test
        at = torch.linspace(0, len(y) - 1, min(len(y), STEPS * settings.batch_size), device=y.device).long()
        size, drop_last = settings.batch_size, settings.drop_last
        epochs = max(1, min(settings.epochs, STEPS // count_batches(len(at), size, drop_last)))
        hold_out = method.hold_out()
        plan = make_plan(
            settings.seed, number, federation.n_clients, len(at), epochs, size, drop_last=drop_last, hold_out=hold_out
        )
        task = copy.copy(federation.task)
        task.public = None
        try:
            with device.numerics(settings, task.device, federation.threads):
                shared, sent = server_hooks.broadcast(method, server), server_hooks.broadcast_to(method, server, 0)
                client = method.init_client(task, shared["params"])
                local = LocalTraining(method, task, federation.inputs, settings.clip_norm, settings.part_size)
                trained = local.train_one(shared, client, tree.take(x, at), y[at], plan, settings.lr_in(number), sent)
            upload = tree.to(trained.upload, "cpu")
            expected = ExpectedUpload.of(federation, server, number, self.limits)
            replace(expected, epochs=epochs).require_values(upload)
        except FedkeepError as error:
            return one_line(error)
        except Exception as error:
            return f"{type(error).__name__}: {one_line(error)}"
        return None


def outlier(uploads: Mapping[int, Tree], server: Tree) -> tuple[int, dict[int, float]]:
    """Return the client whose upload is furthest from the others', and every client's score.

    A score is the largest quotient, over the upload's entries, of the entry's size and the median size of that entry;
    the size of weights is their distance from the server's.

    >>> two = {0: {"params": {"w": torch.ones(2)}}, 1: {"params": {"w": 9 * torch.ones(2)}}}
    >>> outlier(two, {"params": {"w": torch.zeros(2)}})[0]
    1
    """
    ids = sorted(uploads)
    scores = dict.fromkeys(ids, 0.0)
    for name in uploads[ids[0]]:
        sizes = torch.tensor(
            [_size(uploads[k][name], server["params"] if name == "params" else None) for k in ids], dtype=torch.float64
        )
        middle = max(float(sizes.median()), 1e-30)
        for k, size in zip(ids, sizes.tolist(), strict=True):
            scores[k] = max(scores[k], size / middle)
    return _largest(ids, scores), scores


def _size(value: Tree, reference: Tree | None) -> float:
    value = tree.to(value, "cpu", torch.float64)
    if reference is not None:
        value = tree.sub(value, tree.to(reference, "cpu", torch.float64))
    return math.sqrt(sum(float((leaf**2).sum()) for leaf in tree.leaves(value)))


def _largest(ids: Sequence[int], scores: Mapping[int, float]) -> int:
    return max(ids, key=lambda k: scores[k])
