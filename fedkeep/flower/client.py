"""Client side of a federation: a Flower ClientApp that calls the same `train_one` as the simulation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedkeep import losses, tree
from fedkeep._util.text import one_line
from fedkeep._util.validate import require_whole
from fedkeep.data.augment import InputPipeline
from fedkeep.data.dataset import Dataset, from_arrays
from fedkeep.data.labels import require_numbers
from fedkeep.engine import device, setup
from fedkeep.engine.local import ClientResult, LocalTraining
from fedkeep.engine.settings import Settings
from fedkeep.errors import ConfigError, DataError, FedkeepError, ModelError
from fedkeep.flower import messages, privacy_mods, records
from fedkeep.flower.client_state import ClientStates, open_states
from fedkeep.flower.examples import read_examples
from fedkeep.flower.messages import TrainRequest
from fedkeep.method import FedAvg
from fedkeep.task import Public, Task
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

DataFn = Callable[[Context], Any]
ModelFn = Callable[[], nn.Module]


@dataclass(frozen=True)
class Examples:
    """A node's own examples on its device, and their conversion to the model's inputs."""

    x: Any
    y: Tensor
    inputs: InputPipeline
    image: tuple[int, int]

    @classmethod
    def load(cls, data: Any, settings: Settings, target: torch.device) -> Examples:
        """Load what a `data_fn` returned: (x, y), a torch data set, or the training part of a fedkeep data set."""
        dataset = data if isinstance(data, Dataset) else _as_dataset(data)
        inputs, image = setup.make_inputs(dataset, settings, target), setup.image_size(dataset, settings)
        return cls(tree.to(dataset.x_train, target), dataset.y_train.to(target), inputs, image)

    def sample(self, n: int) -> Any:
        """Return the first example n times, as the model gets it."""
        return self.inputs.without_augmentation(tree.take(self.x, torch.zeros_like(self.y[:1]).expand(n)))


@dataclass(frozen=True)
class Node:
    """A node's answers to the server's messages. It holds the app's arguments, and nothing of a single message."""

    method: FedAvg | str | None
    model_fn: ModelFn
    data_fn: DataFn
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy
    report_loss: bool = False
    privacy_mods: tuple[str, ...] = ()  # names of Flower's privacy mods around training

    def client_id(self, context: Context) -> int:
        """Return which client this node is: `client-id` of its config, or Flower's usual `partition-id`."""
        config = context.node_config
        client = config.get("client-id", config.get("partition-id"))
        if client is None:
            raise ConfigError(
                "this SuperNode has no client-id: start it with --node-config 'client-id=K', K from 0 on",
                key="client-id",
            )
        return require_whole("client-id", client, low=0, error=ConfigError)

    def query(self, message: Message, context: Context) -> Message:
        """Reply with this node's client id."""
        self._stop_on_dry_run(context)
        config = {"version": messages.VERSION, "client": self.client_id(context)}
        return Message(records.to_records({}, config), reply_to=message)

    def train(self, message: Message, context: Context) -> Message:
        """Train on this node's own examples, and reply with what the method's `finish` uploads."""
        self._stop_on_dry_run(context)
        request = TrainRequest.from_config(message.content.config_records.get(records.CONFIG, {}))
        method = self._agreed_method(request, context)
        if request.client != (client := self.client_id(context)):
            raise FedkeepError(
                f"the request is for client {request.client}, but this node is client {client}",
                key="client-id",
                value=client,
            )
        reply: dict[str, Any] = {"round": request.round, "client": client}
        most = require_whole("max-epochs", context.node_config.get("max-epochs", messages.MAX_EPOCHS), low=1)
        settings = messages.unpack_settings(request.settings, str(context.node_config.get("device", "auto")), most)
        target = device.resolve_device(settings.device)
        with _private("the node's data cannot be read"):
            examples = Examples.load(self.data_fn(context), settings, target)
        if not len(examples.y):
            return Message(records.to_records({}, {**reply, "empty": True}), reply_to=message)
        with _private("the node's model or criterion cannot be used"):
            task = self.task(settings, request.n_classes, request.n_clients, None, target)
        _require_same_task(task, examples, request)
        with _private("the node's model cannot be used with its data"):
            task.find_features(examples.sample(2))
        _require_reasonable_augmentation(settings, examples)
        shared = tree.to(_read_broadcast(message, task), target)
        sent = shared.pop(messages.SENT, {}) if method.uses("broadcast_to") else {}
        with _private("training failed on the node"):
            states = open_states(context, request.run, client)
            trained, lost_state = self.train_one(method, task, examples, settings, shared, request, states, sent)
        upload = privacy_mods.covered_upload(method, trained.upload, self.privacy_mods)
        if trained.client:
            with _private("the client's state could not be saved on the node"):
                states.save(request.round, tree.to(trained.client, "cpu"), keep=request.state)
            reply["fresh"] = lost_state
        if self.report_loss:
            reply["loss"] = float(trained.losses.double().mean())
        return Message(records.to_records(upload, reply), reply_to=message)

    def train_one(
        self,
        method: FedAvg,
        task: Task,
        examples: Examples,
        settings: Settings,
        shared: Tree,
        request: TrainRequest,
        states: ClientStates | None,
        sent: Tree,
    ) -> tuple[ClientResult, bool]:
        """Train as in the simulation. Return the result, and whether the state that the server expects was lost."""
        state = states.load(request.state) if states and request.state else None
        client = state if state is not None else method.init_client(task, shared["params"])
        lost_state = bool(client) and bool(request.state) and state is None
        if lost_state:
            log.warning("client %d has lost its state of round %d and gets a new one", request.client, request.state)
        n, hold_out = len(examples.y), method.hold_out()
        plan = setup.client_plan(settings, request.round, request.client, n, examples.image, hold_out)
        local = LocalTraining(method, task, examples.inputs, settings.clip_norm, settings.part_size)
        with device.numerics(settings, task.device, device.threads(settings, task)):
            client = tree.to(client, task.device)
            return local.train_one(shared, client, examples.x, examples.y, plan, request.lr, sent), lost_state

    def task(
        self, settings: Settings, n_classes: int, n_clients: int, public: Public | None, target: torch.device
    ) -> Task:
        """Make the task of this node's model."""
        model = messages.build_model(self.model_fn, settings.seed)
        return setup.make_task(model, settings, n_classes, n_clients, public, self.criterion, target)

    def _agreed_method(self, request: TrainRequest, context: Context) -> FedAvg:
        """Return the method; raise unless the server runs the same one and this node's config allows it."""
        method = messages.resolve_method(self.method, context.run_config)
        if (own := messages.method_id(method)) != request.method:
            raise FedkeepError(
                f"the server runs {request.method}, but this node runs {own}", key="method", value=request.method
            )
        allowed = context.node_config.get("methods")
        if allowed is not None and method.name not in (names := [name.strip() for name in str(allowed).split(",")]):
            raise FedkeepError(
                f"this node's config allows {', '.join(names)}, but not {method.name}",
                key="methods",
                value=method.name,
                valid=names,
            )
        return method

    def _stop_on_dry_run(self, context: Context) -> None:
        """If the node's config has `dry-run`, log what the node would send, and raise an error."""
        if not context.node_config.get("dry-run"):
            return
        from fedkeep.flower.dry_run import format_dry_run, inspect_node

        for line in format_dry_run(inspect_node(self, context)).splitlines():
            log.warning("%s", line)
        raise FedkeepError(
            "this node is on a dry run: its log shows what it would send; nothing is sent", key="dry-run"
        )


class FedkeepClientApp(ClientApp):
    """A ClientApp that trains with fedkeep. An app can add its own evaluation and queries as usual."""

    node: Node

    def train(self, action: str = "default", **kwargs: Any) -> Any:
        """Ignore an app's own training function, and log that: fedkeep trains instead."""
        if action != "default" or "train.default" not in self._registered_funcs:
            return super().train(action, **kwargs)
        log.warning("this app's own training function is not used: fedkeep trains instead")
        return lambda function: function


def client_app(
    method: FedAvg | str | None,
    model_fn: ModelFn,
    data_fn: DataFn,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
    mods: list[Any] | None = None,
    report_loss: bool = False,
) -> FedkeepClientApp:
    """Make the ClientApp of a federation.

    A node sends what the method's `finish` uploads, and nothing else unless `report_loss` is set. The node's own config
    (`flower-supernode --node-config`) sets `client-id`, the client that the node is; `state-dir`, the folder of a
    stateful method's state; `device`; `methods`, the methods it takes part in; `max-epochs`, the most epochs that it
    trains in a round; and `dry-run`.

    Parameters
    ----------
    method
        One of `fedkeep.methods`, or its name; None if the app's config has `method.name`. The app's config takes
        precedence (`method.name`, `method.beta`).
    model_fn
        Returns the model, a `torch.nn.Module` from inputs to logits.
    data_fn
        `data_fn(context)` returns this node's own examples: (x, y), a torch DataLoader or data set of such pairs, or a
        data set of `fedkeep.data`, whose training part is used.
    criterion
        The loss of logits and labels, per example.
    mods
        Flower's mods, applied around training. Privacy mods that do not cover all that a method sends are refused.
    report_loss
        Whether to send the mean training loss as well.
    """
    names = privacy_mods.mod_names(mods)
    privacy_mods.require_usable_mods(names, report_loss)
    app = FedkeepClientApp()
    app.node = node = Node(method, model_fn, data_fn, criterion, report_loss, names)
    app.query(messages.QUERY)(node.query)
    app.train(mods=mods)(node.train)
    return app


def _as_dataset(data: Any) -> Dataset:
    """Return arrays or a torch data set as a checked data set; its test part is not used."""
    if hasattr(data, "dataset"):  # a torch DataLoader: its batches are not used, the plan decides the batches
        data = data.dataset
    try:
        is_torch = hasattr(data, "__getitem__") and not isinstance(data, tuple | list)
        x, y = read_examples(data, "data_fn") if is_torch else data
    except FedkeepError:
        raise
    except (TypeError, ValueError):
        kind = type(data).__name__
        raise DataError(
            f"data_fn must return (x, y) or a fedkeep.data.Dataset, not {kind}", key="data_fn", value=kind
        ) from None
    if not len(y):
        return Dataset(x, torch.zeros(0, dtype=torch.long), x, torch.zeros(0, dtype=torch.long), 0)
    require_numbers(y, "data_fn")
    n_classes = max(2, int(torch.as_tensor(y).max()) + 1)
    return from_arrays(x, y, x, y, n_classes=n_classes)


@contextmanager
def _private(what: str) -> Iterator[None]:
    """Log an error on this node, and raise one without its text: whatever a ClientApp raises is sent to the server."""
    try:
        yield
    except Exception as error:
        log.exception("%s", what)
        kind = type(error.__cause__ or error).__name__
        raise FedkeepError(f"{what} ({kind}); its log has the details", key="node", value=kind) from error


def _read_broadcast(message: Message, task: Task) -> Tree:
    """Return what the server has sent; raise unless its weights are this model's, and all numbers are finite."""
    try:
        shared = records.from_records(message.content)
        same = tree.spec(shared["params"]) == tree.spec(task.init)
        finite = all(bool(t.isfinite().all()) for t in tree.leaves(shared) if t.is_floating_point())
    except FedkeepError:
        raise
    except Exception as error:
        raise FedkeepError(f"the request's weights cannot be read: {one_line(error)}", key="params") from error
    if not same:
        raise ModelError("the server's weights are not those of this node's model", key="params")
    if not finite:
        raise FedkeepError("the server has sent NaN or infinite numbers", key="params")
    return shared


def _require_reasonable_augmentation(settings: Settings, examples: Examples) -> None:
    """Raise if a server asks for a padding that is larger than the image allows."""
    if settings.augment:
        require_whole("augment.crop", settings.augment.crop, high=settings.augment.largest_crop(examples.image))


def _require_same_task(task: Task, examples: Examples, request: TrainRequest) -> None:
    """Raise unless this node's model and labels fit the federation's."""
    if (own := messages.constants_hash(task)) != request.constants:
        raise ModelError(
            f"this node's model has other frozen weights, buffers or another tokenizer (hash {own}) than the server's "
            f"({request.constants}): build both with the same model_fn, torch version and files",
            key="model_fn",
            value=own,
        )
    setup.require_fitting_texts(task.train_module, examples.x)
    label = int(examples.y.max())
    if label >= request.n_classes:
        raise DataError(
            f"this node has a label beyond the federation's classes, 0 to {request.n_classes - 1}",
            key="data_fn",
            value=label,
        )
