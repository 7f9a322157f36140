"""Trial of a run's next round: the global model before, every client's model, and the new global model.

The run is not affected: no file is written, no lock is taken, and the simulation's state does not change.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import forgetting, losses, tree
from fedkeep._util import arrays
from fedkeep._util.own_parts import trust as allow
from fedkeep._util.text import one_line
from fedkeep._util.validate import require_choice
from fedkeep.data import Dataset, Partition, partition
from fedkeep.data.augment import InputPipeline
from fedkeep.engine.evaluate import evaluate
from fedkeep.engine.federation import Federation
from fedkeep.engine.round_plan import RoundPlanner
from fedkeep.engine.simulate import restore_simulation
from fedkeep.engine.simulation import Simulation
from fedkeep.errors import ConfigError, FedkeepError, RunError, UntrustedCode
from fedkeep.experiments.build import build
from fedkeep.experiments.resume import federation_from_arguments
from fedkeep.method import FedAvg
from fedkeep.runs.checkpoints import newest_checkpoint, read_checkpoint
from fedkeep.runs.client_store import ClientStore
from fedkeep.runs.experiment_file import read_experiment, read_experiment_file, refuse_observed
from fedkeep.runs.federation_copy import with_own_files
from fedkeep.runs.files import CLIENTS
from fedkeep.tree import Tree


@dataclass(frozen=True)
class NextRound:
    """One round of a simulation with all its models."""

    simulation: Simulation
    round: int
    ids: list[int]
    before: Tree  # the global weights that the clients started from
    clients: Tree  # the clients' weights after local training, stacked on a leading axis
    after: Tree  # the new global weights

    @cached_property
    def label_counts(self) -> np.ndarray:
        """[K, C] number of examples of each client and class."""
        y, classes = self.simulation.data.y_train.numpy(), self.simulation.task.n_classes
        return np.stack([np.bincount(y[self.examples_of(k)], minlength=classes) for k in self.ids])

    @property
    def models(self) -> list[Tree]:
        """The global model before, the clients' models, the global model after."""
        return [self.before, *(tree.take(self.clients, k) for k in range(len(self.ids))), self.after]

    @cached_property
    def inputs(self) -> InputPipeline:
        """The pipeline from stored examples to the model's inputs, without augmentation, as in evaluation."""
        return self.simulation.local.inputs.without_augmentation

    @cached_property
    def class_accuracy(self) -> np.ndarray:
        """[1 + K + 1, C] class accuracy of `models` on the test set."""
        return forgetting.class_accuracy(self.confusion)

    @cached_property
    def confusion(self) -> np.ndarray:
        """[1 + K + 1, C, C] confusion matrices of `models` on the test set."""
        return np.stack([confusion for confusion, _ in self._evaluated])

    @cached_property
    def test_loss(self) -> np.ndarray:
        """[1 + K + 1] loss of `models` on the test set."""
        return np.array([loss for _, loss in self._evaluated])

    @cached_property
    def _evaluated(self) -> list[tuple[np.ndarray, float]]:
        s = self.simulation
        results = [evaluate(s.task, model, s.x_test, s.y_test, self.inputs) for model in self.models]
        return [(confusion.cpu().numpy(), float(loss) / len(s.y_test)) for confusion, loss in results]

    def own_examples(self, client: int, most: int | None = None) -> tuple[Any, Tensor]:
        """Return the inputs and classes of one client's examples, at most the first `most`."""
        s = self.simulation
        at = torch.from_numpy(self.examples_of(client)[:most]).to(s.y.device)
        return self.inputs(tree.take(s.x, at)), s.y[at]

    def examples_of(self, client: int) -> np.ndarray:
        """Return a client's examples in this round, as indices into the training data."""
        return self.simulation.planner.examples.of(client, self.round)

    def test_examples(self, most: int) -> tuple[Any, Tensor]:
        """Return the inputs and classes of at most `most` test examples, evenly spaced over the test set."""
        s = self.simulation
        at = torch.from_numpy(arrays.evenly_spaced(len(s.y_test), most)).to(s.y_test.device)
        return self.inputs(tree.take(s.x_test, at)), s.y_test[at]


def train_next_round(simulation: Simulation) -> NextRound:
    """Train and aggregate the next round exactly as the simulation would, without changing the simulation."""
    result = simulation.train_round(keep_models=True)
    number, ids = result.plan.round, result.plan.cohort
    if not ids:
        raise FedkeepError(
            f"none of the clients sampled for round {number} has any examples, so there is nothing to analyse",
            key="round",
            value=number,
        )
    after = simulation.aggregate(result)["params"]
    before = tree.detach(simulation.server["params"])  # where clients start, also if an average is what is tested
    return NextRound(simulation, number, ids, before, result.clients["params"], after)


def untrained(simulation: Simulation) -> NextRound:
    """Return the next round without any clients, for studies that look at the global model alone."""
    params = tree.detach(simulation.server["params"])
    nobody = tree.map(lambda w: w.new_zeros(0, *w.shape), params)
    return NextRound(simulation, simulation.round + 1, [], params, nobody, params)


def with_split(simulation: Simulation, split: Mapping[str, Any]) -> Simulation:
    """Return the simulation with its examples divided otherwise among as many clients, for a trial round.

    `split` is that of an experiment file: {"kind": "shards", "s": 2}. FedNTD's figures 18 and 19 send a global model to
    clients that are unlike those it was trained by.
    """
    s, other = simulation, copy.copy(simulation)
    kinds = [kind for kind in partition.KINDS if kind not in ("by_id", "file")]
    options = {"n_clients": len(s.clients), "seed": s.settings.seed, **split}
    divide = partition.KINDS[require_choice("split.kind", options.pop("kind", None), kinds)]
    try:
        other.clients = divide(s.data.y_train, **options)
    except TypeError as error:
        raise FedkeepError(f"split = {dict(split)}: {one_line(error)}", key="split", value=dict(split)) from None
    if len(other.clients) != len(s.clients):
        message = f"split.n_clients = {len(other.clients)}, but the run has {len(s.clients)} clients"
        raise FedkeepError(message, key="split.n_clients", value=len(other.clients), valid=[len(s.clients)])
    planner = RoundPlanner(s.settings, s.data, other.clients, s.ranks, s.planner.hold_out)
    other.planner, other.round_trainer = planner, dataclasses.replace(s.round_trainer, planner=planner)
    return other


def open_run(
    run_dir: str | Path,
    *,
    method: FedAvg | None = None,
    model: nn.Module | None = None,
    data: Dataset | None = None,
    clients: Partition | Iterable[Any] | None = None,
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
    trust: str | Iterable[str] = (),
) -> Simulation:
    """Return the simulation of a run in the state of its checkpoint. It never writes to the run folder.

    A run that was started from an experiment file needs no more arguments. A run that was started with `simulate` needs
    the same model, data and clients again, as for `resume`; code that the run folder names needs `trust`.
    """
    path = Path(run_dir)
    allow(trust)
    about = with_own_files(read_experiment(path), path)
    given = federation_from_arguments(about, method, model, data, clients, criterion) or _from_file(path, about)
    simulation = restore_simulation(path, about["made_by"], given)
    return _at_checkpoint(simulation, path)


def _from_file(path: Path, about: dict[str, Any]) -> Federation:
    from fedkeep.experiments.experiment import Experiment

    refuse_observed(path, about)
    try:
        return build(Experiment.from_dict(about))
    except UntrustedCode:
        raise
    except FedkeepError as error:
        raise error.converted(
            ConfigError,
            f"{path} cannot be restored from its experiment file alone ({error}); from Python, use "
            "fedkeep.instruments.analyse(run_dir, what, model=..., data=..., clients=...)",
        ) from error


def _at_checkpoint(simulation: Simulation, path: Path) -> Simulation:
    """Load the checkpoint into the simulation. The client store reads the run's files and never writes any."""
    experiment = read_experiment_file(path)
    file = newest_checkpoint(path, experiment.run)
    if file is None:
        raise RunError(
            f"{path} has no checkpoint yet, so there is no model to analyse", key="checkpoint", value=str(path)
        )
    saved, state = read_checkpoint(file, experiment), simulation.state
    state.server, state.round = tree.to(saved.server, simulation.task.device), saved.round
    state.clients = ClientStore(path / CLIENTS, cache_bytes=1 << 62, run=experiment.run)
    state.clients.load_index(saved.clients)
    return simulation
