"""Messages between server and nodes, apart from the trees: the protocol, settings and method of a request.

Only the server knows the settings. It sends each node the ones it needs with every request. A node checks that the
request is for the method that its own app runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from fedkeep import methods
from fedkeep._util.rng import seeded
from fedkeep._util.text import one_line
from fedkeep._util.text_form import TextForm
from fedkeep._util.validate import require_choice, require_number, require_whole
from fedkeep.engine.settings import Settings
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.method import FedAvg
from fedkeep.runs.files import fingerprint
from fedkeep.task import Task

VERSION = 1  # of this protocol; a node rejects any other
QUERY = "fedkeep"  # the query that a node answers with its client id
SENT = "sent"  # the entry of a message's tree with what goes to one client alone

CLIENT_SETTINGS = (
    "epochs", "batch_size", "drop_last", "accumulate", "momentum", "weight_decay", "optimizer", "clip_norm", "augment",
    "seed", "dtype", "autocast", "tf32", "deterministic", "threads",
)  # fmt: skip

_ADDED_SETTINGS = {"drop_last": False, "accumulate": 1}  # after version 1, with their defaults
_ADDED_AUGMENT = {"padding": "zeros"}

LARGEST = 2**31 - 1
WHOLE_FIELDS = {  # of a request, with their ranges
    "round": (1, LARGEST), "client": (0, LARGEST), "state": (0, LARGEST), "n_clients": (1, LARGEST),
    "n_classes": (1, 10**7),
}  # fmt: skip
TEXT_FIELDS = {
    "run": "[0-9a-f]{8,64}",
    "constants": "[0-9a-f]{0,128}",
    "method": ".{2,20000}",
    "settings": ".{2,20000}",
}
LARGEST_SETTINGS = {"batch_size": LARGEST, "threads": 1024}
MAX_EPOCHS = 1000  # that a node trains in a round, unless its config has `max-epochs`


@dataclass(frozen=True)
class TrainRequest:
    """The server's request to one client to train in a round."""

    run: str  # the run's id, under which a node saves its states; it stays the same when anything is restarted
    round: int
    client: int
    state: int  # the round whose state the client continues from; 0: the client starts with a new state
    lr: float
    n_clients: int
    n_classes: int
    constants: str  # hash of what the model holds besides its weights, which is neither trained nor sent
    method: str
    settings: str

    def to_config(self) -> dict[str, Any]:
        """Return the request as a message's config."""
        return {"version": VERSION, **{key.replace("_", "-"): value for key, value in asdict(self).items()}}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TrainRequest:
        """Return the request in a message's config; raise unless every field has the type and range of a real one."""
        version = config.get("version")
        if version != VERSION or isinstance(version, bool):
            raise FedkeepError(
                f"the server uses version {version!r:.40} of fedkeep's protocol, this node version {VERSION}: install "
                "the same fedkeep on both",
                key="version",
                value=version,
                valid=[VERSION],
            )
        values = {key: config.get(key.replace("_", "-")) for key in cls.__dataclass_fields__}
        for key, (low, high) in WHOLE_FIELDS.items():
            require_whole(key, values[key], low, high)
        require_number("lr", values["lr"], above=0, high=1e6)
        for key, pattern in TEXT_FIELDS.items():
            text = values[key]
            if not isinstance(text, str) or not re.fullmatch(pattern, text, flags=re.DOTALL):
                raise FedkeepError(f"the request's {key} is not valid", key=key, value=text)
        request = cls(**values)  # type: ignore[arg-type]
        if not request.state < request.round or not request.client < request.n_clients:
            key = "state" if request.state >= request.round else "client"
            raise FedkeepError(f"the request's {key} is not valid", key=key, value=values[key])
        return request


def pack_settings(settings: Settings) -> str:
    """Return the settings that a client needs as JSON.

    Those that came after version 1 are left out where they have their defaults, so that older nodes can be served.
    """
    values = asdict(settings)
    left_out = {key for key, default in _ADDED_SETTINGS.items() if values[key] == default}
    packed = {key: values[key] for key in CLIENT_SETTINGS if key not in left_out}
    if packed["augment"]:
        added = _ADDED_AUGMENT.items()
        packed["augment"] = {key: value for key, value in packed["augment"].items() if (key, value) not in added}
    return json.dumps(packed)


def unpack_settings(text: str, device: str, max_epochs: int = MAX_EPOCHS) -> Settings:
    """Undo `pack_settings`, for a node that computes on this device; raise if the server asks for too much."""
    try:
        values = json.loads(text)
        unknown = sorted(values.keys() - set(CLIENT_SETTINGS))
        if unknown:
            raise FedkeepError("the request has settings that are not a client's", key=unknown[0][:40])
        settings = Settings.of({**values, "device": device, "engine": "loop"})
    except FedkeepError:
        raise
    except Exception as error:
        raise FedkeepError(f"the request's settings cannot be read: {one_line(error)}", key="settings") from error
    require_whole("epochs", settings.epochs, high=max_epochs, label="epochs (max-epochs in this node's config)")
    for key, most in LARGEST_SETTINGS.items():
        if getattr(settings, key) is not None:
            require_whole(key, getattr(settings, key), high=most)
    return settings


def method_id(method: FedAvg) -> str:
    """Return the method's name and hyperparameters as JSON."""
    return json.dumps(method.to_dict())


def resolve_method(method: FedAvg | str | None, run_config: Mapping[str, Any]) -> FedAvg:
    """Return the method, with the name and hyperparameters that the app's config sets (`method.name`, `method.beta`).

    >>> resolve_method("fedntd", {"method.beta": 0.5}).beta
    0.5
    """
    config = {key.removeprefix("method."): value for key, value in run_config.items() if key.startswith("method.")}
    name = config.pop("name", None)
    if isinstance(method, FedAvg) and name in (None, method.name):
        base = method
    elif (name or method) is None:
        raise ConfigError(
            "there is no method: pass one to client_app and server_app, or set method.name in the app's config",
            key="method.name",
        )
    else:
        base = methods.get(str(name or method))()
    valid = [f"method.{key}" for key in base.hyperparameters()]
    for key in config:
        require_choice(f"method.{key}", f"method.{key}", valid, what="key", error=ConfigError)
    return replace(base, **config)


def resolve_settings(arguments: Mapping[str, Any], run_config: Mapping[str, Any]) -> Settings:
    """Return the settings: the arguments, overridden by the app's config (`train.lr`, `seed`).

    >>> resolve_settings({"lr": 0.1}, {"train.lr": 0.2, "train.batch-size": 10, "seed": 3}).batch_size
    10
    """
    config = {key.removeprefix("train."): value for key, value in run_config.items() if key.startswith("train.")}
    values = {**arguments, **{key.replace("-", "_"): value for key, value in config.items()}}
    if "seed" in run_config:
        values["seed"] = run_config["seed"]
    for key in values:
        require_choice(key, key, Settings.__dataclass_fields__, what="setting", error=ConfigError)
    settings = Settings(**values)
    if settings.eval_local_every:
        raise ConfigError(
            "eval_local_every is for simulations: the server of a federation does not evaluate local models",
            key="eval_local_every",
            value=settings.eval_local_every,
        )
    if settings.cohorts is not None:
        raise ConfigError(
            "cohorts is for simulations: the server of a federation chooses among the clients that are connected, and "
            "replaces those that do not reply",
            key="cohorts",
            value=settings.cohorts,
        )
    if settings.reductions is not None:
        raise ConfigError(
            "reductions is for simulations: a client of a federation has data of its own, from its data_fn",
            key="reductions",
            value=settings.reductions,
        )
    return settings


def build_model(model_fn: Callable[[], Any], seed: int) -> nn.Module:
    """Return the user's model. Its random numbers are seeded, so that server and nodes build the same model."""
    with seeded(seed, torch.device("cpu")):
        model = model_fn()
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise FedkeepError(f"model_fn must return a torch.nn.Module, not {kind}", key="model_fn", value=kind)
    return model


def constants_hash(task: Task) -> str:
    """Return a hash of the model's frozen parameters and buffers, which are never sent, and of its tokenizer."""
    model = task.module(task.init)
    constants = {name: value.float() for name, value in model.state_dict().items() if name not in task.init}
    form = getattr(model, "text_form", None)
    if isinstance(form, TextForm):
        constants["tokenizer"] = torch.tensor(list(form.tokenizer.encode()))
    return fingerprint(constants)
