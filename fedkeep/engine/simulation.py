"""Rounds: who takes part, what is sent, what comes of it, and what is written down."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import losses, methods, models, tree
from fedkeep.data.dataset import Dataset
from fedkeep.data.partition import Partition
from fedkeep.engine import device, distributed, server_hooks, setup
from fedkeep.engine.choose import choose_engine
from fedkeep.engine.divergence import check_finite
from fedkeep.engine.evaluate import evaluate
from fedkeep.engine.local import ClientJob, ClientResult, LocalTraining
from fedkeep.engine.loop import Loop
from fedkeep.engine.round_plan import RoundPlan, RoundPlanner
from fedkeep.engine.settings import Settings
from fedkeep.engine.stacked import Stacked
from fedkeep.errors import DataError, Diverged, FedkeepError
from fedkeep.method import FedAvg
from fedkeep.runs import label_counts
from fedkeep.runs.client_store import ClientStore
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.history import History, Record
from fedkeep.task import check_forward
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

Callback = Callable[["Simulation", Record], None]


class Simulation:
    """A federation, round by round, in one process or shared by those of `torchrun`.

    `simulate` is the usual way to run one to its end.
    """

    def __init__(
        self,
        method: FedAvg | str,
        model: nn.Module | str,
        data: Dataset,
        clients: Partition | Iterable[Any],
        settings: Settings,
        callbacks: Iterable[Callback] = (),
        criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
    ) -> None:
        self.method = methods.get(method)() if isinstance(method, str) else method
        if not isinstance(self.method, FedAvg):
            raise FedkeepError(f"the method must be one of fedkeep.methods, with its hyperparameters, not {method!r}")
        if not isinstance(data, Dataset):
            raise DataError(f"the data must come from fedkeep.data.load or from_arrays, not as {type(data).__name__}")
        self.settings, self.data, self.callbacks = settings, data, _checked(callbacks)
        self.ranks = distributed.current_ranks()
        self.clients = Partition.of(clients, len(data.y_train))
        self.planner = RoundPlanner(settings, data, self.clients, self.ranks)
        self.cohort_size = self.planner.cohort_size
        place = device.resolve_device(settings.device)
        inputs = setup.make_inputs(data, settings, place)
        plain = inputs.without_augmentation
        if isinstance(model, str):
            model = models.build(model, data.input_shape, data.n_classes, settings.seed)
        self.x, self.y, self.x_test, self.y_test = (
            tree.to(part, place) for part in (data.x_train, data.y_train, data.x_test, data.y_test)
        )
        public = setup.prepare_public(data.public, plain, place)
        self.task = setup.make_task(model, settings, data.n_classes, len(self.clients), public, criterion, place)
        self._probe = plain(tree.take(self.x, torch.zeros(2, dtype=torch.long, device=place)))
        check_forward(self.task, self._probe)
        self.threads = device.threads(settings, self.task)
        self.local = LocalTraining(self.method, self.task, inputs, settings.clip_norm)
        self.engine = self._engine(settings.engine)
        self.server = server_hooks.init_server(self.method, self.task)
        self.states = ClientStore()
        self.folder: RunFolder | None = None
        self.round = 0
        self.history = History(
            self.method.name, {**asdict(settings), "engine": self.engine.name}, build=self.task.module
        )
        self._at_once = settings.at_once
        self._begun = self._stop = False
        self._plain = plain

    @property
    def params(self) -> Tree:
        """The global model's weights."""
        return self.server["params"]  # type: ignore[no-any-return]

    def personal(self, client: int) -> Tree:
        """Return the weights that this client would use for itself, as its method says."""
        shared = self.method.broadcast(self.server)
        return self.method.personal(shared, self._client_state(client, shared))

    def stop(self) -> None:
        """End the run after this round; for callbacks."""
        self._stop = True

    def run(self) -> History:
        """Run to the last round, or until a callback stops it."""
        self._begin()
        try:
            while self.round < self.settings.rounds and not self._stop:
                self.step()
                if self.ranks.on_rank0(lambda: self.folder is not None and self.folder.checkpoint_due(self.round)):
                    self._checkpoint()
        except Diverged as error:
            error.history, said = self.history, str(error)
            self.ranks.on_rank0(lambda: self.folder.write_diverged(said) if self.folder else None)
            raise
        self._checkpoint()
        self.history.params = tree.to(self.params, "cpu")
        return self.history

    def step(self) -> Record:
        """Run one round and return its record."""
        self._begin()
        began = time.perf_counter()
        with device.numerics(self.settings, self.task.device, self.threads):
            record = self._round(self.round + 1)
        record["seconds"] = time.perf_counter() - began
        record = dict(self.ranks.on_rank0(functools.partial(dict, record)))
        self.round = record["round"]
        self._record(record)

        def tell() -> bool:
            for callback in self.callbacks:
                callback(self, record)
            return self._stop

        self._stop = bool(self.ranks.on_rank0(tell))
        return record

    def attach(self, folder: RunFolder) -> Simulation:
        """Write everything from now on into a run folder; where that holds a checkpoint, go on from it."""
        self.folder, self.states = folder, ClientStore(folder.clients)
        label_counts.write_label_counts(folder.path, self.clients, self.data.y_train, self.task.n_classes)
        saved = folder.restore()
        if saved is not None:
            self.server = tree.to(saved.server, self.task.device)
            self.states.restore(saved.clients)
            self.round, self.history.records = saved.round, saved.records
        return self

    def _begin(self) -> None:
        """Bring all ranks to where rank 0 is, and record the untrained model; once."""
        if self._begun:
            return
        self._begun = True
        self.server = self.ranks.broadcast(self.server, self.task.device)
        self.round, self.history.records = self.ranks.on_rank0(lambda: (self.round, self.history.records))
        if not self.history.records:
            with device.numerics(self.settings, self.task.device, self.threads):
                evaluated = self._evaluate()
            self._record(self.ranks.on_rank0(lambda: {"round": 0, **evaluated}))
            self._checkpoint()

    def _round(self, number: int) -> Record:
        """Train the cohort, aggregate and evaluate."""
        settings, lr = self.settings, self.settings.lr_in(number)
        shared = server_hooks.broadcast(self.method, self.server)
        plans = self.planner.plans(number)
        record: Record = {
            "round": number,
            "lr": lr,
            "cohort": plans.cohort,
            "skipped": plans.skipped,
            "bytes_down": tree.nbytes(shared) * len(plans.cohort),
            "bytes_up": 0,
            "train_loss": None,
        }
        if plans.cohort:
            trained = self._train(shared, plans, lr)
            record.update(self.ranks.on_rank0(lambda: self._aggregate(trained, plans)))
            self.server = self.ranks.broadcast(self.server, self.task.device)
        else:
            log.warning("round %d: none of the sampled clients has any examples; nothing changes", number)
        if settings.due(settings.eval_every, number):
            record.update(self._evaluate())
        return record

    def _train(self, shared: Tree, plans: RoundPlan, lr: float) -> list[Tree]:
        """Train this rank's share of the cohort; rank 0 is given every rank's."""
        known: list[Tree] = []
        self.ranks.on_rank0(lambda: known.extend(self._known(share) for share in plans.shares))
        states = self.ranks.scatter(known, self.task.device)
        return self.ranks.gather(lambda: self._trained(shared, plans, states, lr), self.task.device)

    def _trained(self, shared: Tree, plans: RoundPlan, states: Tree, lr: float) -> Tree:
        """Train the clients that are this rank's, and make the plans of the next round while a GPU is at work."""
        jobs = [job._replace(client=self._state(states.get(str(job.id)), shared)) for job in plans.mine]
        chunks = []
        for some, trained in self._in_chunks(shared, jobs, lr):
            self.planner.look_ahead(plans.round + 1)
            chunks.append(self._seen(plans, shared, some, trained))  # waits for the device
        return tree.cat(chunks) if chunks else {}

    def _known(self, clients: list[int]) -> Tree:
        return {str(k): self.states[k] for k in clients if k in self.states}

    def _in_chunks(
        self, shared: Tree, jobs: list[ClientJob], lr: float
    ) -> Iterator[tuple[list[ClientJob], ClientResult]]:
        """Train as many clients at once as settings and memory allow."""
        while jobs:
            size = -(-len(jobs) // -(-len(jobs) // (self._at_once or len(jobs))))  # chunks of about the same size
            try:
                trained = self.engine.train(shared, jobs[:size], lr)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                self._at_once = size // 2
                log.warning("%d clients at once do not fit into memory: from now on at most %d", size, self._at_once)
                self.engine = self._engine(self.engine.name)
                torch.cuda.empty_cache()
                continue
            yield jobs[:size], trained
            jobs = jobs[size:]

    def _seen(self, plans: RoundPlan, shared: Tree, jobs: list[ClientJob], trained: ClientResult) -> Tree:
        """Keep of some trained clients what the server and the record need, [K] each."""
        losses = check_finite(plans.round, jobs, trained, shared["params"])
        here = self.task.device
        seen: Tree = {"loss": losses.to(here), "id": torch.tensor([job.id for job in jobs], device=here)}
        seen["bytes"] = torch.full((1,), tree.nbytes(trained.upload), device=here)
        seen["upload"], seen["client"] = trained.upload, trained.client
        averaged = not (self.method.uses("aggregate") or self.method.uses("finish"))
        if averaged and len(jobs) < len(plans.cohort):  # a mean of means does, and takes the room of one model
            mean = tree.mean(trained.upload["params"], trained.upload["n"])
            seen["upload"] = tree.map(lambda t: t[None], {"params": mean, "n": trained.upload["n"].sum()})
        if self.settings.due(self.settings.eval_local_every, plans.round):
            seen["hits"] = self._evaluate_local(trained.params, len(jobs))
            seen["label_counts"] = torch.from_numpy(np.stack([job.counts for job in jobs])).to(here)
        return seen

    def _aggregate(self, trained: list[Tree], plans: RoundPlan) -> Record:
        """Make the next server tree and remember the clients' states; return what was seen of the clients."""
        seen = tree.cat([one for one in trained if one])
        order = torch.argsort(seen["id"])  # a cohort is in the order of its ids
        upload = seen["upload"]
        if len(trained) > 1 and len(tree.leaves(upload)[0]) == len(order):
            upload = tree.take(upload, order)
        cohort = server_hooks.make_cohort(self.settings, plans.cohort, plans.round)
        self.server = server_hooks.aggregate(self.method, self.task, self.server, upload, cohort)
        if seen["client"]:
            states = tree.map(lambda t: t[order].detach(), seen["client"])
            if not self._room_for(tree.nbytes(states) / len(order)):
                states = tree.to(states, "cpu")
            for k, client in enumerate(plans.cohort):
                self.states.put(client, tree.map(lambda t, k=k: t[k].clone(), states), plans.round)
        record: Record = {"train_loss": float(seen["loss"].mean()), "bytes_up": int(seen["bytes"].sum())}
        if "hits" in seen:
            total = torch.bincount(self.y_test, minlength=self.task.n_classes).tolist()
            hits, counts = (seen[key][order].tolist() for key in ("hits", "label_counts"))
            record["local"] = {"hits": hits, "total": total, "label_counts": counts}
        return record

    def _room_for(self, state: float) -> bool:
        """Say whether all clients' states may stay on the device: a tenth of a GPU's memory holds them."""
        here = self.task.device
        if here.type != "cuda":
            return True
        room = torch.cuda.get_device_properties(here).total_memory / 10
        if state * len(self.clients) > room:
            return False
        self.states.cache_bytes = max(self.states.cache_bytes, int(room))
        return True

    def _engine(self, name: str) -> Loop | Stacked:
        return choose_engine(name, self.settings.tf32, self.local, self.x, self.y, self._probe)

    def _record(self, record: Record) -> None:
        self.history.records.append(record)
        self.history.params = self.params
        self.ranks.on_rank0(lambda: self.folder.append(record) if self.folder else None)

    def _checkpoint(self) -> None:
        folder = self.folder
        self.ranks.on_rank0(
            lambda: (
                folder.checkpoint(self.round, self.server, self.states)
                if folder is not None and folder.last != self.round
                else None
            )
        )

    def _job(self, client: int, number: int, shared: Tree) -> ClientJob:
        return self.planner.job(client, number)._replace(client=self._client_state(client, shared))

    def _client_state(self, client: int, shared: Tree) -> Tree:
        return self._state(self.states.get(client), shared)

    def _state(self, stored: Tree | None, shared: Tree) -> Tree:
        state = stored if stored is not None else self.method.init_client(self.task, shared["params"])
        return tree.to(state, self.task.device)  # type: ignore[no-any-return]

    def _evaluate(self) -> Record:
        """Test the global model, every rank on its part of the test data."""
        part = self.ranks.slice(len(self.y_test))
        x, y = tree.take(self.x_test, part), self.y_test[part]

        def found() -> Tree:
            confusion, loss = evaluate(self.task, self.params, x, y, self._plain, chunk=self._at_a_time(1))
            return {"confusion": confusion, "loss": loss}

        every = self.ranks.gather(found, self.task.device)
        if not every:
            return {}
        confusion, loss = (torch.stack([one[key] for one in every]).sum(0) for key in ("confusion", "loss"))
        return {"confusion": confusion.tolist(), "test_loss": float(loss) / len(self.y_test)}

    def _evaluate_local(self, params: Tree, clients: int) -> Tensor:
        """Count, for each of some local models, the test examples of every class that it knows: [K, C]."""
        args = (self.x_test, self.y_test, self._plain)
        if isinstance(self.engine, Stacked):
            chunk = self._at_a_time(clients)
            confusion, _ = evaluate(self.task, params, *args, each=self.engine.each, chunk=chunk)
        else:
            one = [evaluate(self.task, tree.take(params, k), *args, chunk=self._at_a_time(1)) for k in range(clients)]
            confusion = torch.stack([found for found, _ in one])
        return confusion.diagonal(dim1=-2, dim2=-1)

    def _at_a_time(self, models: int) -> int:
        """Return how many examples pass through each of some models at once."""
        most = 1000 if self.task.device.type == "cpu" else device.eval_batch_size(tree.nbytes(self._probe) // 2, 10_000)
        return max(1, most // models)


def _checked(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    found = (callbacks,) if callable(callbacks) else tuple(callbacks)
    for callback in found:
        if not callable(callback):
            raise FedkeepError(
                f"a callback is called with the simulation and the record; {callback!r} cannot be called"
            )
    return found
