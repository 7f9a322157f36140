"""What a run is: the experiment without its seed, the problem that it solves, and where its data came from.

An experiment file says everything but the contents of the data, so its tables are compared, without seeds. A run from
Python has no such tables: its model, criterion, data and split are known by the hashes in `made_by`.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedkeep import methods
from fedkeep._util.validate import require_whole
from fedkeep.data import Augment
from fedkeep.engine.settings import DEFAULTS
from fedkeep.errors import RunError
from fedkeep.runs.experiment_file import OBSERVED
from fedkeep.runs.history import History
from fedkeep.runs.label_counts import label_counts_of

# The settings that define the task, not how a method solves it. Forgetting depends on which rounds are evaluated.
PROBLEM_SETTINGS = ("rounds", "participation", "eval_every", "cohorts", "reductions")
NAME_KEYS = {"method": "name", "model": "name", "data": "source", "split": "kind"}
_SAME_SKEW = 0.1  # how far the label skew of two random splits of one kind may differ
_UNKNOWN = dict.fromkeys(DEFAULTS)


@dataclass(frozen=True)
class Origin:
    """The hashes that may differ between the seeds of one experiment; None where a run does not record one."""

    data: str | None
    split: str | None
    init: str | None  # the initial weights, of a model from Python
    split_seed: int | None  # of an experiment file, if it is not the run's seed


@dataclass(eq=False)
class Identity:
    """What one run is, read from its history."""

    history: History

    def check(self) -> None:
        """Raise unless the experiment file has the tables and names that comparisons need."""
        about = self.history.about
        names = {f"{key}.{name}": about[key].get(name, "") for key, name in NAME_KEYS.items()}
        for key, value in {**names, "label": about.get("label", "")}.items():
            if not isinstance(value, str):
                raise RunError(f"{key} in its experiment file is not a text", key=key, value=value)
        for key, value in {"train.rounds": about["train"]["rounds"], "seed": about["seed"]}.items():
            require_whole(key, value, low=0, error=RunError)

    @property
    def from_file(self) -> bool:
        """Whether the run's tables define model and split completely."""
        about = self.history.about
        return "name" in about["model"] and "kind" in about["split"]

    @property
    def observed(self) -> bool:
        """Whether fedkeep only recorded the run, of a user's own app."""
        return bool(self.history.about.get("made_by", {}).get("engine") == OBSERVED)

    @cached_property
    def setting(self) -> dict[str, Any]:
        """The experiment without seeds, as tables; hashes stand for what tables cannot hold."""
        about = self.history.about
        made_by = about.get("made_by", {})
        setting = {key: _without_none(about[key]) for key in ("method", "model", "data", "split")}
        # what did not exist when the run was made had its default; of an observed run, fedkeep's defaults say nothing
        train = {**(_UNKNOWN if self.observed else DEFAULTS), "seed": None, **about["train"]}
        if train["cohorts"] is not None:  # a file: its contents count, not its name
            train["cohorts"] = made_by.get("cohorts", train["cohorts"])
        setting["train"] = _with_effect(train)
        if isinstance(augment := setting["train"].get("augment"), dict):
            setting["train"]["augment"] = {**asdict(Augment()), **augment}
        setting["method"] = methods.with_values_before(setting["method"])
        if (label := about.get("label")) is not None:
            setting = {"label": label, **setting}
        data, split = ({k: v for k, v in setting[key].items() if k != "seed"} for key in ("data", "split"))
        if split.get("kind") == "file" and "split" in made_by:
            split = {**split, "contents": made_by["split"]}
            split.pop("file", None)
        by_seed = "seed" in about["data"]  # the public part of the data depends on the seed, the test set does not
        if os.path.isabs(source := str(data.get("source", ""))):  # where the file lies is no part of an experiment
            data["source"] = os.path.basename(source)
        data |= _without_none({"contents": made_by.get("test" if by_seed else "data") or made_by.get("test")})
        model, criterion = dict(setting["model"]), {}
        if "path" in model:  # of files, whose contents count too
            model |= _without_none({"contents": made_by.get("pretrained")})
        own_code = made_by.get("code", {})
        if not self.from_file or "model" in own_code:
            hashes = {"shapes": "model", "structure": "structure", "layers": "layers"}
            model |= _without_none({key: made_by.get(name) for key, name in hashes.items()})
            criterion = _criterion(made_by) if not self.from_file else {}
        code = _without_none({"code": made_by.get("algorithm")})
        setting |= {"method": setting["method"] | code, "model": model, "data": data, "split": split}
        return setting | ({"criterion": criterion} if criterion else {})

    @cached_property
    def key(self) -> str:
        """Equal for runs of one experiment."""
        return _as_text(self.setting)

    @cached_property
    def problem(self) -> dict[str, Any]:
        """The problem that the run solves, as tables: data, split, and the settings that define the task."""
        train = {key: value for key, value in self.setting["train"].items() if key in PROBLEM_SETTINGS}
        return {"data": self.setting["data"], "split": self.setting["split"], "train": train}

    @cached_property
    def problem_key(self) -> str:
        """Equal for runs that solve the same problem."""
        return _as_text(self.problem)

    @cached_property
    def origin(self) -> Origin:
        """The hashes that may differ between seeds."""
        about = self.history.about
        made_by, seed = about.get("made_by", {}), about["split"].get("seed")
        init = None if self.from_file else made_by.get("init")
        return Origin(
            made_by.get("data"), made_by.get("split"), init, seed if self.from_file and seed != about["seed"] else None
        )

    @cached_property
    def split_shape(self) -> tuple[int, float, float] | None:
        """The number of clients, the mean examples per client, and the label skew; None if they are not recorded.

        The skew is how far a client's label distribution is from that of all clients: total variation, mean over
        clients.
        """
        table = label_counts_of(self.history)
        if table is None:
            return None
        counts = np.asarray(table["counts"], dtype=float)
        if not counts.sum():
            return None
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        distance = np.abs(shares - counts.sum(0) / counts.sum()).sum(1) / 2
        return table["clients"], float(counts.sum() / len(counts)), float(distance.mean())


def same_split_kind(one: Identity, other: Identity) -> bool:
    """Return whether the splits of two runs may be two random splits of one kind; True if that is not known."""
    if one.origin.split == other.origin.split or (one.from_file and other.from_file):
        return True
    a, b = one.split_shape, other.split_shape
    if a is None or b is None:
        return True
    return a[0] == b[0] and abs(a[1] - b[1]) <= 0.02 * max(a[1], b[1]) and abs(a[2] - b[2]) <= _SAME_SKEW


def _criterion(made_by: dict[str, Any]) -> dict[str, Any]:
    name, _, code = re.sub(r" at 0x[0-9a-fA-F]+", "", str(made_by.get("criterion", ""))).partition("#")
    return _without_none({"name": name or None, "code": code or None})


def _with_effect(train: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are used: no `hostile` for a plain mean, no `lr_decay` with a cosine, and so on."""
    unused = {
        "hostile": train["aggregation"] == "mean",
        "lr_decay": train["lr_schedule"] != "exponential",
        "dp_delta": train["dp_noise"] is None,
        "participation": train["cohorts"] is not None,
    }
    return _without_none({key: value for key, value in train.items() if not unused.get(key, False)})


def _without_none(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def _as_text(table: dict[str, Any]) -> str:
    return json.dumps(table, sort_keys=True, default=str)
