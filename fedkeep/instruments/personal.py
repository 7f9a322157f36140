"""Study of personalised accuracy: every client's, with the global model and with what it would use itself.

Three models per client: the global one; the method's own, if the method defines `personal_params`; and the one after
the local training of the next round, for some epochs. Each is measured on data like the client's own, and on the whole
test set. docs/personalisation.md has the choices.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedkeep import forgetting as fg
from fedkeep import tree
from fedkeep._util.text import list_some
from fedkeep.analysis import personal as recorded
from fedkeep.engine import device, server_hooks
from fedkeep.engine.divergence import finite_and_loss
from fedkeep.engine.evaluate import class_hits
from fedkeep.engine.round_plan import RoundPlanner
from fedkeep.engine.simulation import Simulation
from fedkeep.engine.stacked import Stacked
from fedkeep.errors import FedkeepError
from fedkeep.instruments.options import AUTO, LABELS, OWN_EXAMPLES, Options, Result
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

Found = tuple[np.ndarray, np.ndarray]  # accuracy on data like its own [K], and by class on the test set [K, C]


def personal(simulation: Simulation, options: Options) -> Result:
    """Return every client's accuracy, with each model: the mean, the spread, the worst tenth, and all clients'."""
    s = simulation
    epochs = s.settings.epochs if options.tune_epochs is None else options.tune_epochs
    with device.numerics(s.settings, s.task.device, s.threads):
        measured = _Clients.of(s, options.personal_data)
        found = {recorded.GLOBAL: measured.global_model()}
        if s.method.personalises:
            found[recorded.OWN] = measured.each(measured.own_models())
        if epochs:
            found[recorded.TUNED] = measured.each(measured.tuned_models(epochs))
    return {
        "data": measured.data,
        "epochs": epochs,
        "clients": measured.ids,
        "left_out": len(s.clients) - len(measured.ids),
        "never_took_part": measured.never,
        **{model: measured.summary(*result) for model, result in found.items()},
    }


@dataclass(frozen=True)
class _Clients:
    """The clients that are measured, and how."""

    simulation: Simulation
    ids: list[int]
    data: str
    own: list[np.ndarray]  # each client's own examples for testing; empty if classes are weighted by label shares

    @classmethod
    def of(cls, s: Simulation, choice: str) -> _Clients:
        """Return the clients with training examples; with own examples for testing only those that have some."""
        ids = [k for k in range(len(s.clients)) if s.planner.examples.size(k, s.round + 1)]
        data, own = own_examples(s)
        with_own = [k for k in ids if len(own[k])] if own else []
        if choice == OWN_EXAMPLES and not with_own:
            raise FedkeepError(
                "no client has test examples of its own: the split has no validation, and the data set does not name "
                f"the owners of test examples; personal_data={LABELS} weights the test set's classes instead",
                key="personal_data",
                value=choice,
                valid=[AUTO, LABELS],
            )
        if choice == LABELS or not with_own or (choice == AUTO and len(with_own) < len(ids)):
            return cls(s, ids, recorded.LABEL_SHARES, [])
        return cls(s, with_own, data, [own[k] for k in with_own])

    @cached_property
    def label_counts(self) -> np.ndarray:
        """[K, C] number of training examples of each client and class."""
        planner, number = self.simulation.planner, self.simulation.round + 1
        labels = (planner.labels[planner.examples.of(k, number)] for k in self.ids)
        return np.stack([np.bincount(y, minlength=planner.n_classes) for y in labels])

    @cached_property
    def never(self) -> list[int]:
        """The clients that took part in no round so far."""
        s = self.simulation
        visited = {k for number in range(1, s.round + 1) for k in s.planner.cohort(number)[0]}
        return [k for k in self.ids if k not in visited]

    @cached_property
    def _totals(self) -> np.ndarray:
        """[C] number of test examples of each class."""
        return np.bincount(self.simulation.y_test.cpu().numpy(), minlength=self.simulation.task.n_classes)

    def summary(self, own: np.ndarray, by_class: np.ndarray) -> Result:
        """Return the numbers of one model: over clients, and of each client."""
        totals = self._totals
        on_test_set = np.nansum(by_class * totals, axis=1) / max(totals.sum(), 1)
        numbers = recorded.summarize_clients(own, self.label_counts.sum(1), np.isin(self.ids, self.never, invert=True))
        return {**numbers, "test_set": float(on_test_set.mean()), "clients": own.tolist()}

    def global_model(self) -> Found:
        """Return the accuracies of the tested global model; it is evaluated once."""
        s = self.simulation
        hits = class_hits(s.task, s.params, s.x_test, s.y_test, s.eval_inputs, chunk=s.evaluator.chunk(1))
        by_class = np.tile(self._shares(hits[None]), (len(self.ids), 1))
        if not self.own:
            return fg.personalised(by_class, self.label_counts), by_class
        return self._on_own_examples(lambda k: s.params, range(len(self.ids))), by_class

    def each(self, models: Iterator[tuple[Tree, Tensor | None]]) -> Found:
        """Return the accuracies of one model per client, in stacks; a model that is not finite has accuracy 0."""
        s, own, by_class, first = self.simulation, [], [], 0
        mapping = s.engine.each if isinstance(s.engine, Stacked) else None
        for params, finite in models:
            count = len(tree.leaves(params)[0])
            hits = s.evaluator.local_models(params, count, mapping)
            valid = np.ones((count, 1)) if finite is None else finite.cpu().numpy()[:, None]
            accuracies = self._shares(hits) * valid
            places = range(first, first + count)
            if self.own:
                here = self._on_own_examples(functools.partial(_take, params, first), places) * valid[:, 0]
            else:
                here = fg.personalised(accuracies, self.label_counts[first : first + count])
            own.append(here)
            by_class.append(accuracies)
            first += count
        return np.concatenate(own), np.concatenate(by_class)

    def own_models(self) -> Iterator[tuple[Tree, None]]:
        """Yield the method's own models of the clients, stacked, as many at a time as train in a round."""
        for ids in self._chunks():
            with torch.no_grad():
                models = tree.stack([self.simulation.personal_params(k) for k in ids])
            yield models, None

    def tuned_models(self, epochs: int) -> Iterator[tuple[Tree, Tensor]]:
        """Yield the clients' models after the local training of the next round, for so many epochs."""
        s, number = copy.copy(self.simulation), self.simulation.round + 1
        settings = dataclasses.replace(s.settings, epochs=epochs)
        s.planner = RoundPlanner(settings, s.data, s.clients, s.ranks, s.planner.hold_out)
        shared, lr = server_hooks.broadcast(s.method, s.server), s.settings.lr_in(number)
        for ids in self._chunks():
            for jobs, result in s.trainer.train(shared, [s.job(k, number) for k in ids], lr):
                finite = finite_and_loss(jobs, result)[0] != 0
                if broken := [str(job.id) for job, good in zip(jobs, finite.tolist(), strict=True) if not good]:
                    names = list_some(broken)
                    log.warning("fine-tuning after round %d is NaN or infinite for clients: %s", s.round, names)
                yield tree.detach(result.params), finite

    def _chunks(self) -> Iterator[list[int]]:
        size = max(1, self.simulation.cohort_size)
        return (self.ids[first : first + size] for first in range(0, len(self.ids), size))

    def _shares(self, hits: Tensor) -> np.ndarray:
        """Return class accuracies [K, C]; NaN for a class without test examples."""
        totals = self._totals
        return np.asarray(hits.cpu().numpy() / np.where(totals > 0, totals, np.nan))

    def _on_own_examples(self, model: Callable[[int], Tree], places: Sequence[int]) -> np.ndarray:
        """Return the accuracy of each client's model on the client's own test examples."""
        s = self.simulation
        x, y = (s.x_test, s.y_test) if self.data == recorded.OWN_TEST else (s.x, s.y)
        right = []
        for k in places:
            at = torch.from_numpy(self.own[k]).to(y.device)
            hits = class_hits(s.task, model(k), tree.take(x, at), y[at], s.eval_inputs, chunk=s.evaluator.chunk(1))
            right.append(hits.sum())
        return np.asarray(torch.stack(right).cpu().numpy() / np.array([len(self.own[k]) for k in places]))


def _take(stack: Tree, first: int, k: int) -> Tree:
    """Return model k of a stack whose first is number `first`."""
    return tree.take(stack, k - first)


def own_examples(s: Simulation) -> tuple[str, list[np.ndarray]]:
    """Return the examples that each client has for testing, and what they are; none if there are no such examples.

    The test examples of the owner that a client is, as indices into the test data; otherwise those that the split holds
    out for validation, as indices into the training data.
    """
    ids, test_ids = s.data.ids, s.data.test_ids
    if ids is not None and test_ids is not None:
        owners = [np.unique(ids[part]) for part in s.clients]
        names = [owner[0] for owner in owners if len(owner) == 1]
        if len(names) == len(set(names)) == len(s.clients):
            return recorded.OWN_TEST, [np.flatnonzero(test_ids == name) for name in names]
    if s.clients.held is not None:
        return recorded.HELD_OUT, list(s.clients.held)
    return recorded.LABEL_SHARES, []
