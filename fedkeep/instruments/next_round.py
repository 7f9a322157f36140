"""A round trained aside: the global model before, every client's model after, the new global model.

The run itself is not touched: no file is written, no lock taken, and the simulation goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import forgetting, losses, tree
from fedkeep._util import arrays
from fedkeep.data import Dataset, Partition
from fedkeep.data.augment import InputPipeline
from fedkeep.engine.evaluate import evaluate
from fedkeep.engine.federation import Federation
from fedkeep.engine.simulate import restore_simulation
from fedkeep.engine.simulation import Simulation
from fedkeep.errors import ConfigError, FedkeepError, RunError
from fedkeep.experiments.build import build
from fedkeep.experiments.resume import federation_from_arguments
from fedkeep.method import FedAvg
from fedkeep.runs.client_store import ClientStore
from fedkeep.runs.files import CHECKPOINT, CLIENTS, read_tree
from fedkeep.runs.reading import read_experiment
from fedkeep.tree import Tree


@dataclass(frozen=True)
class NextRound:
    """One round of a simulation, with all its models."""

    simulation: Simulation
    round: int
    ids: list[int]
    before: Tree  # the global weights that the clients started from
    clients: Tree  # theirs after local training, stacked on a leading axis
    after: Tree  # the new global weights

    @cached_property
    def label_counts(self) -> np.ndarray:
        """[K, C] examples of each client and class."""
        y, classes = self.simulation.data.y_train.numpy(), self.simulation.task.n_classes
        return np.stack([np.bincount(y[self.simulation.clients[k]], minlength=classes) for k in self.ids])

    @property
    def models(self) -> list[Tree]:
        """The global model before, the clients', the global model after."""
        return [self.before, *(tree.take(self.clients, k) for k in range(len(self.ids))), self.after]

    @cached_property
    def inputs(self) -> InputPipeline:
        """The way from stored examples to the model, as in evaluation: nothing is augmented."""
        return self.simulation.local.inputs.without_augmentation

    @cached_property
    def class_accuracy(self) -> np.ndarray:
        """[1 + K + 1, C] on the test set, of `models`."""
        return forgetting.class_accuracy(np.stack([confusion for confusion, _ in self._tested]))

    @cached_property
    def test_loss(self) -> np.ndarray:
        """[1 + K + 1] on the test set, of `models`."""
        return np.array([loss for _, loss in self._tested])

    @cached_property
    def _tested(self) -> list[tuple[np.ndarray, float]]:
        s = self.simulation
        found = [evaluate(s.task, model, s.x_test, s.y_test, self.inputs) for model in self.models]
        return [(confusion.cpu().numpy(), float(loss) / len(s.y_test)) for confusion, loss in found]

    def own_examples(self, client: int, most: int | None = None) -> tuple[Any, Tensor]:
        """Return what the model sees of one client's examples, and their classes."""
        s = self.simulation
        at = torch.from_numpy(s.clients[client][:most]).to(s.y.device)
        return self.inputs(tree.take(s.x, at)), s.y[at]

    def test_examples(self, most: int) -> tuple[Any, Tensor]:
        """Return what the model sees of the test set, spread evenly over it where it has more than `most` examples."""
        s = self.simulation
        at = torch.from_numpy(arrays.evenly_spaced(len(s.y_test), most)).to(s.y_test.device)
        return self.inputs(tree.take(s.x_test, at)), s.y_test[at]


def train_next_round(simulation: Simulation) -> NextRound:
    """Train and aggregate the next round exactly as the simulation would, without changing the simulation."""
    result = simulation.train_round(keep_models=True)
    number, ids = result.plan.round, result.plan.cohort
    if not ids:
        raise FedkeepError(f"none of the clients sampled for round {number} has any examples: nothing to analyse")
    after = simulation.aggregate(result)["params"]
    return NextRound(simulation, number, ids, tree.detach(simulation.params), result.clients["params"], after)


def open_run(
    run_dir: str | Path,
    *,
    method: FedAvg | None = None,
    model: nn.Module | None = None,
    data: Dataset | None = None,
    clients: Partition | Iterable[Any] | None = None,
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
) -> Simulation:
    """Return the simulation of a run as it was at its checkpoint, to look at: nothing it does reaches the folder.

    A run started from an experiment file needs nothing more; one started with `simulate` needs the same model, data and
    clients again, as `resume` does.
    """
    path = Path(run_dir)
    about = read_experiment(path)
    given = federation_from_arguments(about, method, model, data, clients, criterion) or _from_file(path, about)
    simulation = restore_simulation(path, about["made_by"], given)
    return _at_checkpoint(simulation, path)


def _from_file(path: Path, about: dict[str, Any]) -> Federation:
    from fedkeep.experiments.experiment import Experiment

    try:
        return build(Experiment.from_dict(about))
    except FedkeepError as error:
        raise ConfigError(
            f"{path} cannot be made again from its file alone ({error}); from Python: "
            "fedkeep.instruments.analyse(run_dir, what, model=..., data=..., clients=...)"
        ) from error


def _at_checkpoint(simulation: Simulation, path: Path) -> Simulation:
    """Put the simulation where the checkpoint is. Its client store knows the files, and has no reason to write any."""
    if not (path / CHECKPOINT).exists():
        raise RunError(f"{path} has no checkpoint yet: there is no model to look at")
    saved, about = read_tree(path / CHECKPOINT)
    state = simulation.state
    state.server, state.round = tree.to(saved["server"], simulation.task.device), int(about["round"])
    state.clients = ClientStore(path / CLIENTS, cache_bytes=1 << 62)
    state.clients.look_at(saved["clients"])
    return simulation
