"""Server side of a federation: method, task and test data, next to the state that is saved after every round."""

from __future__ import annotations

import functools
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
from fedkeep._util.validate import require_whole
from fedkeep.data.augment import Augment, InputPipeline
from fedkeep.data.dataset import Dataset, from_arrays
from fedkeep.data.labels import require_numbers
from fedkeep.engine import device, privacy, provenance, server_hooks, setup
from fedkeep.engine.evaluate import logits_and_loss
from fedkeep.engine.scores import Scorer, Sites
from fedkeep.engine.settings import DEFAULTS, Settings, default_weight_decay
from fedkeep.engine.upload_form import upload_form
from fedkeep.engine.user_metrics import Metrics, require_metrics
from fedkeep.errors import DataError, FedkeepError, RunError
from fedkeep.flower import messages
from fedkeep.method import FedAvg
from fedkeep.runs.client_store import ClientStore
from fedkeep.runs.files import EXPERIMENT
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.history import History, Record
from fedkeep.runs.reading import read_experiment
from fedkeep.runs.releases import RELEASES, Releases
from fedkeep.runs.server_state import ServerState
from fedkeep.task import Task, check_forward
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")


@dataclass
class FederationServer:
    """The server of a federation.

    `state.clients` holds no states, which stay on the nodes: only the round that made each client's state.
    """

    method: FedAvg
    settings: Settings
    task: Task
    n_clients: int
    constants: str  # hash of what the model holds besides its weights
    threads: int
    inputs: InputPipeline
    test: tuple[Any, Tensor] | None
    scorer: Scorer | None  # of the test data
    run: str  # the run's id, under which nodes save their states
    state: ServerState
    resumed_from: int = 0  # the last round that was finished before this process started
    releases: Releases = field(default_factory=Releases)  # of a differentially private run

    @property
    def cohort_size(self) -> int:
        """How many clients a round samples."""
        return self.settings.cohort_size(self.n_clients)

    @functools.cached_property
    def upload_spec(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Path, shape and dtype of every leaf of an upload; the same in every round."""
        return tree.spec(upload_form(self.method, self.task, self.state.server))

    def retune(self, config: Mapping[str, Any]) -> None:
        """Apply the settings among the config that `start` received; other keys are the app's own."""
        values = {key.replace("-", "_"): value for key, value in config.items()}
        settings = {key: value for key, value in values.items() if key in Settings.__dataclass_fields__}
        if self.settings.weight_decay == default_weight_decay(self.settings.optimizer):
            optimizer = settings.get("optimizer", self.settings.optimizer)
            settings.setdefault("weight_decay", default_weight_decay(optimizer))
        changed = sorted(key for key, value in settings.items() if value != getattr(self.settings, key))
        for key in ("average_weights", "read_out"):
            if key in changed:
                message = f"{key} is part of the server's tree: pass it to Strategy instead of start"
                raise RunError(message, key=key, value=settings[key])
        fixed = [key for key in changed if key != "rounds"] if self.state.folder is not None else []
        if fixed:
            raise RunError(
                f"{fixed[0]} is recorded in the run folder: pass it to Strategy instead of start",
                key=fixed[0],
                value=settings[fixed[0]],
            )
        self.settings = replace(self.settings, **settings)
        server_hooks.require_supported(self.method, self.settings, self.n_clients)
        if not changed:
            return
        for name, value in setup.client_training(self.settings).items():
            setattr(self.task, name, value)
        if not self.state.history.records:
            self.state.server = server_hooks.init_server(self.method, self.task, self.settings)

    def begin(self) -> None:
        """Record the untrained model, unless the run is resumed."""
        if not self.state.history.records:
            self.state.record({"round": 0, **self.evaluate(0)})
            self.state.checkpoint()

    def start_from(self, weights: Tree) -> None:
        """Start from these weights instead of the ones that model_fn returns."""
        init = self.task.init
        missing = sorted(init.keys() - weights.keys())
        if missing:
            raise FedkeepError(
                f"the initial arrays lack {missing[0]}, a weight of the model that model_fn returns", key=missing[0]
            )
        self.task.init = {name: weights[name].to(w) for name, w in init.items()}
        self.state.server = server_hooks.init_server(self.method, self.task, self.settings)

    def state_dict(self) -> ArrayRecord:
        """Return the whole model, including its buffers, as Flower's arrays."""
        return ArrayRecord(self.task.module(self.state.params).state_dict())

    def apply(self, server: Tree, record: Record, began: float) -> None:
        """Apply a finished round: replace the server's tree, evaluate, record and save."""
        state, number = self.state, record["round"]
        if self.settings.private:
            record.update(privacy.public_record(record))
            record["epsilon"] = self.releases.epsilon
        state.server = server
        for client in record["cohort"]:
            state.clients.put(client, {}, number)
        if self.settings.due(self.settings.eval_every, number):
            record.update(self.evaluate(number))
        record["seconds"] = time.perf_counter() - began
        state.round = number
        state.record(record)
        state.checkpoint()

    def evaluate(self, round: int) -> Record:
        """Evaluate the global model on the server's test data after a round; without any, return an empty record."""
        if self.test is None or self.scorer is None:
            return {}
        with device.numerics(self.settings, self.task.device, self.threads):
            outputs = logits_and_loss(self.task, self.state.params, *self.test, self.inputs)
            return self.scorer.read(self.scorer.start(*outputs), round)


def build_server(
    method: FedAvg,
    settings: Settings,
    model_fn: Callable[[], nn.Module],
    num_clients: int,
    data_fn: Callable[[], Any] | None,
    n_classes: int | None,
    run_dir: Any,
    criterion: Callable[[Tensor, Tensor], Tensor],
    keep: int | None = None,
    from_round: int | None = None,
    metrics: Metrics = None,
) -> FederationServer:
    """Build the server of a federation; if `run_dir` already contains the same run, resume it.

    The parameters are those of `fedkeep.flower.Strategy`.
    """
    require_whole("num_clients", num_clients, low=1)
    server_hooks.require_supported(method, settings, num_clients)
    target = device.resolve_device(settings.device)
    model = messages.build_model(model_fn, settings.seed)
    data = _load_data(data_fn)
    classes = n_classes or (data.n_classes if data else None)
    if classes is None:
        raise FedkeepError(
            "the number of classes is unknown: pass n_classes, or a data_fn with test data", key="n_classes"
        )
    inputs = setup.make_inputs(data, settings, target).without_augmentation
    public = setup.prepare_public(data.public if data else None, inputs, target)
    task = setup.make_task(model, settings, classes, num_clients, public, criterion, target)
    test = (tree.to(data.x_test, target), data.y_test.to(target)) if data else None
    if test is not None:
        setup.require_fitting_texts(model, test[0])
        check_forward(task, inputs(tree.take(test[0], torch.zeros(2, dtype=torch.long, device=target))))
    scorer = _make_scorer(test, data, classes, metrics)
    history = History(method.name, {**asdict(settings), "engine": "flower"}, build=task.module)
    history.site_names = scorer.sites.names if scorer and scorer.sites else ()
    history.class_names = data.class_names if data else None
    federation = FederationServer(
        method=method,
        settings=settings,
        task=task,
        n_clients=num_clients,
        constants=messages.constants_hash(task),
        threads=device.threads(settings, task),
        inputs=inputs,
        test=test,
        scorer=scorer,
        run=secrets.token_hex(16),
        state=ServerState(server_hooks.init_server(method, task, settings), history),
    )
    if run_dir:
        _open_folder(federation, Path(str(run_dir)).expanduser(), data, keep, from_round)
    else:
        log.warning("no run_dir: nothing is saved, and a server that is restarted begins with round 1")
    return federation


def _open_folder(
    federation: FederationServer, path: Path, data: Dataset | None, keep: int | None, from_round: int | None
) -> None:
    """Write into this run folder from now on; if it has a checkpoint of the same run, continue from it."""
    about = {**_experiment(federation, data), "keep": keep}
    if not (path / EXPERIMENT).exists():
        federation.state.folder = RunFolder.create(path, about)
        federation.releases = Releases(path / RELEASES, federation.run)
        return
    federation.run = _require_same_run(path, about, federation)
    if federation.settings.private:
        federation.releases = Releases(path / RELEASES, federation.run)
    if federation.state.attach(RunFolder.open(path, keep), ClientStore(), federation.task.device, from_round):
        federation.resumed_from = federation.state.round
        log.warning("resuming %s after round %d", path, federation.state.round)
    if federation.settings.private:
        try:
            federation.releases.require_all_of(federation.state.history.records)
            federation.state.history.released = federation.releases.epsilon
        except RunError:
            federation.state.close()
            raise


def _require_same_run(path: Path, about: dict[str, Any], federation: FederationServer) -> str:
    """Return the id of the run in a folder; raise if it is another run than the one described by `about`.

    Hyperparameters and settings that an older version did not record have the values of that version.
    """
    saved = read_experiment(path)
    saved["method"] = {**federation.method.values_before(), **saved["method"]}
    made_by = saved.get("made_by", {})
    if made_by.get("engine") != "flower":
        raise RunError(
            f"{path} contains a run of another kind: choose another run-dir", key="engine", value=made_by.get("engine")
        )
    for key in ("method", "train", "seed", "split"):
        ours = {k: v for k, v in about[key].items() if v is not None} if isinstance(about[key], dict) else about[key]
        if saved[key] != ours and not (key == "train" and _equal_except_rounds(saved[key], about[key])):
            raise RunError(f"{path} contains a federation with another {key}: choose another run-dir", key=key)
    if made_by["model"] != about["made_by"]["model"]:
        raise RunError(f"{path} contains a federation with another model: choose another run-dir", key="model")
    if federation.scorer is not None:
        provenance.require_same_tests(path, made_by, federation.scorer)
        if "sites" not in made_by:  # its earlier rounds have none
            federation.scorer = federation.scorer.without_sites
    provenance.warn_about_changes(path, made_by, about["made_by"])
    return str(made_by["run"])


def _equal_except_rounds(saved: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Compare settings; those that an older version did not record have their defaults."""
    defaults = {name: value for name, value in DEFAULTS.items() if name != "seed"}
    if isinstance(augment := saved.get("augment"), dict):
        saved = {**saved, "augment": {**asdict(Augment()), **augment}}
    return {**defaults, **saved, "rounds": 0} == {**defaults, **ours, "rounds": 0}


def _experiment(federation: FederationServer, data: Dataset | None) -> dict[str, Any]:
    """Return what is written to experiment.toml."""
    method, settings, task = federation.method, federation.settings, federation.task
    source, normalise = (data.name, data.normalise) if data else ("federation", None)
    made_by = {**provenance.made_by("flower", task, federation.threads), **provenance.identity(method, task, data)}
    if federation.scorer is not None:
        made_by |= provenance.tested(federation.scorer)
    if data and data.class_names is not None:
        made_by["class_names"] = list(data.class_names)
    return {
        **provenance.experiment_dict(method, settings, task, source, federation.n_clients, normalise),
        "checkpoint_every": 1,
        "made_by": {**made_by, "run": federation.run},
    }


def _make_scorer(
    test: tuple[Any, Tensor] | None, data: Dataset | None, n_classes: int, metrics: Metrics
) -> Scorer | None:
    """Return what scores the server's test data; None without any, and then there must be no metrics."""
    own = require_metrics(metrics, n_classes)
    if test is not None:
        return Scorer(test[1], n_classes, Sites.of(data, test[1].device), own)
    if own:
        raise FedkeepError("metrics need test data on the server: pass a data_fn", key="metrics", value=list(own))
    return None


def _load_data(data_fn: Callable[[], Any] | None) -> Dataset | None:
    """Return what the server's `data_fn` returns as a data set; (x, y) becomes its test part."""
    data = data_fn() if data_fn else None
    if data is None or isinstance(data, Dataset):
        return data
    try:
        x, y = data
    except (TypeError, ValueError):
        kind = type(data).__name__
        raise DataError(
            f"the server's data_fn must return (x, y) or a fedkeep.data.Dataset, not {kind}", key="data_fn", value=kind
        ) from None
    require_numbers(y, "data_fn")
    return from_arrays(x, y, x, y)
