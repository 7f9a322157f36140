"""Mutated requests of a server at a node: each is answered, or refused with an error of fedkeep's own."""

from __future__ import annotations

import functools
import json
import logging
import random
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from support.flower_grid import MemoryGrid, SuperNode, node
from support.problems import three_clients

import fedkeep as fk
from fedkeep.errors import FedkeepError
from fedkeep.flower import Strategy
from fuzz import _mutations
from fuzz.wire import METHODS, _small

FIELDS = (
    "version",
    "run",
    "round",
    "client",
    "state",
    "lr",
    "n-clients",
    "n-classes",
    "constants",
    "method",
    "settings",
)


@functools.cache
def _node(name: str) -> tuple[SuperNode, Message]:
    """Return a node, and a request that it answers."""
    problem, method = _small(three_clients()), fk.methods.get(name)()
    strategy = Strategy(
        method, lambda: problem.model, num_clients=3, data_fn=lambda: problem.data, patience=0.01, **problem.settings
    )
    one = node(problem, method, 1, **{"max-epochs": 2})
    grid = MemoryGrid([node(problem, method, 0), one, node(problem, method, 2)])
    sent = strategy.configure_train(1, None, {}, grid)
    return one, next(m for m in sent if m.content["fedkeep"]["client"] == 1)


def try_one(seed: int, folder: Path) -> bool:
    """Send a mutated request to a node; return whether it was answered."""
    rng = random.Random(seed)
    one, request = _node(rng.choice(METHODS))
    logging.disable(logging.CRITICAL)
    try:
        changed = _mutated(request, rng)
        if changed is None:
            return False
        config: dict[str, Any] = {**one.config, "state-dir": str(folder)} if rng.random() < 0.5 else one.config
        one.app(changed, Context(1, 101, config, RecordDict(), {}))
    except FedkeepError:
        return False
    finally:
        logging.disable(logging.NOTSET)
    outside = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert not outside, f"a node wrote {outside}"
    return True


def _mutated(request: Message, rng: random.Random) -> Message | None:
    """Return a mutated request; None if it is not a message, which a node never gets to see."""
    if rng.random() < 0.5:
        try:
            changed = _mutations.mutate(request, rng)()
            usable = isinstance(changed, Message) and isinstance(changed.content, RecordDict)
        except Exception:
            return None
        return changed if usable and changed.metadata.message_type == "train" else None
    changed = Message(_mutations.copy_records(request.content), 101, "train")
    config = changed.content.config_records.get("fedkeep", ConfigRecord())
    if rng.random() < 0.5:
        config[rng.choice(FIELDS)] = _mutations.value(rng)
    else:
        config["settings"] = _settings(config.get("settings"), rng)
    changed.content["fedkeep"] = config
    changed.metadata.__dict__["_message_id"] = "request"
    return changed


def _settings(text: Any, rng: random.Random) -> str:
    """Return other settings as JSON, or something that is nearly JSON."""
    if rng.random() < 0.3:
        return _mutations.flip(str(text).encode(), rng).decode("latin-1")
    values = json.loads(text) if isinstance(text, str) and text.startswith("{") else {}
    wrong = [_mutations.number(rng), _mutations.text(rng), None, [], {}, {"crop": 10**9}, [[]], True]
    values[rng.choice([*values, "x", "device", "rounds"])] = rng.choice(wrong)
    return json.dumps(values)
