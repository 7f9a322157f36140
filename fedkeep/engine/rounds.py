"""Rounds: who takes part, what is sent, what comes of it, and what is written down."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import losses, methods, models, optim, tree
from fedkeep.data.augment import Augment, Inputs
from fedkeep.data.dataset import Dataset
from fedkeep.data.partition import Partition
from fedkeep.data.plan import make_plan, sample_cohort, server_seed
from fedkeep.engine.choice import choose_engine
from fedkeep.engine.evaluate import evaluate
from fedkeep.engine.finite import check_finite, check_server
from fedkeep.engine.local import Job, Local, once, stacked
from fedkeep.engine.settings import DTYPES, Settings
from fedkeep.engine.stacked import Stacked
from fedkeep.errors import DataError, Diverged, FedkeepError, MethodError, nearest
from fedkeep.history import History, Record
from fedkeep.method import Cohort, FedAvg
from fedkeep.runs import RunFolder
from fedkeep.store import ClientStore
from fedkeep.task import Public, Task, check_forward
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

Callback = Callable[["Simulation", Record], None]


class Simulation:
    """A federation in one process, round by round. `simulate` is the usual way to run one to its end."""

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
        self.clients = Partition.of(clients, len(data.y_train))
        self.cohort_size = settings.cohort_size(len(self.clients))
        self.image = _image(data, settings.augment)
        device = _device(settings.device)
        dtype = DTYPES[settings.dtype]
        inputs = Inputs(dtype, data.mean, data.std, settings.augment or None)
        plain = Inputs(dtype, data.mean, data.std)
        if isinstance(model, str):
            model = models.build(model, data.input_shape, data.n_classes, settings.seed)
        self.x, self.y, self.x_test, self.y_test = (
            tree.to(part, device) for part in (data.x_train, data.y_train, data.x_test, data.y_test)
        )
        self.task = Task(
            model,
            data.n_classes,
            len(self.clients),
            _prepared(data.public, plain, device),
            criterion,
            optimizer=optim.make(settings.optimizer, settings.momentum, settings.weight_decay),
            lr=settings.lr_in,
            device=device,
            dtype=dtype,
            autocast=DTYPES[settings.autocast] if settings.autocast else None,
        )
        two = plain(tree.take(self.x, torch.zeros(2, dtype=torch.long, device=device)))
        check_forward(self.task, two)
        self.local = Local(self.method, self.task, inputs, settings.clip_norm)
        self.engine = choose_engine(settings.engine, self.local, self.x, self.y, two)
        self.server = _tree(self.method, "init_server", self.method.init_server(self.task, self.task.init))
        self.states = ClientStore()
        self.folder: RunFolder | None = None
        self.round = 0
        self.history = History(
            self.method.name, {**asdict(settings), "engine": self.engine.name}, build=self.task.module
        )
        self._stop = False
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
        with _deterministic(self.settings.deterministic):
            self._begin()
            try:
                while self.round < self.settings.rounds and not self._stop:
                    self.step()
                    if self.folder and self.round % self.folder.checkpoint_every == 0:
                        self._checkpoint()
            except Diverged as error:
                error.history = self.history
                raise
        self._checkpoint()
        self.history.params = tree.to(self.params, "cpu")
        return self.history

    def step(self) -> Record:
        """Run one round and return its record."""
        self._begin()
        began = time.perf_counter()
        settings = self.settings
        number = self.round + 1
        lr = settings.lr_in(number)
        shared = _tree(self.method, "broadcast", self.method.broadcast(self.server))
        sampled = sample_cohort(settings.seed, number, len(self.clients), self.cohort_size)
        jobs = [self._job(int(k), number, shared) for k in sampled if len(self.clients[int(k)])]
        ids = [job.id for job in jobs]
        record: Record = {
            "round": number,
            "lr": lr,
            "cohort": ids,
            "skipped": sorted({int(k) for k in sampled} - set(ids)),
            "bytes_down": tree.nbytes(shared) * len(jobs),
            "bytes_up": 0,
            "train_loss": None,
        }
        if jobs:
            trained = self.engine.train(shared, jobs, lr)
            losses = check_finite(number, ids, trained, shared["params"])
            record["train_loss"] = float(np.mean(losses))
            record["bytes_up"] = tree.nbytes(trained.upload)
            cohort = Cohort(tuple(ids), number, server_seed(settings.seed, number))
            server = self.method.aggregate(self.task, self.server, trained.upload, cohort)
            self.server = tree.detach(_tree(self.method, "aggregate", server))
            check_server(number, self.server)
            for k, client in enumerate(ids):
                if trained.client:
                    state = tree.map(lambda t, k=k: t[k].detach().cpu().clone(), trained.client)
                    self.states.put(client, state, number)
        else:
            log.warning("round %d: none of the sampled clients has any examples; nothing changes", number)
        if self._due(settings.eval_local_every, number) and jobs:
            record["local"] = self._evaluate_local(trained.params, jobs)
        if self._due(settings.eval_every, number):
            record.update(self._evaluate())
        record["seconds"] = time.perf_counter() - began
        self.round = number
        self._record(record)
        for callback in self.callbacks:
            callback(self, record)
        return record

    def keep_in(self, folder: RunFolder) -> Simulation:
        """Write everything from now on into a run folder; where that holds a checkpoint, go on from it."""
        self.folder, self.states = folder, ClientStore(folder.clients)
        saved = folder.restore()
        if saved is not None:
            self.server = tree.to(saved.server, self.task.device)
            self.states.restore(saved.clients)
            self.round, self.history.records = saved.round, saved.records
        return self

    def _begin(self) -> None:
        """Record the untrained model, if that has not been done."""
        if not self.history.records:
            self._record({"round": 0, **self._evaluate()})
            self._checkpoint()

    def _record(self, record: Record) -> None:
        self.history.records.append(record)
        self.history.params = self.params
        if self.folder:
            self.folder.append(record)

    def _checkpoint(self) -> None:
        if self.folder and self.folder.last != self.round:
            self.folder.checkpoint(self.round, self.server, self.states)

    def _due(self, every: int, number: int) -> bool:
        return bool(every) and (number % every == 0 or number == self.settings.rounds)

    def _job(self, client: int, number: int, shared: Tree) -> Job:
        examples, s = self.clients[client], self.settings
        plan = make_plan(
            s.seed,
            number,
            client,
            len(examples),
            s.epochs,
            s.batch_size,
            s.augment or None,
            self.image or (0, 0),
        )
        return Job(client, examples, plan, self._client_state(client, shared))

    def _client_state(self, client: int, shared: Tree) -> Tree:
        known = client in self.states
        state = self.states[client] if known else self.method.init_client(self.task, shared["params"])
        return tree.to(state, self.task.device)  # type: ignore[no-any-return]

    def _evaluate(self) -> Record:
        confusion, loss = evaluate(self.task, self.params, self.x_test, self.y_test, self._plain)
        return {"confusion": confusion.tolist(), "test_loss": float(loss)}

    def _evaluate_local(self, params: Tree, jobs: list[Job]) -> Record:
        args = (self.x_test, self.y_test, self._plain)
        if isinstance(self.engine, Stacked):
            confusion, _ = evaluate(self.task, params, *args, each=stacked, chunk=max(1, 1000 // len(jobs)))
        else:
            confusion = torch.stack(
                [evaluate(self.task, tree.take(params, k), *args, each=once)[0] for k in range(len(jobs))]
            )
        labels = [self.y[torch.from_numpy(job.examples).to(self.y.device)] for job in jobs]
        counts = [torch.bincount(y, minlength=self.task.n_classes).tolist() for y in labels]
        hits, total = confusion.diagonal(dim1=-2, dim2=-1), confusion[0].sum(-1)
        return {"hits": hits.tolist(), "total": total.tolist(), "label_counts": counts}


def _device(name: str) -> torch.device:
    cuda = torch.cuda.is_available()
    try:
        device = torch.device(("cuda" if cuda else "cpu") if name == "auto" else name)
    except (RuntimeError, TypeError):
        raise FedkeepError(
            f"unknown device {name!r}: {nearest(str(name), ['auto', 'cpu', 'cuda', 'cuda:0'])}"
        ) from None
    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise FedkeepError(f"device = {name!r} is not there: {str(error).splitlines()[0]}") from None
    return device


def _checked(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    found = (callbacks,) if callable(callbacks) else tuple(callbacks)
    for callback in found:
        if not callable(callback):
            raise FedkeepError(
                f"a callback is called with the simulation and the record; {callback!r} cannot be called"
            )
    return found


def _tree(method: FedAvg, hook: str, value: Any) -> Tree:
    """Check what a server hook returned: a method that forgets the weights is told so by its name."""
    if not isinstance(value, dict) or not isinstance(value.get("params"), dict):
        raise MethodError(f'{method.name}: {hook} must return a dict with "params", not {type(value).__name__}')
    bad = [path for path, leaf in tree.items(value) if not isinstance(leaf, torch.Tensor)]
    if bad:
        raise MethodError(f"{method.name}: {hook} must return tensors, but {bad[0]} is not one")
    return value


def _image(data: Dataset, augment: Augment | None) -> tuple[int, int] | None:
    if augment and data.image is None:
        raise DataError(f"augmentation needs images [channels, height, width], not examples of {data.input_shape}")
    return data.image


def _prepared(public: Public | None, inputs: Inputs, device: torch.device) -> Public | None:
    if public is None:
        return None
    x, y, x_val, y_val = (tree.to(part, device) for part in (public.x, public.y, public.x_val, public.y_val))
    return Public(inputs(x), y, inputs(x_val), y_val)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    before, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
