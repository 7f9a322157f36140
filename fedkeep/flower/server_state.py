"""What the server keeps: its model, its own examples, its tree, and the run folder that all of it is saved in."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fedkeep import tree
from fedkeep.data.augment import InputPipeline
from fedkeep.data.dataset import Dataset, from_arrays
from fedkeep.engine import device, provenance, server_hooks, setup
from fedkeep.engine.evaluate import evaluate
from fedkeep.engine.settings import Settings
from fedkeep.errors import DataError, FedkeepError, RunError
from fedkeep.flower import messages
from fedkeep.method import FedAvg
from fedkeep.runs.client_store import ClientStore
from fedkeep.runs.files import EXPERIMENT
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.history import History, Record
from fedkeep.runs.reading import read_experiment
from fedkeep.task import Task, check_forward
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")


@dataclass
class Bench:
    """A server at work."""

    method: FedAvg
    settings: Settings
    task: Task
    n_clients: int
    server: Tree
    history: History
    constants: str
    threads: int
    inputs: InputPipeline
    test: tuple[Any, Tensor] | None
    run: str
    folder: RunFolder | None = None
    round: int = 0
    begun_at: int = 0  # the round before the first one of this process
    visits: ClientStore = field(default_factory=ClientStore)  # the clients whose state counts, and which round made it

    @property
    def params(self) -> Tree:
        """The global model's weights."""
        return self.server["params"]  # type: ignore[no-any-return]

    @property
    def cohort_size(self) -> int:
        """How many clients a round samples."""
        return self.settings.cohort_size(self.n_clients)

    def retune(self, config: Mapping[str, Any]) -> None:
        """Take over the settings that a strategy's `start` is given; what else is in its config is the app's own."""
        told = {key.replace("-", "_"): value for key, value in config.items()}
        known = {key: value for key, value in told.items() if key in Settings.__dataclass_fields__}
        if self.folder and {key for key in known if known[key] != getattr(self.settings, key)} - {"rounds"}:
            raise RunError("with a run folder, give the settings to Strategy, not to start: the folder records them")
        self.settings = replace(self.settings, **known)

    def begin(self) -> None:
        """Record the untrained model, where nothing is recorded yet."""
        if not self.history.records:
            self._record({"round": 0, **self.evaluate()})
            self._save()

    def state_dict(self) -> ArrayRecord:
        """Return the whole model, buffers too, as Flower's arrays."""
        return ArrayRecord(self.task.module(self.params).state_dict())

    def apply(self, server: Tree, record: Record, began: float) -> None:
        """Make a round count: take over its outcome, test it, write it down, save it."""
        number = record["round"]
        self.server = server
        for client in record["cohort"]:
            self.visits.put(client, {}, number)
        if self.settings.due(self.settings.eval_every, number):
            record.update(self.evaluate())
        record["seconds"] = time.perf_counter() - began
        self.round = number
        self._record(record)
        self._save()

    def evaluate(self) -> Record:
        """Test the global model on the server's own examples, where it has some."""
        if self.test is None:
            return {}
        x, y = self.test
        with device.numerics(self.settings, self.task.device, self.threads):
            confusion, loss = evaluate(self.task, self.params, x, y, self.inputs)
        return {"confusion": confusion.tolist(), "test_loss": float(loss) / len(y)}

    def close(self) -> None:
        """Let other processes at the run folder."""
        if self.folder:
            self.folder.close()
            self.folder = None

    def _record(self, record: Record) -> None:
        self.history.records.append(record)
        self.history.params = self.params
        if self.folder:
            self.folder.append(record)

    def _save(self) -> None:
        if self.folder:
            self.folder.checkpoint(self.round, self.server, self.visits)


def set_up(
    method: FedAvg,
    settings: Settings,
    model_fn: Callable[[], nn.Module],
    n_clients: int,
    data_fn: Callable[[], Any] | None,
    n_classes: int | None,
    run_dir: Any,
    criterion: Callable[[Tensor, Tensor], Tensor],
) -> Bench:
    """Make the server, or go on with the one whose run folder is there already."""
    if isinstance(n_clients, bool) or not isinstance(n_clients, int) or n_clients < 1:
        raise FedkeepError(f"num_clients must be a whole number of at least 1, not {n_clients!r}")
    settings.cohort_size(n_clients)
    place = device.resolve_device(settings.device)
    model = messages.build(model_fn, settings.seed)
    data = _data(data_fn)
    classes = n_classes or (data.n_classes if data else None)
    if classes is None:
        raise FedkeepError("how many classes are there? give the server a data_fn to test with, or n_classes")
    inputs = setup.make_inputs(data, settings, place).without_augmentation
    public = setup.prepare_public(data.public if data else None, inputs, place)
    task = setup.make_task(model, settings, classes, n_clients, public, criterion, place)
    test = (tree.to(data.x_test, place), data.y_test.to(place)) if data else None
    if test is not None:
        check_forward(task, inputs(tree.take(test[0], torch.zeros(2, dtype=torch.long, device=place))))
    bench = Bench(
        method,
        settings,
        task,
        n_clients,
        server_hooks.init_server(method, task),
        History(method.name, {**asdict(settings), "engine": "flower"}, build=task.module),
        messages.constants(task),
        device.threads(settings, task),
        inputs,
        test,
        secrets.token_hex(16),
    )
    if run_dir:
        _open(bench, Path(str(run_dir)).expanduser(), data)
    else:
        log.warning("no run_dir: nothing is saved, and a server that stops starts over")
    return bench


def _open(bench: Bench, path: Path, data: Dataset | None) -> None:
    """Write into a run folder from now on; where it holds a checkpoint of the same run, go on from that."""
    about = _described(bench, data)
    if not (path / EXPERIMENT).exists():
        bench.folder = RunFolder.create(path, about)
        return
    theirs = read_experiment(path)
    made_by = theirs.get("made_by", {})
    if made_by.get("engine") != "flower":
        raise RunError(f"{path} holds a run that is no federation's: choose another run-dir")
    for key in ("method", "train", "seed", "split"):
        mine = {k: v for k, v in about[key].items() if v is not None} if isinstance(about[key], dict) else about[key]
        if theirs[key] != mine and not (key == "train" and _same_but_rounds(theirs[key], mine)):
            raise RunError(f"{path} holds a federation with another {key}: choose another run-dir")
    if made_by["model"] != about["made_by"]["model"]:
        raise RunError(f"{path} holds a federation of another model: choose another run-dir")
    bench.folder, bench.run = RunFolder.open(path), made_by["run"]
    saved = bench.folder.restore()
    if saved is not None:
        bench.server = tree.to(saved.server, bench.task.device)
        bench.visits.restore(saved.clients)
        bench.round = bench.begun_at = saved.round
        bench.history.records, bench.history.params = saved.records, bench.params
        log.warning("going on with %s after round %d", path, saved.round)


def _same_but_rounds(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return {**a, "rounds": 0} == {**b, "rounds": 0}


def _described(bench: Bench, data: Dataset | None) -> dict[str, Any]:
    source = data.name if data else "federation"
    return {
        **provenance.experiment_dict(bench.method, bench.settings, bench.task, source, bench.n_clients),
        "checkpoint_every": 1,
        "made_by": {**provenance.made_by("flower", bench.task, bench.threads), "run": bench.run},
    }


def _data(data_fn: Callable[[], Any] | None) -> Dataset | None:
    """Take what the server's `data_fn` returned: a data set, or (x, y) to test with."""
    given = data_fn() if data_fn else None
    if given is None or isinstance(given, Dataset):
        return given
    try:
        x, y = given
    except (TypeError, ValueError):
        raise DataError(
            f"the server's data_fn must return (x, y) to test with, or a data set, not {type(given).__name__}"
        ) from None
    return from_arrays(x, y, x, y)
