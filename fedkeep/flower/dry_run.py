"""Dry run of a node: train once without a server, and show what the node would send."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict
from flwr.common.config import flatten_dict, parse_config_args

from fedkeep import tree
from fedkeep._util.text import one_line
from fedkeep._util.toml import parse_toml
from fedkeep.data.augment import InputPipeline
from fedkeep.engine import device
from fedkeep.engine.server_hooks import broadcast_to
from fedkeep.engine.settings import Settings
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.flower import messages, update_checks
from fedkeep.flower.client import Examples, FedkeepClientApp, Node
from fedkeep.flower.messages import TrainRequest
from fedkeep.task import Public

MEANINGS = {  # of what the methods of the registry upload
    "params": "the weights after local training; examples can be partly reconstructed from them",
    "n": "the number of examples on this node",
    "tau": "the number of local steps",
    "dc": "how its mean gradient differs from the others' (SCAFFOLD's control variate)",
    "u": "which weights its examples depend on (FedCurv's Fisher information)",
    "v": "the same, multiplied by the weights",
    "r": "the number of rounds it has taken part in",
    "mu": "the number of examples of each class on this node",
    "dm": "how its mean logits of each class have changed (FedDistill+)",
    "dh": "of which classes it has got or lost its examples",
    "counts": "the number of examples of each class on this node",
    "centroids": "the mean features of each class on this node, of the trained model (FedPAC)",
    "h": "the same before training, times the share of the class",
    "V": "how much its features vary, divided by its number of examples",
    "w": "how much each other client's model helps on its examples: which clients have similar data (FedFOMO)",
}


@dataclass(frozen=True)
class DryRun:
    """What a node would upload, and the state it would keep."""

    method: str
    client: int
    examples: int
    upload: update_checks.TreeSpec
    nbytes: int
    state: update_checks.TreeSpec
    extra: tuple[str, ...]
    reveals: str = ""


def dry_run_app(folder: Path, node_config: str, run_config: str) -> DryRun:
    """Run the app in a folder on a dry run, with configs as on Flower's command line."""
    node, app_config = load_app(folder)
    own = parse_config("--node-config", node_config)
    config = {**app_config, **parse_config("--run-config", run_config)}
    return inspect_node(node, Context(0, 0, own, RecordDict(), config))


def inspect_node(node: Node, context: Context, epochs: int = 1) -> DryRun:
    """Train once on this node's own examples, from a newly built model, and return what would be sent.

    The server's public examples are replaced by this node's, with made-up labels.
    """
    client = node.client_id(context)
    train = {key: value for key, value in context.run_config.items() if key.startswith("train.") or key == "seed"}
    own_device = str(context.node_config.get("device", "auto"))
    settings = replace(messages.resolve_settings({}, train), epochs=epochs, device=own_device)
    method = messages.resolve_method(node.method, context.run_config)
    target = device.resolve_device(settings.device)
    examples = Examples.load(_load_data(node, context), settings, target)
    if not len(examples.y):
        raise ConfigError("this node has no examples: it would be skipped in every round", key="data_fn")
    classes = _count_classes(node, settings, examples, target)
    public = _substitute_public(examples, examples.inputs.without_augmentation, classes)
    clients = max(int(context.run_config.get("num-clients", 2)), client + 1)
    task = node.task(settings, classes, clients, public, target)
    task.find_features(examples.sample(2))
    server = method.init_server(task, task.init)
    shared, sent = method.broadcast(server), broadcast_to(method, server, client)
    task.public = None
    request = TrainRequest("0" * 32, 1, client, 0, settings.lr, clients, classes, constants="", method="", settings="")
    trained, _ = node.train_one(method, task, examples, settings, shared, request, None, sent)
    return DryRun(
        method.name,
        client,
        len(examples.y),
        tree.spec(trained.upload),
        tree.nbytes(trained.upload),
        tree.spec(trained.client),
        ("loss: the mean training loss",) if node.report_loss else (),
        method.reveals,
    )


def format_dry_run(result: DryRun) -> str:
    """Format as text."""
    lines = [f"{result.method}, client {result.client}: what this node would send in each round it takes part in"]
    width = max(len(path) for path, _, _ in result.upload)
    for path, shape, dtype in result.upload:
        lines.append(f"  {path:<{width}}  {'x'.join(map(str, shape)) or 'scalar':<12} {dtype}")
    lines.append(f"  {result.nbytes:,} bytes in all, plus the numbers of the round and the client")
    lines += [f"  {line}" for line in result.extra]
    lines.append("What the server learns from it:")
    for name in dict.fromkeys(path.partition("/")[0] for path, _, _ in result.upload):
        lines.append(f"  {name}: {MEANINGS.get(name, 'see the page of the method in docs/methods/')}")
    if result.reveals:
        lines.append(f"What other clients can learn from it: {result.reveals}")
    state = ", ".join(dict.fromkeys(path.partition("/")[0] for path, _, _ in result.state))
    lines.append(f"What stays on this node between rounds: {state or 'nothing'}")
    return "\n".join(lines)


def as_dict(result: DryRun) -> dict[str, Any]:
    """Return as JSON-compatible data."""
    leaves = [{"name": path, "shape": list(shape), "dtype": dtype} for path, shape, dtype in result.upload]
    return {**asdict(result), "upload": leaves, "state": [path for path, _, _ in result.state]}


def load_app(folder: Path) -> tuple[Node, dict[str, Any]]:
    """Return the node of the app in a folder, and the app's config as Flower flattens it."""
    try:
        about = parse_toml((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
        module, _, name = about["components"]["clientapp"].partition(":")
    except (OSError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{folder} is not a Flower app: it has no pyproject.toml with a clientapp in [tool.flwr.app.components]",
            key="app",
            value=str(folder),
        ) from error
    try:
        config = flatten_dict(about.get("config", {}))
    except ValueError as error:
        raise ConfigError(
            f"[tool.flwr.app.config] of {folder} is invalid: {one_line(error)}", key="tool.flwr.app.config"
        ) from error
    sys.path.insert(0, str(folder.resolve()))
    try:
        app = getattr(import_module(module), name, None)
    except Exception as error:
        raise ConfigError(
            f"the app's module {module} cannot be imported: {type(error).__name__}: {one_line(error)}",
            key="clientapp",
            value=module,
        ) from error
    if not isinstance(app, FedkeepClientApp):
        raise ConfigError(
            f"{module}:{name} is not a fedkeep.flower.client_app", key="clientapp", value=f"{module}:{name}"
        )
    return app.node, dict(config)


def parse_config(option: str, text: str) -> dict[str, Any]:
    """Return the config in an option of Flower's command line, parsed by Flower itself.

    Flower ignores text that is not key=value; here it raises an error.

    >>> parse_config("--node-config", "client-id=0 state-dir='/var/lib/a b' dry-run=true")
    {'client-id': 0, 'state-dir': '/var/lib/a b', 'dry-run': True}
    """
    try:
        if not text.endswith(".toml") and any("=" not in word for word in shlex.split(text)):
            raise ValueError
        return dict(parse_config_args([text]))
    except Exception as error:  # of click, TOML, shlex or the file system
        raise ConfigError(
            f"{option} must be key=value pairs, strings in quotes, such as \"client-id=0 device='cpu'\", not {text!r}",
            key=option,
            value=text,
        ) from error


def _load_data(node: Node, context: Context) -> Any:
    """Return what the app's data_fn returns; if it fails, raise an error of one line."""
    try:
        return node.data_fn(context)
    except FedkeepError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the app's data_fn failed on this node: {type(error).__name__}: {one_line(error)}",
            key="data_fn",
            value=type(error).__name__,
        ) from error


def _count_classes(node: Node, settings: Settings, examples: Examples, target: torch.device) -> int:
    """Return the number of logits that the model returns."""
    task = node.task(settings, 2, 1, None, target)
    with torch.no_grad():
        return int(task.apply(task.init, examples.sample(1)).shape[-1])


def _substitute_public(examples: Examples, inputs: InputPipeline, classes: int) -> Public:
    """Make a public set of one example per class, from the node's own examples."""
    y = torch.arange(classes, device=examples.y.device)
    x = inputs(tree.take(examples.x, y % len(examples.y)))
    return Public(x, y, x, y)
