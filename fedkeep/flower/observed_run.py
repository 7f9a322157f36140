"""Run folder of a federation that fedkeep observes and does not train: a user's own Flower app."""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flwr
import numpy as np
import torch

from fedkeep import forgetting, tree
from fedkeep._util.structure import is_own, structure_hash
from fedkeep._util.text import clip
from fedkeep._util.toml import parse_toml
from fedkeep.engine import provenance
from fedkeep.errors import RunError
from fedkeep.runs.client_store import ClientStore
from fedkeep.runs.experiment_file import OBSERVED
from fedkeep.runs.files import EXPERIMENT, fingerprint, is_there, to_toml
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.history import History, Record
from fedkeep.runs.reading import load_run
from fedkeep.runs.server_state import ServerState
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

_IDENTITY = ("method", "model", "data", "seed", "train")  # the tables that a continued run must have in common
_HASHES = ("model", "structure", "test", "algorithm", "strategy")  # and the entries of `made_by`
_SECRET = re.compile(r"token|secret|passw|credential|api_?key", re.IGNORECASE)  # attributes that are not recorded


class ObservedRun:
    """The records of a user's own federation, in a run folder from the untrained model on.

    The global model of the last rounds is saved with them, unless `keep` is 0. The strategy's own state is not: only
    the app knows it.
    """

    def __init__(self, path: Path, keep: int, resume: bool) -> None:
        self.path, self.keep = path, keep
        self.earlier = load_run(path) if is_there(path / EXPERIMENT) else None
        if self.earlier is not None:
            self._require_resumable(self.earlier, resume)
        self.state: ServerState | None = None
        self.resumed = 0  # the last round of an earlier process

    @property
    def ended(self) -> bool:
        """Whether the folder is closed, so that nothing is recorded any more."""
        return self.state is not None and self.state.folder is None

    @property
    def records(self) -> list[Record]:
        """The records so far."""
        return self.state.history.records if self.state else []

    @property
    def number(self) -> int:
        """The last recorded round."""
        return int(self.records[-1]["round"]) if self.records else 0

    def open(self, about: dict[str, Any], weights: Tree) -> None:
        """Create the folder, or continue the run in it; raise unless it is the same run, from the same weights on."""
        about = {**about, "keep": self.keep or None, "checkpoint_every": 1 if self.keep else None}
        history = History(about["method"]["name"], {**about["train"], "engine": OBSERVED}, about=about)
        state = ServerState({"params": weights}, history)
        if self.earlier is None:
            state.folder = RunFolder.create(self.path, about)
        else:
            self._require_same(self.earlier, about, weights)
            state.attach(RunFolder.open(self.path, self.keep), ClientStore(), torch.device("cpu"))
            self.resumed = state.round
            log.warning(
                "continuing %s after round %d; the strategy's own state is not part of it", self.path, state.round
            )
        self.state = state

    def add(self, record: Record, weights: Tree) -> None:
        """Write a round's record and, unless `keep` is 0, its global model: nobody can compute it again."""
        if self.state is None or self.state.folder is None:
            return
        self.state.server = {"params": weights} if weights else self.state.server
        self.state.round = record["round"]
        self.state.record(record)
        if self.keep:
            self.state.checkpoint()

    def finish(self) -> None:
        """Record that the app has ended as planned, and close the folder."""
        if self.state is not None and self.state.folder is not None:
            if self.keep:
                self.state.finish("finished")
            else:
                self.state.folder.finish(self.number, "finished")
            log.info("%d rounds are recorded; to see them: fedkeep report %s", self.number, self.path)
        self.close()

    def close(self) -> None:
        """Close the folder; nothing is recorded afterwards."""
        if self.state is not None:
            self.state.close()

    def summary(self) -> str:
        """Return the last round in one line."""
        record, classes = self.records[-1], [forgetting.class_accuracy(r["confusion"]) for r in self._tested()]
        text = f"round {record['round']}: {len(record.get('cohort', ()))} clients"
        if "confusion" in record:
            text += f", accuracy {float(forgetting.accuracy(record['confusion'])):.3f}"
            text += f", forgetting {forgetting.forgetting(np.stack(classes)):.3f}" if len(classes) > 1 else ""
        return text

    def _tested(self) -> list[Record]:
        return [r for r in self.records if r["round"] and "confusion" in r]

    def _require_resumable(self, earlier: History, resume: bool) -> None:
        reached = earlier.records[-1]["round"] if earlier.records else 0
        if earlier.settings.get("engine") != OBSERVED:
            reason = "of fedkeep's own, not of an observed app: choose another run_dir"
        elif earlier.ended:
            reason = f"that is finished after round {reached}: choose another run_dir"
        elif not resume:
            reason = f"that reached round {reached}: choose another run_dir, or continue it with resume=True"
        elif not earlier.params:
            reason = "without a saved model to continue from: choose another run_dir"
        else:
            return
        raise RunError(f"{self.path} contains a run {reason}", key="run_dir", value=str(self.path))

    def _require_same(self, earlier: History, about: dict[str, Any], weights: Tree) -> None:
        """Raise unless a run is the same as the earlier one in the folder, and starts where that one ended."""
        ours, theirs = (_identity(table) for table in (parse_toml(to_toml(about).decode()), earlier.about))
        for key, value in ours.items():
            if theirs.get(key) != value:
                raise RunError(f"{self.path} contains a run with another {key}: choose another run_dir", key=key)
        saved = tree.flatten(earlier.params)
        same = saved.keys() == weights.keys() and all(
            saved[name].dtype == value.dtype and torch.equal(saved[name], value) for name, value in weights.items()
        )
        if not same:
            raise RunError(
                f"the app does not start from the weights of round {earlier.saved} in {self.path}: start it with "
                f"ArrayRecord(fedkeep.load_run({str(self.path)!r}).params), or choose another run_dir",
                key="initial_arrays",
                value=earlier.saved,
            )


def describe_run(
    strategy: Any, test: dict[str, Any], weights: Tree, settings: dict[str, Any], seed: int, label: str | None
) -> dict[str, Any]:
    """Return what is written to experiment.toml; `test` says which model is tested, and on what."""
    kind = type(strategy)
    made_by = {
        **provenance.versions(),
        "flwr": flwr.__version__,
        "engine": OBSERVED,
        "model": fingerprint({name: np.array(w.shape) for name, w in weights.items()}),
        "init": fingerprint(weights),
        "algorithm": structure_hash(kind) if is_own(kind) else None,
        **test["made_by"],
        "strategy": plain_settings(strategy),
    }
    return {
        "seed": seed,
        "label": label,
        "method": plain_settings(strategy, defaults=False),
        "model": test["model"],
        "data": test["data"],
        "split": {"kind": "the app's clients"},
        "train": settings,
        "made_by": made_by,
    }


def plain_settings(strategy: Any, defaults: bool = True) -> dict[str, Any]:
    """Return the name of a strategy's class and those of its public attributes that are plain values.

    A strategy that it wraps, as Flower's for differential privacy do, is a table of its own. Without `defaults`, only
    the arguments of its class that have another value than by default, and the attributes that a class of the user's
    own adds.

    >>> from flwr.serverapp.strategy import FedProx
    >>> plain_settings(FedProx(proximal_mu=0.1), defaults=False)
    {'proximal_mu': 0.1, 'name': 'FedProx'}
    """
    kind = type(strategy)
    found: dict[str, Any] = {}
    arguments = {name: p.default for cls in reversed(kind.__mro__) for name, p in _arguments(cls)}
    for name, value in sorted(getattr(strategy, "__dict__", {}).items()):
        if name == "strategy" and hasattr(value, "__dict__"):
            found[name] = plain_settings(value, defaults)
        elif name.startswith("_") or _SECRET.search(name) or not is_plain(value):
            continue
        elif defaults or (arguments[name] != value if name in arguments else is_own(kind)):
            found[name] = clip(value, 200) if isinstance(value, str) else value
    return {**found, "name": kind.__name__}


def _arguments(kind: type) -> list[tuple[str, inspect.Parameter]]:
    """Return the arguments that a class itself adds to those of its bases, or changes."""
    init = vars(kind).get("__init__")
    return list(inspect.signature(init).parameters.items()) if inspect.isfunction(init) else []


def is_plain(value: Any) -> bool:
    """Return whether an experiment file can hold a value: a flag, a number of 64 bits that is finite, or a text."""
    if isinstance(value, int):
        return abs(value) < 2**63
    return isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))


def _identity(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two parts of one run have in common; the number of rounds may differ."""
    tables = {key: about.get(key) for key in _IDENTITY}
    train = {key: value for key, value in about["train"].items() if key != "rounds"}
    return {**tables, "train": train, **{f"made_by.{key}": about["made_by"].get(key) for key in _HASHES}}
