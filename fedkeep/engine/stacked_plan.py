"""The plans of a cohort as tensors on the device, for stacked training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.data.texts import Texts
from fedkeep.engine.local import ClientJob
from fedkeep.tree import Tree


class TextWidths:
    """The widths of batches of texts, computed on the host: a device would have to be waited for."""

    def __init__(self, x: Texts) -> None:
        self.form, self.length = x.form, x.length.cpu().numpy()

    def of_steps(self, at: np.ndarray, mask: np.ndarray) -> list[int | None]:
        """Return the width of each of S steps; `at` are the places of their examples and `mask` the real ones."""
        longest = np.where(mask, self.length[at], 0).reshape(len(at), -1).max(1, initial=0)
        return [self.form.width(int(one)) for one in longest]

    def of_all(self, at: np.ndarray) -> int:
        """Return the width of a batch of the examples at these places."""
        return self.form.width(int(self.length[at].max(initial=0)))


class StackedPlan:
    """The plans of K clients, sorted longest first, as arrays [S, K, B]; their examples one client after another.

    `may_drop`: with a key of each step's dropout, [S, K]. `rehearses`: with the examples rehearsed in each step.
    `widths` are those of the steps if the examples are texts, else None; `widest` is that of all examples.
    """

    def __init__(
        self,
        jobs: Sequence[ClientJob],
        device: torch.device,
        may_drop: bool = False,
        rehearses: bool = False,
        texts: TextWidths | None = None,
    ) -> None:
        steps = np.array([job.plan.steps for job in jobs])
        S, K, B = int(steps[0]), len(jobs), max(job.plan.index.shape[1] for job in jobs)
        self.live = np.searchsorted(-steps, -np.arange(S), side="left").tolist()  # how many clients train in each step
        self.sizes = [len(job.examples) for job in jobs]
        starts = np.cumsum([0, *self.sizes[:-1]])
        place, at = np.zeros((S, K, B), dtype=np.int64), np.zeros((S, K, B), dtype=np.int64)
        mask = np.zeros((S, K, B), dtype=bool)
        augment = {key: np.zeros((S, K, B), dtype=np.int64) for key in jobs[0].plan.augment}
        for k, job in enumerate(jobs):
            s, b = job.plan.index.shape
            place[:s, k, :b], mask[:s, k, :b] = job.plan.index + starts[k], job.plan.mask
            at[:s, k, :b] = job.examples[job.plan.index]
            for key, value in job.plan.augment.items():
                augment[key][:s, k, :b] = value
        steps_on_host: Tree = {"at": at, "place": place, "mask": mask, "augment": augment}
        if may_drop:
            steps_on_host["dropout_key"] = np.zeros((S, K), dtype=np.int64)
            for k, job in enumerate(jobs):
                steps_on_host["dropout_key"][: steps[k], k] = job.plan.dropout_keys
        if rehearses:
            steps_on_host["rehearsal"] = np.zeros((S, K, B), dtype=np.int64)
            for k, job in enumerate(jobs):
                s, b = job.plan.rehearsal.shape
                steps_on_host["rehearsal"][:s, k, :b] = job.plan.rehearsal + starts[k]

        self.widths: list[int | None] = texts.of_steps(at, mask) if texts else [None] * S
        self.widest = texts.of_all(np.concatenate([job.examples for job in jobs])) if texts else None

        def put(a: np.ndarray) -> Tensor:
            t = torch.from_numpy(a)
            return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)

        # at: index into the training data; place, rehearsal: index into `examples`; mask: False for padding
        self.steps_on_device: Tree = tree.map(put, steps_on_host)
        self.examples = put(np.concatenate([job.examples for job in jobs]).astype(np.int64))
        self.own = torch.split(self.examples, self.sizes)
        self.start, self.last = put(starts), put(np.array(self.sizes) - 1)  # of each client's own examples
        self.jobs, self.put = jobs, put

    def one_pass(self) -> tuple[Tree, list[int]]:
        """Return one pass over all examples: batches {at, mask} [P, K, B], and how many clients have each of them."""
        passes = [job.plan.one_pass for job in self.jobs]
        lengths = np.array([len(batches) for batches in passes])
        clients = np.searchsorted(-lengths, -np.arange(lengths[0]), side="left").tolist()
        if not any(len(job.plan.dropped) for job in self.jobs):  # the first epoch
            return {key: self.steps_on_device[key] for key in ("at", "mask")}, clients
        at, mask = self._padded(passes)
        return {"at": self.put(at), "mask": self.put(mask)}, clients

    def noise_seeds(self) -> Tensor:
        """Return the clients' seeds of the random numbers of their steps, [K]."""
        return self.put(np.array([job.plan.noise_seed for job in self.jobs]))

    def refine_pass(self) -> tuple[Tree, list[int]]:
        """Return one pass for the hook `refine`, and up to which client each of its batches matters.

        The batches are {at, mask, position} [P, K, B]; `position` counts a client's examples in this order.
        """
        passes = [job.plan.refine_batches for job in self.jobs]
        at, mask = self._padded(passes)
        full = np.array([job.plan.index.shape[1] for job in self.jobs])  # how many examples a client's batches have
        first = np.arange(len(at))[:, None, None] * full[:, None]
        position = np.where(mask, first + np.arange(at.shape[-1]), 0)
        widest = [1 + int(np.flatnonzero(row.any(-1)).max()) for row in mask]
        return tree.map(self.put, {"at": at, "mask": mask, "position": position}), widest

    def _padded(self, passes: Sequence[Sequence[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the examples in every client's batches, [P, K, B], and which of them are real."""
        shape = (max(map(len, passes)), len(passes), self.steps_on_device["at"].shape[-1])
        at, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
        for k, (job, batches) in enumerate(zip(self.jobs, passes, strict=True)):
            for p, own in enumerate(batches):
                at[p, k, : len(own)], mask[p, k, : len(own)] = job.examples[own], True
        return at, mask

    def is_of(self, jobs: Sequence[ClientJob]) -> bool:
        """Return whether this was made from the plans of these jobs."""
        return len(jobs) == len(self.jobs) and all(a.plan is b.plan for a, b in zip(jobs, self.jobs, strict=True))

    def valid_and_noise(self) -> tuple[Tensor, Tensor]:
        """Return, over a padded axis of examples, which ones are real and their random numbers: [K, longest]."""
        valid = np.arange(max(self.sizes)) < np.array(self.sizes)[:, None]
        noise = np.zeros(valid.shape)
        noise[valid] = np.concatenate([job.plan.noise for job in self.jobs])
        return torch.from_numpy(valid).to(self.start.device), torch.from_numpy(noise).to(self.start.device)
