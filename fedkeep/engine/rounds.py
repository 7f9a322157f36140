"""Rounds: who takes part, what is sent, what comes of it, and what is written down."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import nn

from fedkeep import methods, models, optim, tree
from fedkeep.data.augment import Augment, Inputs
from fedkeep.data.dataset import Dataset
from fedkeep.data.partition import Partition
from fedkeep.data.plan import make_plan, sample_cohort, server_seed
from fedkeep.engine.evaluate import evaluate
from fedkeep.engine.local import Job, Local, Trained, once, stacked
from fedkeep.engine.loop import Loop
from fedkeep.engine.stacked import Stacked, unstackable
from fedkeep.errors import DataError, Diverged, EngineError, FedkeepError, nearest
from fedkeep.history import History, Record
from fedkeep.method import Cohort, FedAvg
from fedkeep.task import Public, Task, check_forward
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

ENGINES = ("auto", "loop", "stacked")
SMALL_MODEL = 100_000  # up to as many weights, stacking a cohort pays on a CPU too


@dataclass(frozen=True)
class Settings:
    """How a run is run, whatever the method; the defaults are FedNTD's."""

    rounds: int = 50
    participation: float | int = 0.1
    epochs: int = 5
    batch_size: int = 50
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-5
    lr_decay: float = 0.99
    optimizer: str = "sgd"
    clip_norm: float | None = None
    augment: Augment | None = None
    eval_every: int = 1
    eval_local_every: int = 0
    seed: int = 0
    engine: str = "auto"
    device: str = "auto"
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name, low in (
            ("rounds", 1),
            ("epochs", 1),
            ("batch_size", 1),
            ("eval_every", 1),
            ("eval_local_every", 0),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise FedkeepError(f"{name} must be a whole number of at least {low}, not {value!r}")
        for name in ("lr", "lr_decay", *(["clip_norm"] if self.clip_norm is not None else [])):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not (0 < value < math.inf):
                raise FedkeepError(f"{name} must be a number above 0, not {value!r}")
        if self.engine not in ENGINES:
            raise FedkeepError(f"unknown engine {self.engine!r}: {nearest(self.engine, ENGINES)}")

    def cohort_size(self, n_clients: int) -> int:
        """Turn participation, a share or a number, into the size of a cohort."""
        share = self.participation
        if isinstance(share, bool) or not isinstance(share, int | float) or not share > 0:
            raise FedkeepError(f"participation must be a share in (0, 1] or a number of clients, not {share!r}")
        if isinstance(share, int):
            if share > n_clients:
                raise FedkeepError(f"participation = {share} clients a round, but there are {n_clients}")
            return share
        if share > 1:
            raise FedkeepError(
                f"participation = {share}: a share is at most 1.0; for {share:g} clients say {int(share)}"
            )
        return max(1, round(share * n_clients))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, fit for a file."""
        plain = asdict(self)
        plain["dtype"] = str(self.dtype).removeprefix("torch.")
        plain["autocast"] = str(self.autocast).removeprefix("torch.") if self.autocast else None
        return plain


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
    ) -> None:
        self.method = methods.get(method)() if isinstance(method, str) else method
        if not isinstance(self.method, FedAvg):
            raise FedkeepError(f"the method must be one of fedkeep.methods, with its hyperparameters, not {method!r}")
        self.settings, self.callbacks = settings, tuple(callbacks)
        self.clients = Partition.of(clients, len(data.y_train))
        self.cohort_size = settings.cohort_size(len(self.clients))
        self.image = _image(data, settings.augment)
        device = torch.device(_device(settings.device))
        inputs = Inputs(settings.dtype, data.mean, data.std, settings.augment or None)
        plain = Inputs(settings.dtype, data.mean, data.std)
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
            device=device,
            dtype=settings.dtype,
            autocast=settings.autocast,
        )
        two = plain(tree.take(self.x, torch.zeros(2, dtype=torch.long, device=device)))
        check_forward(self.task, two)
        optimizer = optim.make(settings.optimizer, settings.momentum, settings.weight_decay)
        self.local = Local(self.method, self.task, optimizer, inputs, settings.clip_norm)
        self.engine = choose_engine(settings.engine, self.local, self.x, self.y, two)
        self.server = self.method.init_server(self.task, self.task.init)
        self.states: dict[int, Tree] = {}
        self.round = 0
        self.history = History(
            self.method.name, {**settings.as_dict(), "engine": self.engine.name}, build=self.task.module
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
            if not self.history.records:
                self.history.records.append({"round": 0, **self._evaluate()})
            while self.round < self.settings.rounds and not self._stop:
                self.step()
        if "confusion" not in self.history.records[-1]:
            self.history.records[-1].update(self._evaluate())
        self.history.params = tree.to(self.params, "cpu")
        return self.history

    def step(self) -> Record:
        """Run one round and return its record."""
        began = time.perf_counter()
        settings = self.settings
        number = self.round + 1
        lr = settings.lr * settings.lr_decay ** (number - 1)
        shared = self.method.broadcast(self.server)
        sampled = sample_cohort(settings.seed, number, len(self.clients), self.cohort_size)
        jobs = [self._job(int(k), number, shared) for k in sampled if len(self.clients[int(k)])]
        ids = [job.id for job in jobs]
        record: Record = {
            "round": number,
            "lr": lr,
            "cohort": ids,
            "skipped": [int(k) for k in sampled if int(k) not in ids],
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
            self.server = tree.detach(self.method.aggregate(self.task, self.server, trained.upload, cohort))
            self._check_server(number)
            for k, client in enumerate(ids):
                if trained.client:
                    self.states[client] = tree.map(lambda t, k=k: t[k].detach().cpu().clone(), trained.client)
        else:
            log.warning("round %d: none of the sampled clients has any examples; nothing changes", number)
        if self._due(settings.eval_local_every, number) and jobs:
            record["local"] = self._evaluate_local(trained.params, jobs)
        if self._due(settings.eval_every, number):
            record.update(self._evaluate())
        record["seconds"] = time.perf_counter() - began
        self.round = number
        self.history.records.append(record)
        for callback in self.callbacks:
            callback(self, record)
        return record

    def state(self) -> Tree:
        """Everything the next round depends on, beside the settings: the checkpoint."""
        return {
            "server": self.server,
            "clients": {str(k): state for k, state in self.states.items()},
            "round": torch.tensor(self.round),
        }

    def restore(self, state: Tree) -> None:
        """Go on from a checkpoint."""
        self.server = tree.to(state["server"], self.task.device)
        self.states = {int(k): value for k, value in state["clients"].items()}
        self.round = int(state["round"])

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
        state = self.states.get(client)
        if state is None:
            state = self.method.init_client(self.task, shared["params"])
        return tree.to(state, self.task.device)  # type: ignore[no-any-return]

    def _evaluate(self) -> Record:
        confusion, loss = evaluate(self.task, self.params, self.x_test, self.y_test, self._plain)
        return {"confusion": confusion.tolist(), "test_loss": float(loss)}

    def _evaluate_local(self, params: Tree, jobs: list[Job]) -> Record:
        args = (self.x_test, self.y_test, self._plain)
        if isinstance(self.engine, Stacked):
            confusion, _ = evaluate(self.task, params, *args, each=stacked)
        else:
            confusion = torch.stack(
                [evaluate(self.task, tree.take(params, k), *args, each=once)[0] for k in range(len(jobs))]
            )
        labels = [self.y[torch.from_numpy(job.examples).to(self.y.device)] for job in jobs]
        counts = [torch.bincount(y, minlength=self.task.n_classes).tolist() for y in labels]
        return {"confusion": confusion.tolist(), "label_counts": counts}

    def _check_server(self, number: int) -> None:
        bad = [path for path, t in tree.items(self.server) if t.is_floating_point() and not bool(t.isfinite().all())]
        if bad:
            raise Diverged(number, None, f"aggregation made {', '.join(bad[:3])} leave the finite numbers")


def simulate(
    method: FedAvg | str,
    model: nn.Module | str,
    data: Dataset,
    clients: Partition | Iterable[Any],
    *,
    callbacks: Iterable[Callback] = (),
    **settings: Any,
) -> History:
    """Run a federation to its end and return what it leaves behind.

    `model` is any `nn.Module` from inputs to logits, or a name of `fedkeep.models`; `clients` a partition, or any
    iterable of index arrays. The settings are those of `Settings`. A callback is called after every round with the
    simulation and the round's record.
    """
    unknown = [name for name in settings if name not in Settings.__dataclass_fields__]
    if unknown:
        raise FedkeepError(f"unknown setting {unknown[0]!r}: {nearest(unknown[0], Settings.__dataclass_fields__)}")
    return Simulation(method, model, data, clients, Settings(**settings), callbacks).run()


def _with_settings(function: Callable[..., History]) -> inspect.Signature:
    """Write out `**settings`, so that help() shows every one with its default."""
    own = inspect.signature(function)
    stated = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(Settings)
    ]
    return own.replace(parameters=[*stated, *added])


simulate.__signature__ = _with_settings(simulate)  # type: ignore[attr-defined]


def choose_engine(name: str, local: Local, x: Any, y: torch.Tensor, two: Any) -> Loop | Stacked:
    """Pick the runtime. `auto`: stacked on a GPU or for a small model, if the module can be stacked; else the loop."""
    n_weights = sum(w.numel() for w in tree.leaves(local.task.init))
    if name == "loop" or (name == "auto" and y.device.type == "cpu" and n_weights > SMALL_MODEL):
        return Loop(local, x, y)
    stopped_by = unstackable(local.task, two)
    if stopped_by is None:
        return Stacked(local, x, y)
    if name == "stacked":
        raise EngineError(f"this model cannot be stacked, take engine='loop'; stopped by {stopped_by}")
    log.warning("clients are trained one after another, because the model cannot be stacked: %s", stopped_by)
    return Loop(local, x, y)


def check_finite(number: int, ids: list[int], trained: Trained, before: Tree) -> list[float]:
    """Return every client's mean loss; raise if any client's loss, weights or upload left the finite numbers."""
    numbers = tree.leaves({"upload": trained.upload, "params": trained.params})
    finite = torch.stack(
        [t.reshape(len(ids), -1).isfinite().all(1) for t in numbers]
        + [torch.stack([losses.isfinite().all() for losses in trained.losses])]
    ).all(0)
    if bool(finite.all()):
        return [float(losses.mean()) for losses in trained.losses]
    k = int((~finite).nonzero()[0])
    losses = trained.losses[k].tolist()
    what = []
    broken = next((s for s, value in enumerate(losses) if not math.isfinite(value)), None)
    if broken is not None:
        trail = " -> ".join(f"{losses[s]:.4g}" for s in sorted({0, max(broken - 1, 0), broken}))
        what.append(f"the loss went {trail} at step {broken + 1} of {len(losses)}")
    names = [path for path, t in tree.items(trained.params) if not bool(t[k].isfinite().all())]
    if names:
        what.append(f"not finite any more: {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}")
    others = [path for path, t in tree.items(trained.upload) if not bool(t[k].isfinite().all())]
    if others and not names:
        what.append(f"not finite in the upload: {', '.join(others[:3])}")
    path, size = max(((path, float(w.abs().max())) for path, w in tree.items(before)), key=lambda item: item[1])
    what.append(f"the largest weight it started from was {size:.4g} ({path})")
    raise Diverged(number, ids[k], "; ".join(what) + "; a smaller lr or a clip_norm may help")


def _device(name: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else str(name)


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
