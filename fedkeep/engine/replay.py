"""Replays of the local training step on a CPU: recorded once per number of clients, then repeated without Python.

A step of some small clients is about a hundred short operations. Calling them through Python, autograd and `vmap` takes
several times as long as the operations themselves. A replay (`engine/recording.py`) gives the same numbers bit for bit,
as CUDA graphs do on a GPU.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.engine.recording import Recording, record
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

Result = tuple[Tensor, Tree, Tree]  # the losses, the gradients and the tracked sums of a step
Gradients = Callable[[Tree], Result]  # from a step's trees

MIN_USES = 100  # a recording takes as long as about fifty steps
MAX_WEIGHTS = 2_000_000  # of all clients together; above, the operations themselves take the time
MAX_RECORDINGS = 64  # further kinds of steps are computed in Python: to replace recordings would cost more


class Replay:
    """Computes a step's losses, gradients and tracked sums, from recordings where they pay.

    `gradients` computes them in Python, `n_weights` is the size of the model, `rounds` the length of the run, and
    `trained` returns those of the weights that have a gradient.
    """

    def __init__(
        self, gradients: Gradients, n_weights: int, rounds: int, trained: Callable[[Tree], Tree] = lambda params: params
    ) -> None:
        self.gradients, self.trained, self.n_weights, self.rounds = gradients, trained, n_weights, rounds
        self.works = True
        self.recordings: dict[Any, _Recorded | None] = {}  # by number, shapes and types of the inputs
        self._uses: Counter[int] = Counter()  # steps of this round, by number of clients

    def expect(self, live: Sequence[int]) -> None:
        """Take note of how many clients train in each step of a round."""
        self._uses = Counter(live)

    def __call__(self, trees: Tree) -> Result:
        """Return the losses of a step's clients, [K], their gradients and what they track."""
        n_clients = len(trees["batch"]["mask"])
        if not self.works or not self._pays(n_clients):
            return self.gradients(trees)
        inputs = tree.leaves(trees)
        key = tuple((t.shape, t.stride(), t.dtype) for t in inputs)
        if key not in self.recordings and len(self.recordings) < MAX_RECORDINGS:
            return self._record(key, trees, inputs)
        recorded = self.recordings.get(key)
        if recorded is None:
            return self.gradients(trees)
        recorded.uses += 1
        if recorded.uses == recorded.next_check:
            recorded.next_check *= 4
            return self._checked(recorded, trees, inputs)
        return self._like(trees, recorded(inputs))

    def _pays(self, n_clients: int) -> bool:
        return self._uses[n_clients] * self.rounds >= MIN_USES and n_clients * self.n_weights <= MAX_WEIGHTS

    def _record(self, key: Any, trees: Tree, inputs: list[Tensor]) -> Result:
        """Take this step in Python and record it. What cannot be recorded is computed in Python from now on."""

        def flat(*tensors: Tensor) -> list[Tensor]:
            return _flat(self.gradients(tree.like(trees, tensors)))

        try:
            outputs, recording = record(flat, inputs)
        except Exception as error:  # if it is an error of the step, the step in Python raises it too
            log.debug("a local step is not recorded: %s", error)
            self.recordings[key] = None
            return self.gradients(trees)
        recording.compile(inputs)
        self.recordings[key] = _Recorded(recording)
        return self._like(trees, outputs)

    def _checked(self, recorded: _Recorded, trees: Tree, inputs: list[Tensor]) -> Result:
        """Return the result in Python; if the replay's is another, do without replays from now on.

        A module or a hook may do something else at every call, by a state or a random number of its own.
        """
        expected = self.gradients(trees)
        try:
            same = all(_equal(a, b) for a, b in zip(_flat(expected), recorded(inputs), strict=True))
        except Exception as error:
            log.debug("a local step cannot be replayed: %s", error)
            same = False
        if not same:
            log.debug("local steps are computed in Python: a replay differs")
            self.works = False
            self.recordings.clear()
        return expected

    def _like(self, trees: Tree, flat: Sequence[Tensor]) -> Result:
        """Undo `_flat`: gradients are like the trained weights, sums like those that `prepare` started."""
        sums = trees["local"].get("tracked", {})
        first = len(flat) - len(tree.leaves(sums))
        return flat[0], tree.like(self.trained(trees["params"]), flat[1:first]), tree.like(sums, flat[first:])


class _Recorded:
    """A recording of a step, how often it was used, and at which use it is checked next: the 1st, 4th, 16th, ..."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.uses, self.next_check = recording, 0, 1

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the losses, gradients and tracked sums of a step, one tensor after another."""
        with torch.no_grad():
            return self.recording(inputs)


def _flat(result: Result) -> list[Tensor]:
    return [result[0], *tree.leaves(result[1]), *tree.leaves(result[2])]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are the same, bit for bit but for the bits of NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())
