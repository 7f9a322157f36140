"""Simulation of a federation: training, aggregating, evaluating and recording rounds."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep import losses, models, tree
from fedkeep._util.signals import delayed
from fedkeep.data.dataset import Dataset
from fedkeep.data.normalise import warn_about_scales
from fedkeep.data.partition import Partition
from fedkeep.engine import device, requirements, server_hooks, setup
from fedkeep.engine.distributed import current_ranks
from fedkeep.engine.divergence import finite_server, require_finite_server
from fedkeep.engine.evaluate import Evaluator
from fedkeep.engine.gpu.accelerator import GpuAccelerator
from fedkeep.engine.local import ClientJob, LocalTraining
from fedkeep.engine.loop import Loop
from fedkeep.engine.recorder import Recorder
from fedkeep.engine.round_parts import round_part
from fedkeep.engine.round_plan import RoundPlanner
from fedkeep.engine.round_record import make_private, record_cohort, record_plan
from fedkeep.engine.round_trainer import RoundResult, RoundTrainer
from fedkeep.engine.scores import Scorer, Sites
from fedkeep.engine.settings import Settings
from fedkeep.engine.stacked import Stacked
from fedkeep.engine.trainer import Trainer
from fedkeep.engine.user_metrics import Metrics, require_metrics
from fedkeep.errors import Diverged
from fedkeep.method import FedAvg, Visit
from fedkeep.runs.client_store import ClientStore
from fedkeep.runs.federation_copy import write_federation_copy
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.history import History, Record
from fedkeep.runs.label_counts import shown_names, write_label_counts
from fedkeep.runs.server_state import ServerState, global_params
from fedkeep.task import check_forward
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

Callback = Callable[["Simulation", Record], None]


class Simulation:
    """A federation, round by round, in one process or in several started by `torchrun`.

    `simulate` is the usual way to run one from the first round to the last. `state` holds everything that changes.
    A callback is called after every round. If it has a method `close`, `run` calls that at its end, whatever ends it.
    """

    def __init__(
        self,
        method: FedAvg | str,
        model: nn.Module | str,
        data: Dataset | Any,
        clients: Partition | Iterable[Any],
        settings: Settings,
        callbacks: Iterable[Callback] = (),
        criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
        metrics: Metrics = None,
    ) -> None:
        self.method = setup.make_method(method)
        self.data = data = setup.require_dataset(data)
        self.settings = settings
        checked = setup.require_callbacks(callbacks)
        self.clients = Partition.of(clients, len(data.y_train))
        server_hooks.require_supported(self.method, settings, len(self.clients))
        self.ranks = current_ranks()
        self.planner = RoundPlanner(settings, data, self.clients, self.ranks, self.method.hold_out())
        place = device.resolve_device(settings.device)
        inputs = setup.make_inputs(data, settings, place)
        self.eval_inputs = inputs.without_augmentation
        self.model_name = model if isinstance(model, str) else None
        if isinstance(model, str):
            model = models.build(model, data.input_shape, data.n_classes, settings.seed)
        self.x, self.y, self.x_test, self.y_test = (
            tree.to(part, place) for part in (data.x_train, data.y_train, data.x_test, data.y_test)
        )
        setup.require_fitting_texts(model, data.x_train)
        public = setup.prepare_public(data.public, self.eval_inputs, place)
        self.task = setup.make_task(model, settings, data.n_classes, len(self.clients), public, criterion, place)
        if place.type == "cuda":
            self.task.accelerator = GpuAccelerator(place)
        sample = self.eval_inputs(tree.take(self.x, torch.zeros(2, dtype=torch.long, device=place)))
        requirements.require_inputs(self.method, sample)
        check_forward(self.task, sample)
        self.threads = device.threads(settings, self.task)
        self.local = LocalTraining(self.method, self.task, inputs, settings.clip_norm, settings.part_size)
        server = server_hooks.init_server(self.method, self.task, settings)
        shared = server_hooks.broadcast(self.method, server)
        sent = server_hooks.broadcast_to(self.method, server, 0)
        self.trainer = Trainer(self.local, self.x, self.y, shared, settings, sent)
        test = (self.x_test, self.y_test, self.eval_inputs)
        own = require_metrics(metrics, data.n_classes)
        scorer = Scorer(self.y_test, data.n_classes, Sites.of(data, place), own)
        self.evaluator = Evaluator(self.task, *test, self.ranks, tree.nbytes(sample) // 2, scorer)
        self.round_trainer = RoundTrainer(settings, self.planner, self.trainer, self.evaluator, self.ranks)
        recorded = {**asdict(settings), "engine": self.engine.name}
        history = History(self.method.name, recorded, build=self.task.module, class_names=data.class_names)
        history.client_names = shown_names(self.clients)
        history.site_names = scorer.sites.names if scorer.sites else ()
        self.state = ServerState(server, history)
        self.recorder = Recorder(self.state, self.ranks, checked)
        self._begun = self._applying = False

    def __repr__(self) -> str:
        return (
            f"<Simulation of {self.method.name}: round {self.round} of {self.settings.rounds}, "
            f"{len(self.clients)} clients, {self.engine.name} engine>"
        )

    # What changes from round to round

    @property
    def server(self) -> Tree:
        """The server's tree."""
        return self.state.server

    @property
    def params(self) -> Tree:
        """The global model's weights, as tested and saved."""
        return self.state.params

    @property
    def round(self) -> int:
        """The last finished round; 0 before the first."""
        return self.state.round

    @property
    def history(self) -> History:
        """The records of all rounds so far."""
        return self.state.history

    @property
    def folder(self) -> RunFolder | None:
        """The run folder, if there is one."""
        return self.state.folder

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """What is called after every round."""
        return self.recorder.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: tuple[Callback, ...]) -> None:
        self.recorder.callbacks = callbacks

    @property
    def engine(self) -> Loop | Stacked:
        """The engine that trains the clients."""
        return self.trainer.engine

    @engine.setter
    def engine(self, engine: Loop | Stacked) -> None:
        self.trainer.engine = engine

    @property
    def cohort_size(self) -> int:
        """How many clients are sampled for a round; the most, if the cohorts are given."""
        return self.planner.cohorts.size

    # Running

    def run(self) -> History:
        """Run to the last round, or until a callback stops it; then close the callbacks."""
        with self.recorder.closing():
            return self._run()

    def _run(self) -> History:
        if self.ranks.first and not self.round and self.data.mean is None:
            warn_about_scales(self.data.x_train, self.data.feature_names)
        self._begin()
        try:
            while self.round < self.settings.rounds and not self.recorder.stopped:
                self.step()
                self.recorder.checkpoint_if_due(self.settings.rounds)
        except Diverged as error:
            error.history = self.history
            self.recorder.write_diverged(str(error))
            raise
        except (KeyboardInterrupt, SystemExit):
            if self.ranks.size == 1 and not self._applying:  # a half applied round cannot be saved
                self.recorder.save_last_round()
            raise
        self.recorder.finish("finished" if self.round >= self.settings.rounds else "stopped")
        self.history.params = tree.to(self.params, "cpu")
        return self.history

    def step(self) -> Record:
        """Run one round and return its record."""
        self._begin()
        began = time.perf_counter()
        result = self._train_round(self.round + 1)
        with delayed() if self.ranks.size == 1 else nullcontext():  # a signal waits until the round is complete
            self._applying = True
            record = self.apply(result)
            record["seconds"] = time.perf_counter() - began
            record = dict(self.ranks.on_rank0(functools.partial(dict, record)))
            self.recorder.record(self, record)
            self._applying = False
        return record

    def stop(self) -> None:
        """End the run after this round; for callbacks."""
        self.recorder.stopped = True

    def attach(self, folder: RunFolder, from_round: int | None = None) -> Simulation:
        """Write everything from now on into a run folder; if it has a checkpoint, continue from the last.

        With `from_round`, continue from the checkpoint of that round.
        """
        states = ClientStore(folder.clients, run=folder.run)
        self.state.attach(folder, states, self.task.device, from_round)
        write_label_counts(folder.path, self.clients, self.data, folder.run)
        write_federation_copy(folder.path, self.clients, self.planner.cohorts.given, folder.run)
        return self

    # One round

    def train_round(self, number: int | None = None, keep_models: bool = False) -> RoundResult:
        """Train the clients of a round, by default the next one. Nothing changes: not the server, not the clients.

        With `keep_models` the result holds every client's local model, and none is evaluated for the record.
        """
        result = self._train_round(self.round + 1 if number is None else number, keep_models)
        result.verify()
        return result

    def aggregate(self, result: RoundResult) -> Tree:
        """Return the server's next tree. Nothing changes."""
        server = self._aggregate(result)
        require_finite_server(result.plan.round, server)
        return server

    def apply(self, result: RoundResult) -> Record:
        """Apply a trained round: aggregate, evaluate, store the clients' states. Return the round's record.

        All of the device's work is started before the first of its results is read, so that a GPU never waits for
        the host in between.
        """
        plan, server, scores = result.plan, self.server, Tree()
        record = record_plan(result)
        if plan.cohort:
            aggregated: list[Tree] = [server]
            self.ranks.on_rank0(lambda: aggregated.append(self._aggregate(result)))
            server = self.ranks.broadcast(aggregated[-1], self.task.device)
        else:
            log.warning("round %d: none of the sampled clients has any examples; nothing changes", plan.round)
        finite = finite_server(server)
        if self.settings.due(self.settings.eval_every, plan.round):
            with self._numerics(), round_part("test of the global model"):
                scores = self.evaluator.start(global_params(server))
        if plan.cohort:
            with round_part("check for NaN"):
                self.ranks.on_rank0(result.verify)
                require_finite_server(plan.round, server, finite)
            self.state.server = server
            record.update(self.ranks.on_rank0(lambda: self._store(result)))
        record.update(self.evaluator.read(scores, plan.round))
        return make_private(record, self.settings, self.history.records) if self.settings.private else record

    def job(self, client: int, number: int) -> ClientJob:
        """Return one client's job in a round, with its state and what the server sends to it alone."""
        return self.planner.job(client, number)._replace(client=self.client_state(client), sent=self._sent(client))

    def client_state(self, client: int) -> Tree:
        """Return what a client has kept since its last visit, or its state at a first visit."""
        return self.round_trainer.client_state(self.state.clients.get(client), self.server["params"])

    def personal_params(self, client: int) -> Tree:
        """Return the weights that this client would use for itself, as its method defines them."""
        shared = server_hooks.broadcast(self.method, self.server)
        state, sent = self.client_state(client), self._sent(client)
        return self.method.personal_params(Visit("personal_params", self.task, shared, state, sent=sent))

    def _sent(self, client: int) -> Tree:
        return server_hooks.broadcast_to(self.method, self.server, client)

    def _train_round(self, number: int, keep_models: bool = False) -> RoundResult:
        with self._numerics():
            return self.round_trainer.train(self.server, self.state.clients, number, keep_models)

    def _aggregate(self, result: RoundResult) -> Tree:
        cohort = server_hooks.make_cohort(self.settings, result.plan.cohort, result.plan.round)
        uploads = result.clients["upload"]
        try:
            with self._numerics(), round_part("aggregation"):
                return server_hooks.aggregate(
                    self.method, self.task, self.server, uploads, cohort, self.settings, check=False
                )
        except Exception:
            result.verify()  # if the clients diverged, that is the cause
            raise

    def _store(self, result: RoundResult) -> Record:
        """Store the clients' states; return the cohort's part of the record."""
        states, plan = result.clients["client"], result.plan
        if states:
            if not self._reserve_on_device(tree.nbytes(states) / len(plan.cohort)):
                states = tree.to(states, "cpu")
            with round_part("client states"):
                for k, client in enumerate(plan.cohort):
                    self.state.clients.put(client, tree.map(lambda t, k=k: t[k].clone(), states), plan.round)
        return record_cohort(result, self.y_test, self.task.n_classes)

    def _reserve_on_device(self, state_bytes: float) -> bool:
        """Return whether all clients' states may stay on the device, and let their store use a tenth of a GPU."""
        here = self.task.device
        if here.type != "cuda":
            return True
        budget = torch.cuda.get_device_properties(here).total_memory / 10
        if state_bytes * len(self.clients) > budget:
            return False
        self.state.clients.cache_bytes = max(self.state.clients.cache_bytes, int(budget))
        return True

    def _begin(self) -> None:
        """Copy rank 0's state to all ranks, and record the untrained model; once."""
        if self._begun:
            return
        self._begun = True
        self.state.server = self.ranks.broadcast(self.server, self.task.device)
        self.state.round, self.history.records = self.ranks.on_rank0(lambda: (self.round, self.history.records))
        if not self.history.records:
            with self._numerics(), round_part("test of the global model"):
                scores = self.evaluator.start(self.params)
            untrained = self.ranks.on_rank0(lambda: {"round": 0, **self.evaluator.read(scores, 0)})
            self.recorder.record_untrained(untrained)

    def _numerics(self) -> AbstractContextManager[None]:
        return device.numerics(self.settings, self.task.device, self.threads)
