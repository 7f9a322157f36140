"""What server and nodes say to each other beside the trees.

The server alone knows the settings, and says with every task what a node needs for it; a node checks that the method is
the one it agreed to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from fedkeep import methods
from fedkeep._util.rng import seeded
from fedkeep._util.text import did_you_mean
from fedkeep.engine.settings import Settings
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.method import FedAvg
from fedkeep.runs.files import fingerprint
from fedkeep.task import Task

VERSION = 1  # of this protocol; a node refuses another
QUERY = "fedkeep"  # the query in which a node says which client it is

CLIENT_SETTINGS = (
    "epochs", "batch_size", "momentum", "weight_decay", "optimizer", "clip_norm", "augment", "seed", "dtype",
    "autocast", "tf32", "deterministic", "threads",
)  # fmt: skip


@dataclass(frozen=True)
class TrainRequest:
    """One client's task of a round."""

    run: str  # the run's own name, under which a node keeps its state: it outlives restarts of everything
    round: int
    client: int
    state: int  # the round whose state the client is to go on from; 0: it has none that counts
    lr: float
    n_clients: int
    n_classes: int
    constants: str  # of the model: what is neither trained nor sent, in a few letters
    method: str
    settings: str

    def to_config(self) -> dict[str, Any]:
        """Return what goes into the message's config."""
        return {"version": VERSION, **{key.replace("_", "-"): value for key, value in asdict(self).items()}}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TrainRequest:
        """Read a message's config."""
        if config.get("version") != VERSION:
            raise FedkeepError(
                f"the server speaks version {config.get('version')} of fedkeep's protocol, this node {VERSION}: "
                "install the same fedkeep on both"
            )
        return cls(**{key: config[key.replace("_", "-")] for key in cls.__dataclass_fields__})


def pack_settings(settings: Settings) -> str:
    """Say what of the settings is a client's business."""
    given = asdict(settings)
    return json.dumps({key: given[key] for key in CLIENT_SETTINGS})


def unpack_settings(text: str, device: str) -> Settings:
    """Undo `pack_settings`, for a node that computes on this device."""
    return Settings.of({**json.loads(text), "device": device, "engine": "loop"})


def method_id(method: FedAvg) -> str:
    """Say which method this is, hyperparameters and all."""
    return json.dumps(method.to_dict())


def chosen_method(given: FedAvg | str | None, run_config: Mapping[str, Any]) -> FedAvg:
    """Make the method: as given in Python, then as the run's config says (`method.name`, `method.beta`).

    >>> chosen_method("fedntd", {"method.beta": 0.5}).beta
    0.5
    """
    told = {key.removeprefix("method."): value for key, value in run_config.items() if key.startswith("method.")}
    name = told.pop("name", None)
    if isinstance(given, FedAvg) and name in (None, given.name):
        method = given
    elif (name or given) is None:
        raise ConfigError("no method: give client_app and server_app one, or the app's config a method.name")
    else:
        method = methods.get(str(name or given))()
    for key in told:
        if key not in method.hyperparameters():
            raise ConfigError(f"unknown key 'method.{key}': {did_you_mean(key, method.hyperparameters())}")
    return replace(method, **told)


def chosen_settings(given: Mapping[str, Any], run_config: Mapping[str, Any]) -> Settings:
    """Make the settings: as given in Python, then as the run's config says (`train.lr`, `seed`).

    >>> chosen_settings({"lr": 0.1}, {"train.lr": 0.2, "train.batch-size": 10, "seed": 3}).batch_size
    10
    """
    told = {key.removeprefix("train."): value for key, value in run_config.items() if key.startswith("train.")}
    told = {key.replace("-", "_"): value for key, value in told.items()}
    if "seed" in run_config:
        told["seed"] = run_config["seed"]
    known = Settings.__dataclass_fields__
    for key in {**given, **told}:
        if key not in known:
            raise ConfigError(f"unknown setting {key!r}: {did_you_mean(key, known)}")
    settings = Settings(**{**given, **told})
    if settings.eval_local_every:
        raise ConfigError("eval_local_every is for simulations: in a federation the server does not see local models")
    return settings


def build(model_fn: Any, seed: int) -> nn.Module:
    """Make the user's model, with what it draws at random keyed by the seed: server and nodes draw the same."""
    with seeded(seed, torch.device("cpu")):
        model = model_fn()
    if not isinstance(model, nn.Module):
        raise FedkeepError(f"model_fn must return a torch.nn.Module, not {type(model).__name__}")
    return model


def constants(task: Task) -> str:
    """Sum up what the model holds beside its weights: frozen parameters and buffers, which never travel."""
    state = task.module(task.init).state_dict()
    return fingerprint({name: value.float() for name, value in state.items() if name not in task.init})
