"""Building an experiment's parts: data, clients, model and method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from fedkeep import methods, models
from fedkeep.data import Dataset, Partition, load, partition
from fedkeep.engine.federation import Federation
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.experiments import own_parts
from fedkeep.task import Task
from fedkeep.tree import Tree

if TYPE_CHECKING:
    from fedkeep.experiments.experiment import Experiment


def load_data_and_clients(experiment: Experiment) -> tuple[Dataset, Partition]:
    """Load an experiment's data set and divide it among the clients."""
    complete = experiment.to_dict()
    with _keys_of("data"):
        is_own = own_parts.is_own("data", complete["data"]["source"])
        data = own_parts.load_own_data(complete["data"], experiment.seed) if is_own else load(**complete["data"])
    split = complete["split"]
    kind, validation = split.pop("kind"), split.pop("validation", 0.0)
    if kind == "by_id" and data.ids is None:
        raise ConfigError(
            f"split.kind = 'by_id' needs the owner of each example, but the data set {data.name} has none: name their "
            "column with data.ids",
            key="split.kind",
            value=kind,
        )
    with _keys_of("split", share="validation"):
        clients = partition.by_id(data.ids) if kind == "by_id" else partition.KINDS[kind](data.y_train, **split)
        if validation:
            clients = clients.hold_out(validation, split.get("seed", experiment.seed))
    return data, clients


def build(experiment: Experiment, with_metrics: bool = False) -> Federation:
    """Build an experiment's method, model, data, clients and settings, and the user's metrics if they are needed."""
    metrics = own_parts.load_metrics(experiment) if with_metrics else None
    data, clients = load_data_and_clients(experiment)
    model = build_network(experiment.model, data.input_shape, data.n_classes, experiment.seed)
    return Federation(methods.make(experiment.method), model, data, clients, experiment.train, metrics=metrics)


def build_network(table: Mapping[str, Any], input_shape: Any, n_classes: int, seed: int) -> nn.Module:
    """Build the model that an experiment names, fedkeep's or the user's own, with untrained weights."""
    if own_parts.is_own("model", table["name"]):
        return own_parts.build_own_model(table, input_shape, n_classes, seed)
    options = dict(table)
    with _keys_of("model"):
        return models.build(options.pop("name"), input_shape, n_classes, seed, **options)


def build_model(experiment: Experiment, params: Tree) -> nn.Module:
    """Build an experiment's model with these weights; this loads the data, which determines the model's shape."""
    federation = build(experiment)
    return Task(federation.model, federation.data.n_classes, len(federation.clients)).module(params)


@contextmanager
def _keys_of(section: str, **renamed: str) -> Iterator[None]:
    """Give an error the key that its argument has in an experiment file: with the section, and renamed.

    A message that starts with the argument's name starts with this key then.
    """
    try:
        yield
    except FedkeepError as error:
        if error.key is not None and error.key.isidentifier():
            name, error.key = error.key, f"{section}.{renamed.get(error.key, error.key)}"
            if (message := str(error)).startswith(f"{name} "):
                error.args = (error.key + message.removeprefix(name),)
        raise
