"""Training of one round: the cohort's clients, on all ranks. Changes no state of the federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedkeep import tree
from fedkeep.engine.distributed import Ranks
from fedkeep.engine.divergence import check_finite
from fedkeep.engine.evaluate import Evaluator
from fedkeep.engine.local import ClientJob, ClientResult
from fedkeep.engine.round_plan import RoundPlan, RoundPlanner
from fedkeep.engine.server_hooks import broadcast
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
    """

    plan: RoundPlan
    lr: float
    shared: Tree
    clients: Tree
    bytes_up: int


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
        lr, plan = self.settings.lr_in(number), self.planner.plan(number)
        shared = broadcast(self.trainer.local.method, server)
        if not plan.cohort:
            return RoundResult(plan, lr, shared, {}, 0)
        stored: list[Tree] = []
        self.ranks.on_rank0(lambda: stored.extend(_stored(states, share) for share in plan.shares))
        device = self.trainer.local.task.device
        sent = self.ranks.scatter(stored, device)
        gathered = self.ranks.gather(lambda: self._train_share(shared, plan, sent, lr, keep_models), device)
        if not gathered:
            return RoundResult(plan, lr, shared, {}, 0)
        clients = tree.cat([part for part in gathered if part])
        order, upload, bytes_up = torch.argsort(clients["id"]), clients.pop("upload"), clients.pop("bytes")
        if len(gathered) > 1 and len(tree.leaves(upload)[0]) == len(order):
            upload = tree.take(upload, order)
        return RoundResult(plan, lr, shared, {**tree.take(clients, order), "upload": upload}, int(bytes_up.sum()))

    def client_state(self, stored: Tree | None, params: Tree) -> Tree:
        """Return a client's state on the device: the stored one, or that of a first visit."""
        local = self.trainer.local
        state = stored if stored is not None else local.method.init_client(local.task, params)
        return tree.to(state, local.task.device)

    def _train_share(self, shared: Tree, plan: RoundPlan, states: Tree, lr: float, keep_models: bool) -> Tree:
        """Train this rank's clients; plan the next round while a GPU is busy."""
        jobs = [job._replace(client=self.client_state(states.get(str(job.id)), shared["params"])) for job in plan.jobs]
        chunks = []
        for chunk, result in self.trainer.train(shared, jobs, lr):
            self.planner.plan_ahead(plan.round + 1)
            chunks.append(self._collect(plan, shared, chunk, result, keep_models))  # waits for the device
        return tree.cat(chunks) if chunks else {}

    def _collect(
        self, plan: RoundPlan, shared: Tree, jobs: Sequence[ClientJob], result: ClientResult, keep_models: bool
    ) -> Tree:
        """Return what server and record need of some trained clients, [K] each; raise if they diverged."""
        mean_loss = check_finite(plan.round, jobs, result, shared["params"])
        method, here = self.trainer.local.method, self.trainer.local.task.device
        clients: Tree = {"loss": mean_loss.to(here), "id": torch.tensor([job.id for job in jobs], device=here)}
        clients["bytes"] = torch.full((1,), tree.nbytes(result.upload), device=here)
        clients["upload"], clients["client"] = result.upload, tree.detach(result.client)
        averages = self.settings.plain_mean and not (method.uses("aggregate") or method.uses("finish"))
        if averages and not keep_models and len(jobs) < len(plan.cohort):  # a mean of means saves memory
            mean = tree.mean(result.upload["params"], result.upload["n"])
            clients["upload"] = tree.map(lambda t: t[None], {"params": mean, "n": result.upload["n"].sum()})
        if keep_models:
            clients["params"] = tree.detach(result.params)
        elif self.settings.due(self.settings.eval_local_every, plan.round):
            engine = self.trainer.engine
            each = engine.each if isinstance(engine, Stacked) else None
            clients["hits"] = self.evaluator.local_models(result.params, len(jobs), each)
            clients["label_counts"] = torch.from_numpy(np.stack([job.counts for job in jobs])).to(here)
        return clients


def _stored(states: ClientStore, clients: list[int]) -> Tree:
    return {str(k): states[k] for k in clients if k in states}
