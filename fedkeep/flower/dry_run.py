"""What would leave a node, found out by training once without a server, before it takes part."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict

from fedkeep import tree
from fedkeep._util.json import flatten
from fedkeep.data.augment import InputPipeline
from fedkeep.engine import device
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.flower import messages, update_checks
from fedkeep.flower.client import Examples, FedkeepClientApp, Node
from fedkeep.flower.messages import TrainRequest
from fedkeep.task import Public

_PAIR = r"""([\w.-]+)=("[^"]*"|'[^']*'|[^\s"']+)"""

MEANS = {  # of what the methods of the registry upload
    "params": "the weights after local training; examples can in part be rebuilt from them",
    "n": "how many examples this node holds",
    "tau": "how many steps it took",
    "dc": "how its mean gradient differs from the others' (SCAFFOLD's control variate)",
    "u": "which weights its examples depend on (FedCurv's Fisher information)",
    "v": "the same, times the weights",
    "r": "how often it has taken part",
    "mu": "how many examples of each class this node holds",
}


@dataclass(frozen=True)
class DryRun:
    """A node's upload, as it would be."""

    method: str
    client: int
    examples: int
    upload: update_checks.TreeSpec
    nbytes: int
    state: update_checks.TreeSpec
    extra: tuple[str, ...]


def dry_run_app(folder: Path, node_config: str, run_config: str) -> DryRun:
    """Do the dry run of the app in a folder, with configs as Flower's command line takes them."""
    node, config = load_app(folder)
    return inspect_node(
        node, Context(0, 0, parse_config(node_config), RecordDict(), {**config, **parse_config(run_config)})
    )


def inspect_node(node: Node, context: Context, epochs: int = 1) -> DryRun:
    """Train once on this node's own examples, from a model of its own, and look at what would be sent.

    What the server alone holds is stood in for: its public examples by this node's, with made-up labels.
    """
    given = {key: value for key, value in context.run_config.items() if key.startswith("train.") or key == "seed"}
    here = str(context.node_config.get("device", "auto"))
    settings = replace(messages.chosen_settings({}, given), epochs=epochs, device=here)
    method = messages.chosen_method(node.method, context.run_config)
    place = device.resolve_device(settings.device)
    examples = Examples.of(_own(node, context), settings, place)
    if not len(examples.y):
        raise ConfigError("this node has no examples: it would be left out of every round")
    classes = _classes(node, settings, examples, place)
    public = _stand_in(examples, examples.inputs.without_augmentation, classes)
    clients = int(context.run_config.get("num-clients", 2))
    task = node.task(settings, classes, clients, public, place)
    shared = method.broadcast(method.init_server(task, task.init))
    task.public = None
    ask = TrainRequest("0" * 32, 1, node.client_id(context), 0, settings.lr, clients, classes, "", "", "")
    trained, _ = node.train_one(method, task, examples, settings, shared, ask, None)
    return DryRun(
        method.name,
        ask.client,
        len(examples.y),
        update_checks.tree_spec(trained.upload),
        tree.nbytes(trained.upload),
        update_checks.tree_spec(trained.client),
        ("loss: the mean training loss",) if node.report_loss else (),
    )


def format_dry_run(seen: DryRun) -> str:
    """Say it for people."""
    lines = [f"{seen.method}, client {seen.client}: what would leave this node in each round it takes part in"]
    width = max(len(path) for path, _, _ in seen.upload)
    for path, shape, dtype in seen.upload:
        lines.append(f"  {path:<{width}}  {'x'.join(map(str, shape)) or 'a number':<12} {dtype}")
    lines.append(f"  in all {seen.nbytes:,} bytes, besides the round's and the client's number")
    lines += [f"  {line}" for line in seen.extra]
    lines.append("What the server learns from it:")
    for name in dict.fromkeys(path.partition("/")[0] for path, _, _ in seen.upload):
        lines.append(f"  {name}: {MEANS.get(name, 'see the page of the method in docs/methods/')}")
    kept = ", ".join(dict.fromkeys(path.partition("/")[0] for path, _, _ in seen.state))
    lines.append(f"What stays here between rounds: {kept or 'nothing'}")
    return "\n".join(lines)


def as_dict(seen: DryRun) -> dict[str, Any]:
    """Say it for programs."""
    leaves = [{"name": path, "shape": list(shape), "dtype": dtype} for path, shape, dtype in seen.upload]
    return {**asdict(seen), "upload": leaves, "state": [path for path, _, _ in seen.state]}


def load_app(folder: Path) -> tuple[Node, dict[str, Any]]:
    """Return the node half of the app in a folder, and the app's config as Flower flattens it."""
    try:
        about = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
        module, _, name = about["components"]["clientapp"].partition(":")
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{folder} holds no Flower app: its pyproject.toml does not say [tool.flwr.app]") from error
    sys.path.insert(0, str(folder.resolve()))
    try:
        app = getattr(import_module(module), name, None)
    except Exception as error:
        raise ConfigError(f"the app's {module} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(app, FedkeepClientApp):
        raise ConfigError(f"{module}:{name} is not made by fedkeep.flower.client_app")
    return app.node, flatten(about.get("config", {}))


def parse_config(text: str) -> dict[str, Any]:
    """Read a config as Flower's command line takes it.

    >>> parse_config("client-id=0 state-dir='/var/lib/a b' dry-run=true")
    {'client-id': 0, 'state-dir': '/var/lib/a b', 'dry-run': True}
    """
    rest = re.sub(_PAIR, "", text).strip()
    if rest:
        raise ConfigError(f"{rest!r} is not key=value; write such as \"client-id=0 state-dir='/var/lib/node'\"")
    try:
        return {key: tomllib.loads(f"v = {value}")["v"] for key, value in re.findall(_PAIR, text)}
    except tomllib.TOMLDecodeError:
        raise ConfigError(f"a value in {text!r} cannot be read; words are quoted, such as key='word'") from None


def _own(node: Node, context: Context) -> Any:
    """Return what the app's data_fn returns, or say in one line why it cannot."""
    try:
        return node.data_fn(context)
    except FedkeepError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"the app's data_fn cannot read this node's examples: {type(error).__name__}: {why}"
        ) from error


def _classes(node: Node, settings: Any, examples: Examples, place: torch.device) -> int:
    """Ask the model how many classes it knows."""
    task = node.task(settings, 2, 1, None, place)
    one = torch.zeros(1, dtype=torch.long, device=place)
    with torch.no_grad():
        return int(task.apply(task.init, examples.inputs.without_augmentation(tree.take(examples.x, one))).shape[-1])


def _stand_in(examples: Examples, inputs: InputPipeline, classes: int) -> Public:
    """Make a public set of one example a class, out of the node's own."""
    y = torch.arange(classes, device=examples.y.device)
    x = inputs(tree.take(examples.x, y % len(examples.y)))
    return Public(x, y, x, y)
