"""How a run is run, whatever the method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from fedkeep import optim
from fedkeep._util.text import did_you_mean
from fedkeep.data.augment import Augment
from fedkeep.errors import FedkeepError

SMALL_MODEL = 100_000  # weights, up to which a CPU does best to stack a cohort, on one thread
ENGINES = ("auto", "loop", "stacked")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """How a run is run, whatever the method; the defaults are FedNTD's."""

    rounds: int = 50
    participation: float | int = 0.1
    epochs: int = 5
    batch_size: int = 50
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-5
    lr_decay: float = 0.99
    optimizer: str = "sgd"
    clip_norm: float | None = None
    augment: Augment | None = None
    eval_every: int = 1
    eval_local_every: int = 0
    seed: int = 0
    engine: str = "auto"
    device: str = "auto"
    dtype: str = "float32"  # of the weights; torch.float32 and the like will do as well
    autocast: str | None = None  # of the computation alone
    tf32: bool = True  # float32 products on a GPU may round their factors to TF32
    deterministic: bool = False
    at_once: int | None = None  # clients that are trained together; None: all that fit
    threads: int | None = None  # of the CPU; None: one for a small model, else as many as torch takes

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Make settings of plain data, as files and messages hold them.

        >>> Settings.of({"lr": 0.1, "augment": {"flip": True}}).augment
        Augment(crop=0, flip=True, cutout=0)
        """
        augment = given.get("augment")
        return cls(**{**given, "augment": Augment(**augment) if augment is not None else None})

    def __post_init__(self) -> None:
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), np.generic):
                object.__setattr__(self, f.name, value.item())
        for name in ("dtype", "autocast"):
            value = getattr(self, name)
            value = str(value).removeprefix("torch.") if value is not None else None
            valid = DTYPES if name == "dtype" else ("bfloat16", "float16")
            if value not in valid and not (name == "autocast" and value is None):
                raise FedkeepError(f"unknown {name} {value!r}: {did_you_mean(str(value), valid)}")
            object.__setattr__(self, name, value)
        for name, low in (
            ("rounds", 1),
            ("epochs", 1),
            ("batch_size", 1),
            ("eval_every", 1),
            ("eval_local_every", 0),
            ("seed", 0),
            *((name, 1) for name in ("at_once", "threads") if getattr(self, name) is not None),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise FedkeepError(f"{name} must be a whole number of at least {low}, not {value!r}")
        if self.seed >= 2**63:
            raise FedkeepError(f"seed must be below 2**63, not {self.seed}")
        for name in ("lr", "lr_decay", *(["clip_norm"] if self.clip_norm is not None else [])):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
                raise FedkeepError(f"{name} must be a number above 0, not {value!r}")
        for name in ("deterministic", "tf32"):
            if not isinstance(getattr(self, name), bool):
                raise FedkeepError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.augment is not None and not isinstance(self.augment, Augment):
            raise FedkeepError(f"augment must be a fedkeep.data.Augment, not {self.augment!r}")
        optim.make(self.optimizer, self.momentum, self.weight_decay)
        if self.engine not in ENGINES:
            raise FedkeepError(f"unknown engine {self.engine!r}: {did_you_mean(self.engine, ENGINES)}")

    def lr_in(self, round: int) -> float:
        """Return the learning rate of a round; rounds count from 1."""
        return self.lr * self.lr_decay ** (round - 1)

    def due(self, every: int, round: int) -> bool:
        """Say whether what is done every so many rounds is done in this one; in the last round it always is."""
        return bool(every) and (round % every == 0 or round == self.rounds)

    def cohort_size(self, n_clients: int) -> int:
        """Turn participation, a share or a number, into the size of a cohort."""
        share = self.participation
        if isinstance(share, bool) or not isinstance(share, int | float) or not share > 0:
            raise FedkeepError(f"participation must be a share in (0, 1] or a number of clients, not {share!r}")
        if isinstance(share, int):
            if share > n_clients:
                raise FedkeepError(f"participation = {share} clients a round, but there are {n_clients}")
            return share
        if share > 1:
            raise FedkeepError(f"participation = {share}: a share is at most 1.0; a number of clients is a whole one")
        return max(1, round(share * n_clients))
