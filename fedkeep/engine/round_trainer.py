"""Training of one round: the cohort's clients, on all ranks. Changes no state of the federation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.engine.distributed import Ranks
from fedkeep.engine.divergence import finite_and_loss, require_finite
from fedkeep.engine.evaluate import Evaluator
from fedkeep.engine.local import ClientJob, ClientResult
from fedkeep.engine.round_parts import round_part
from fedkeep.engine.round_plan import RoundPlan, RoundPlanner
from fedkeep.engine.server_hooks import broadcast, broadcast_to
from fedkeep.engine.settings import Settings
from fedkeep.engine.stacked import Stacked
from fedkeep.engine.trainer import Trainer
from fedkeep.runs.client_store import ClientStore
from fedkeep.tree import Tree


@dataclass(frozen=True)
class RoundResult:
    """A trained round that is not applied yet.

    `clients` is stacked over the cohort, in the order of its ids: `upload`, `client` (the next states) and `loss`. With
    `keep_models` also `params`, the local models; without it, where local models are evaluated, `hits` and
    `label_counts` [K, C]. It is empty if the cohort is, and on every rank but the first. If uploads are only
    averaged and the cohort was trained in chunks, `upload` has one entry for each chunk: its mean.

    A GPU may still be training when this is returned; `verify` waits for it.
    """

    plan: RoundPlan
    lr: float
    shared: Tree
    clients: Tree
    bytes_up: int
    bytes_sent: int = 0  # to single clients, besides what is shared
    checks: tuple[Callable[[], None], ...] = ()

    def verify(self) -> None:
        """Raise `Diverged` if a client's numbers are NaN or infinite."""
        for check in self.checks:
            check()


@dataclass(frozen=True)
class RoundTrainer:
    """Trains the clients of a round."""

    settings: Settings
    planner: RoundPlanner
    trainer: Trainer
    evaluator: Evaluator
    ranks: Ranks

    def train(self, server: Tree, states: ClientStore, number: int, keep_models: bool = False) -> RoundResult:
        """Train a round's cohort; every rank trains its share, rank 0 gets all results."""
        with round_part("plan"):
            lr, plan = self.settings.lr_in(number), self.planner.plan(number)
        with round_part("broadcast"):
            shared = broadcast(self.trainer.local.method, server)
        if not plan.cohort:
            return RoundResult(plan, lr, shared, {}, 0)
        stored: list[Tree] = []
        self.ranks.on_rank0(lambda: stored.extend(_stored(states, share) for share in plan.shares))
        device = self.trainer.local.task.device
        own = self.ranks.scatter(stored, device)
        checks: list[Callable[[], None]] = []
        gathered = self.ranks.gather(
            lambda: self._train_share(shared, self._jobs(server, shared, plan, own), plan, lr, keep_models, checks),
            device,
        )
        if not gathered:
            return RoundResult(plan, lr, shared, {}, 0)
        clients = tree.cat([part for part in gathered if part])
        order = torch.argsort(clients["id"])
        upload, bytes_up, bytes_sent = clients.pop("upload"), clients.pop("bytes"), clients.pop("bytes_sent")
        if len(gathered) > 1 and len(tree.leaves(upload)[0]) == len(order):
            upload = tree.take(upload, order)
        clients = {**tree.take(clients, order), "upload": upload}
        return RoundResult(plan, lr, shared, clients, int(bytes_up.sum()), int(bytes_sent.sum()), tuple(checks))

    def client_state(self, stored: Tree | None, params: Tree) -> Tree:
        """Return a client's state on the device: the stored one, or that of a first visit."""
        local = self.trainer.local
        state = stored if stored is not None else local.method.init_client(local.task, params)
        return tree.to(state, local.task.device)

    def _jobs(self, server: Tree, shared: Tree, plan: RoundPlan, states: Tree) -> list[ClientJob]:
        """Return the jobs of this rank's clients, with their states and what is sent to each alone."""
        method = self.trainer.local.method
        return [
            job._replace(
                client=self.client_state(states.get(str(job.id)), shared["params"]),
                sent=broadcast_to(method, server, job.id),
            )
            for job in plan.jobs
        ]

    def _train_share(
        self,
        shared: Tree,
        jobs: Sequence[ClientJob],
        plan: RoundPlan,
        lr: float,
        keep_models: bool,
        checks: list[Callable[[], None]],
    ) -> Tree:
        """Train this rank's clients; plan the next round while a GPU is busy.

        Divergence is checked before the memory of a chunk is used again and before results are sent to another rank.
        The check of a whole cohort is left for later: the host goes on while a GPU is training.
        """
        chunks = []
        for chunk, result in self.trainer.train(shared, jobs, lr):
            with round_part("plan"):
                self.trainer.plan_ahead(self.planner.plan_ahead(plan.round + 1))
            with round_part("check for NaN"):
                status = finite_and_loss(chunk, result)
                known = (plan.round, chunk, result, shared["params"], status, self._inputs_of)
                check = functools.partial(require_finite, *known)
                queued = self.trainer.local.task.accelerator.queues
                if self.ranks.size > 1 or len(chunk) < len(jobs) or not queued:
                    check()
                else:
                    checks.append(check)
            chunks.append(self._collect(plan, chunk, result, status[1], keep_models))
        return tree.cat(chunks) if chunks else {}

    def _inputs_of(self, job: ClientJob) -> Any:
        """Return a client's examples as model inputs, without augmentation."""
        trainer = self.trainer
        index = torch.from_numpy(np.asarray(job.examples)).to(trainer.y.device)
        return trainer.local.inputs.without_augmentation(tree.take(trainer.x, index))

    def _collect(
        self, plan: RoundPlan, jobs: Sequence[ClientJob], result: ClientResult, loss: Tensor, keep_models: bool
    ) -> Tree:
        """Return what server and record need of some trained clients, [K] each."""
        method, here = self.trainer.local.method, self.trainer.local.task.device
        ids = torch.tensor([job.id for job in jobs]).to(here, non_blocking=True)
        clients: Tree = {"loss": loss, "id": ids}
        counted = here if self.ranks.size > 1 else "cpu"
        clients["bytes"] = torch.full((1,), tree.nbytes(result.upload), device=counted)
        clients["bytes_sent"] = torch.full((1,), sum(tree.nbytes(job.sent) for job in jobs), device=counted)
        clients["upload"], clients["client"] = result.upload, tree.detach(result.client)
        averages = self.settings.plain_mean and method.uploads_as_fedavg
        if averages and not keep_models and len(jobs) < len(plan.cohort):  # a mean of means saves memory
            mean = tree.mean(result.upload["params"], result.upload["n"])
            clients["upload"] = tree.map(lambda t: t[None], {"params": mean, "n": result.upload["n"].sum()})
        if keep_models:
            clients["params"] = tree.detach(result.params)
        elif self.settings.due(self.settings.eval_local_every, plan.round):
            engine = self.trainer.engine
            each = engine.each if isinstance(engine, Stacked) else None
            with round_part("test of the local models"):
                clients["hits"] = self.evaluator.local_models(result.params, len(jobs), each)
            counts = torch.from_numpy(np.stack([job.counts for job in jobs]))
            clients["label_counts"] = counts.to(here, non_blocking=True)
        return clients


def _stored(states: ClientStore, clients: list[int]) -> Tree:
    return {str(k): states[k] for k in clients if k in states}
