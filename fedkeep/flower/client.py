"""The client half: a Flower ClientApp around the very `train_one` that the simulation runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import default_collate

from fedkeep import losses, tree
from fedkeep.data.augment import InputPipeline
from fedkeep.data.dataset import Dataset, from_arrays
from fedkeep.engine import device, setup
from fedkeep.engine.local import ClientResult, LocalTraining
from fedkeep.engine.settings import Settings
from fedkeep.errors import ConfigError, DataError, FedkeepError, ModelError
from fedkeep.flower import messages, records
from fedkeep.flower.client_state import ClientStates, client_states
from fedkeep.flower.messages import TrainRequest
from fedkeep.method import FedAvg
from fedkeep.task import Public, Task
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

DataFn = Callable[[Context], Any]
ModelFn = Callable[[], nn.Module]


@dataclass(frozen=True)
class Examples:
    """A node's own examples, on its device, and the way from them to what the model is given."""

    x: Any
    y: Tensor
    inputs: InputPipeline
    image: tuple[int, int]

    @classmethod
    def of(cls, given: Any, settings: Settings, place: torch.device) -> Examples:
        """Take what a `data_fn` returned: (x, y), a torch data set, or one of ours, whose training part counts."""
        data = given if isinstance(given, Dataset) else _checked(given)
        inputs, image = setup.make_inputs(data, settings, place), setup.image_size(data, settings)
        return cls(tree.to(data.x_train, place), data.y_train.to(place), inputs, image)


@dataclass(frozen=True)
class Node:
    """What a node does when it is asked: everything that the app was given, and nothing of a single message."""

    method: FedAvg | str | None
    model_fn: ModelFn
    data_fn: DataFn
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy
    report_loss: bool = False

    def client_id(self, context: Context) -> int:
        """Return which client this node is, from its config: `client-id`, or Flower's usual `partition-id`."""
        config = context.node_config
        found = config.get("client-id", config.get("partition-id"))
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise ConfigError(f"start this SuperNode with --node-config 'client-id=K', K from 0 on; it has {found!r}")
        return found

    def query(self, message: Message, context: Context) -> Message:
        """Say which client this is."""
        if context.node_config.get("dry-run"):
            self._refuse_on_dry_run(context)
        config = {"version": messages.VERSION, "client": self.client_id(context)}
        return Message(records.to_records({}, config), reply_to=message)

    def train(self, message: Message, context: Context) -> Message:
        """Train on this node's own examples, and send what the method's `finish` uploads."""
        if context.node_config.get("dry-run"):
            self._refuse_on_dry_run(context)
        config = message.content.config_records[records.CONFIG]
        ask = TrainRequest.from_config(config)
        method = self._agreed(ask, context)
        if ask.client != self.client_id(context):
            raise FedkeepError(f"this node is client {self.client_id(context)}, the server asks client {ask.client}")
        said: dict[str, Any] = {"round": ask.round, "client": ask.client}
        settings = messages.unpack_settings(ask.settings, str(context.node_config.get("device", "auto")))
        place = device.resolve_device(settings.device)
        examples = Examples.of(self.data_fn(context), settings, place)
        if not len(examples.y):
            return Message(records.to_records({}, {**said, "empty": True}), reply_to=message)
        task = self.task(settings, ask.n_classes, ask.n_clients, None, place)
        _check(task, examples, ask)
        kept = client_states(context, ask.run, ask.client)
        shared = tree.to(records.from_records(message.content), place)
        trained, fresh = self.train_one(method, task, examples, settings, shared, ask, kept)
        if trained.client:
            kept.save(ask.round, tree.to(trained.client, "cpu"), keep=ask.state)
            said["fresh"] = fresh
        if self.report_loss:
            said["loss"] = float(trained.losses.double().mean())
        return Message(records.to_records(trained.upload, said), reply_to=message)

    def train_one(
        self,
        method: FedAvg,
        task: Task,
        examples: Examples,
        settings: Settings,
        shared: Tree,
        ask: TrainRequest,
        kept: ClientStates | None,
    ) -> tuple[ClientResult, bool]:
        """Train as the simulation does. Also say whether a state that the server counts on was not there."""
        state = kept.load(ask.state) if kept and ask.state else None
        client = state if state is not None else method.init_client(task, shared["params"])
        fresh = bool(client) and bool(ask.state) and state is None
        if fresh:
            log.warning("client %d has no state of round %d any more and starts anew", ask.client, ask.state)
        plan = setup.client_plan(settings, ask.round, ask.client, len(examples.y), examples.image)
        local = LocalTraining(method, task, examples.inputs, settings.clip_norm)
        with device.numerics(settings, task.device, device.threads(settings, task)):
            client = tree.to(client, task.device)
            return local.train_one(shared, client, examples.x, examples.y, plan, ask.lr), fresh

    def task(
        self, settings: Settings, n_classes: int, n_clients: int, public: Public | None, place: torch.device
    ) -> Task:
        """Make the task of this node's model."""
        model = messages.build(self.model_fn, settings.seed)
        return setup.make_task(model, settings, n_classes, n_clients, public, self.criterion, place)

    def _agreed(self, ask: TrainRequest, context: Context) -> FedAvg:
        """Return the method, if it is the server's and one that this node's config allows."""
        method = messages.chosen_method(self.method, context.run_config)
        if messages.method_id(method) != ask.method:
            raise FedkeepError(f"the server asks for {ask.method}, this node runs {messages.method_id(method)}")
        allowed = context.node_config.get("methods")
        if allowed is not None and method.name not in [name.strip() for name in str(allowed).split(",")]:
            raise FedkeepError(f"this node takes part in {allowed} alone (its config says so), not in {method.name}")
        return method

    def _refuse_on_dry_run(self, context: Context) -> None:
        from fedkeep.flower.dry_run import format_dry_run, inspect_node

        for line in format_dry_run(inspect_node(self, context)).splitlines():
            log.warning("%s", line)
        raise FedkeepError("this node is on a dry run: it has shown what it would send, and sends nothing")


class FedkeepClientApp(ClientApp):
    """A ClientApp whose training is fedkeep's; an app's own evaluation and queries can be added as usual."""

    node: Node

    def train(self, action: str = "default", **kwargs: Any) -> Any:
        """Leave an app's own training aside, and say so: fedkeep's stands in its place."""
        if action != "default" or "train.default" not in self._registered_funcs:
            return super().train(action, **kwargs)
        log.warning("this app's own training function is not used: fedkeep trains in its place")
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

    `method` is one of `fedkeep.methods`, or its name; the run's config may say another (`method.name`, `method.beta`).
    `model_fn()` makes the model. `data_fn(context)` returns this node's own examples: (x, y), a torch DataLoader or
    data set of such, or a data set of `fedkeep.data` whose training part they are. Which client this node is, its
    config says: `client-id`. So it does where state is kept (`state-dir`), on which device it computes (`device`), and
    which methods it takes part in (`methods`). `mods` are Flower's, around training. What leaves the node is what the
    method's `finish` uploads, and with `report_loss` the mean training loss.
    """
    app = FedkeepClientApp()
    app.node = node = Node(method, model_fn, data_fn, criterion, report_loss)
    app.query(messages.QUERY)(node.query)
    app.train(mods=mods)(node.train)
    return app


def _checked(given: Any) -> Dataset:
    """Check arrays as a data set's are; they stand in for its test part too, which nobody looks at."""
    if hasattr(given, "dataset"):  # a torch DataLoader: its batches are made anew, as the plan says
        given = given.dataset
    try:
        x, y = _gathered(given) if hasattr(given, "__getitem__") and not isinstance(given, tuple | list) else given
    except (TypeError, ValueError):
        raise DataError(f"data_fn must return (x, y) or a fedkeep.data.Dataset, not {type(given).__name__}") from None
    if not len(y):
        return Dataset(x, torch.zeros(0, dtype=torch.long), x, torch.zeros(0, dtype=torch.long), 0)
    n_classes = max(2, int(torch.as_tensor(y).max()) + 1)
    return from_arrays(x, y, x, y, n_classes=n_classes)


def _gathered(examples: Any) -> tuple[Any, Any]:
    """Read a torch data set of (x, y) pairs, or of dicts with a label, to its end."""
    batch = default_collate([examples[k] for k in range(len(examples))])
    if not isinstance(batch, dict):
        x, y = batch
        return x, y
    label = next((key for key in ("label", "labels", "target", "y") if key in batch), None)
    if label is None:
        raise DataError(f"an example holds {', '.join(map(str, batch))}, and no label, labels, target or y")
    rest = {key: value for key, value in batch.items() if key != label and isinstance(value, Tensor)}
    return (rest if len(rest) > 1 else next(iter(rest.values()))), batch[label]


def _check(task: Task, examples: Examples, ask: TrainRequest) -> None:
    """Refuse a model or labels that do not fit the federation."""
    if (found := messages.constants(task)) != ask.constants:
        raise ModelError(
            f"this node's model differs from the server's in what is not trained (frozen weights, buffers): {found} "
            f"against {ask.constants}; both must make it alike, with the same torch and the same files"
        )
    worst = int(examples.y.max())
    if worst >= ask.n_classes:
        raise DataError(f"this node holds a label {worst}, but the federation has classes 0 to {ask.n_classes - 1}")
