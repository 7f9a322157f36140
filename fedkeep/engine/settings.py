"""Settings of a run: everything about how it is run, whatever the method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike, fspath
from typing import Any, TypedDict, cast

import numpy as np
import torch

from fedkeep import optim
from fedkeep._util.text import format_value
from fedkeep._util.validate import require_bool, require_choice, require_number, require_whole
from fedkeep.data.augment import Augment
from fedkeep.data.federation_file import Cohorts, check_cohorts
from fedkeep.data.reductions import Reduction, check_reductions
from fedkeep.engine.lr_schedule import check_schedule, learning_rate
from fedkeep.errors import FedkeepError

SMALL_MODEL = 100_000  # weights, up to which a CPU is fastest with a stacked cohort on one thread
ENGINES = ("auto", "loop", "stacked")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
READ_OUTS = ("bias",)
AUTOCAST = ("bfloat16", "float16")
# Ways to aggregate, with the smallest cohort for a number f of hostile clients: factor * f + constant.
SMALLEST_COHORT = {
    "mean": (0, 0),
    "median": (2, 1),
    "trimmed_mean": (2, 1),
    "clip": (2, 1),
    "krum": (2, 3),
    "multi_krum": (2, 3),
}
_MOST = {"rounds": 10**9, "epochs": 10**5, "accumulate": 10**4, "threads": 1024}  # more would only exhaust memory


class SettingsDict(TypedDict, total=False):
    """The settings as keyword arguments, for editors and type checkers; `Settings` has their meaning and defaults."""

    rounds: int
    participation: float | int
    epochs: int
    batch_size: int
    drop_last: bool
    accumulate: int
    lr: float
    momentum: float
    weight_decay: float
    lr_decay: float
    lr_schedule: str
    lr_warmup: int
    optimizer: str
    clip_norm: float | None
    augment: Augment | None
    eval_every: int
    eval_local_every: int
    seed: int
    engine: str
    device: str
    dtype: str | torch.dtype
    autocast: str | torch.dtype | None
    tf32: bool
    deterministic: bool
    at_once: int | None
    threads: int | None
    aggregation: str
    hostile: int
    dp_clip: float | None
    dp_noise: float | None
    dp_delta: float
    cohorts: str | PathLike[str] | Sequence[Sequence[int]] | None
    reductions: Sequence[Reduction | Mapping[str, Any]] | None
    average_weights: float | int | None
    read_out: str | None


def default_weight_decay(optimizer: str) -> float:
    """Return the weight decay of clients that is not given."""
    return 0.0 if optimizer == "adam" else 1e-5


@dataclass(frozen=True, repr=False)
class Settings:
    """Settings of a run, shared by all methods; the defaults are FedNTD's.

    rounds: number of rounds.
    participation: clients per round: a share (float) or a number (int).
    epochs, batch_size: of local training; drop_last: leave out a last, smaller batch of an epoch, unless it is the only
    one (the order is new in every epoch, so other examples are left out each time).
    accumulate: parts into which a batch is divided to save memory; a step uses the sum of their gradients.
    lr: learning rate of the first round after the warm-up; lr_decay: its factor from round to round.
    lr_schedule: "exponential", or "cosine": half a cosine from lr towards 0 over all rounds, instead of lr_decay.
    lr_warmup: rounds at the start over which the learning rate rises to lr, in equal steps.
    optimizer ("sgd", "adam" or "adamw"), momentum, weight_decay: of the clients; for Adam and AdamW, momentum is beta1.
    weight_decay is 1e-5 by default, and 0 for Adam, whose steps do not depend on the size of a gradient: by any decay,
    weights without another gradient, such as embeddings of words that a client does not have, shrink by lr in a step.
    clip_norm: largest norm of a local gradient.
    augment: random augmentation, a `fedkeep.data.Augment`.
    eval_every: evaluate the global model every N rounds; eval_local_every: also the local models (0: never).
    seed: for the cohorts, batches and augmentation.
    engine: "auto", "loop" or "stacked"; device: "auto", "cpu", "cuda", "cuda:1".
    dtype: of the weights, a name or torch's dtype; autocast: dtype of the computation alone.
    tf32: float32 products on a GPU may round their factors to TF32; deterministic: torch's deterministic algorithms.
    at_once: clients trained together (None: all that fit).
    threads: of the CPU (None: one for a small model, else torch's number).
    aggregation: "mean", or against hostile clients "median", "trimmed_mean", "clip", "krum" or "multi_krum";
    hostile: how many clients of a cohort these assume to be hostile.
    dp_clip, dp_noise: differential privacy (None: none): the norm to which each client's upload is clipped, and the
    noise on the sum in multiples of that norm; dp_delta: the delta at which epsilon is computed.
    cohorts: the clients of every round, instead of random ones: a federation file, or one list of client ids per
    round. `participation` then has no effect.
    reductions: examples that clients lose during the run, `fedkeep.data.Reduction`s or dicts with their fields.
    average_weights: test and save the mean of the global weights over rounds, while clients start from the last ones:
    an exponential mean that keeps this share (float) from round to round, or the mean of so many rounds (int).
    read_out: "bias" tests and saves the model with the best bias per class, fitted on the public set after every round,
    while clients start from weights without it.
    """

    rounds: int = 50
    participation: float | int = 0.1
    epochs: int = 5
    batch_size: int = 50
    drop_last: bool = False
    accumulate: int = 1
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = cast(float, None)  # until `__post_init__` sets that of the optimizer
    lr_decay: float = 0.99
    lr_schedule: str = "exponential"
    lr_warmup: int = 0
    optimizer: str = "sgd"
    clip_norm: float | None = None
    augment: Augment | None = None
    eval_every: int = 1
    eval_local_every: int = 0
    seed: int = 0
    engine: str = "auto"
    device: str = "auto"
    dtype: str = "float32"
    autocast: str | None = None
    tf32: bool = True
    deterministic: bool = False
    at_once: int | None = None
    threads: int | None = None
    aggregation: str = "mean"
    hostile: int = 1
    dp_clip: float | None = None
    dp_noise: float | None = None
    dp_delta: float = 1e-5
    cohorts: str | Cohorts | None = None
    reductions: tuple[Reduction, ...] | None = None
    average_weights: float | int | None = None
    read_out: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """Build settings from data, as files and messages hold them.

        >>> Settings.of({"lr": 0.1, "augment": {"flip": True}}).augment
        Augment(crop=0, flip=True, cutout=0, padding='zeros')
        """
        augment = values.get("augment")
        return cls(**{**values, "augment": Augment(**augment) if augment is not None else None})

    def __post_init__(self) -> None:
        given: Any = self.weight_decay
        if given is None:
            object.__setattr__(self, "weight_decay", default_weight_decay(self.optimizer))
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), np.generic):
                object.__setattr__(self, f.name, value.item())
        self._set_cohorts()
        if self.reductions is not None:
            object.__setattr__(self, "reductions", check_reductions(self.reductions) or None)
        self._set_dtype("dtype", DTYPES)
        if self.autocast is not None:
            self._set_dtype("autocast", AUTOCAST)
        for name in ("rounds", "epochs", "batch_size", "accumulate", "eval_every"):
            require_whole(name, getattr(self, name), 1, _MOST.get(name))
        require_whole("eval_local_every", self.eval_local_every, 0)
        require_whole("seed", self.seed, 0, 2**63 - 1)
        for name in ("at_once", "threads"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name), 1, _MOST.get(name))
        for name in ("lr", "lr_decay"):
            require_number(name, getattr(self, name), above=0)
        check_schedule(self.lr_schedule, self.lr_warmup, self.rounds)
        if self.clip_norm is not None:
            require_number("clip_norm", self.clip_norm, above=0)
        for name in ("deterministic", "tf32", "drop_last"):
            require_bool(name, getattr(self, name))
        if self.augment is not None and not isinstance(self.augment, Augment):
            raise FedkeepError(
                f"augment must be a fedkeep.data.Augment, not {self.augment!r}", key="augment", value=self.augment
            )
        optim.make(self.optimizer, self.momentum, self.weight_decay)
        require_choice("engine", self.engine, ENGINES)
        require_choice("aggregation", self.aggregation, list(SMALLEST_COHORT))
        require_whole("hostile", self.hostile, 1)
        if self.average_weights is not None:
            self._check_average_weights()
        if self.read_out is not None:
            require_choice("read_out", self.read_out, READ_OUTS)
        self._check_privacy()

    def __repr__(self) -> str:
        defaults = {**DEFAULTS, "weight_decay": default_weight_decay(self.optimizer)}
        changed = {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    @property
    def private(self) -> bool:
        """Whether training is differentially private."""
        return self.dp_noise is not None

    @property
    def part_size(self) -> int | None:
        """How many examples of a batch are computed at a time; None: all of them."""
        return None if self.accumulate == 1 else -(-self.batch_size // self.accumulate)

    @property
    def plain_mean(self) -> bool:
        """Whether uploads are aggregated as they are: no robust averaging, no differential privacy."""
        return self.aggregation == "mean" and not self.private

    @property
    def smallest_cohort(self) -> int:
        """How many uploads a round needs at least, so that `aggregation` withstands the `hostile` ones."""
        factor, constant = SMALLEST_COHORT[self.aggregation]
        return factor * self.hostile + constant

    @property
    def depends_on_rounds(self) -> dict[str, str]:
        """Settings that make earlier rounds depend on the number of rounds, each with the reason.

        A run with one of them cannot be extended to more rounds.
        """
        reasons = {}
        if self.cohorts is not None:
            reasons["cohorts"] = "cohorts was given for this number of rounds"
        if self.lr_schedule == "cosine":
            reasons["lr_schedule"] = "the learning rate falls along a cosine that ends at the last round"
        return reasons

    def lr_in(self, round: int) -> float:
        """Return the learning rate of a round; rounds count from 1."""
        return learning_rate(round, self.rounds, self.lr, self.lr_schedule, self.lr_decay, self.lr_warmup)

    def due(self, every: int, round: int) -> bool:
        """Return whether something done every N rounds is due in this one: also in the last, never if N is 0."""
        return bool(every) and (round % every == 0 or round == self.rounds)

    def cohort_size(self, n_clients: int) -> int:
        """Return the number of clients in a round's cohort."""
        share = self.participation
        if isinstance(share, bool) or not isinstance(share, int | float) or not share > 0:
            raise FedkeepError(
                f"participation must be a share in (0, 1] or a number of clients, not {share!r}",
                key="participation",
                value=share,
            )
        if isinstance(share, int):
            if share > n_clients:
                raise FedkeepError(
                    f"participation = {share} clients per round, but there are {n_clients}",
                    key="participation",
                    value=share,
                )
            return share
        if share > 1:
            raise FedkeepError(
                f"participation = {share}: a share is at most 1.0; write a number of clients without decimals",
                key="participation",
                value=share,
            )
        return max(1, round(share * n_clients))

    def _check_average_weights(self) -> None:
        value = self.average_weights
        is_decay = isinstance(value, float) and 0 < value < 1
        is_window = isinstance(value, int) and 2 <= value <= 10**4
        if not (is_decay or is_window):
            raise FedkeepError(
                "average_weights must be a number above 0 and below 1 (the decay of an exponential mean), or a whole "
                f"number of at least 2 (rounds of a window, at most 10000), not {format_value(value)}",
                key="average_weights",
                value=value,
            )

    def _check_privacy(self) -> None:
        require_number("dp_delta", self.dp_delta, above=0, below=1)
        given = [name for name in ("dp_clip", "dp_noise") if getattr(self, name) is not None]
        if self.dp_clip is not None:
            require_number("dp_clip", self.dp_clip, above=0, high=1e9)
        if self.dp_noise is not None:
            require_number("dp_noise", self.dp_noise, low=1e-3, high=1e6)
        if len(given) == 1:
            missing = "dp_noise" if given == ["dp_clip"] else "dp_clip"
            raise FedkeepError(f"{given[0]} is set, but not {missing}: differential privacy needs both", key=missing)
        if self.private and self.aggregation != "mean":
            raise FedkeepError(
                f'aggregation = "{self.aggregation}" with differential privacy: the noise is computed for a mean, so '
                'use aggregation = "mean"; clipping already bounds what one client can do',
                key="aggregation",
                value=self.aggregation,
                valid=["mean"],
            )
        if self.private and self.cohorts is not None:
            raise FedkeepError(
                "cohorts cannot be given with differential privacy, whose noise is computed for cohorts of one size",
                key="cohorts",
            )
        if self.private and self.eval_local_every:
            raise FedkeepError(
                "eval_local_every records what single clients' models know, which differential privacy must not "
                "release: set it to 0",
                key="eval_local_every",
                value=self.eval_local_every,
                valid=[0],
            )

    def _set_cohorts(self) -> None:
        """Store a file as its path, and lists as tuples."""
        given: Any = self.cohorts
        if given is not None:
            cohorts = fspath(given) if isinstance(given, str | PathLike) else check_cohorts(given)
            object.__setattr__(self, "cohorts", cohorts)

    def _set_dtype(self, key: str, valid: Any) -> None:
        """Accept torch's dtypes too, and store the name."""
        name = str(getattr(self, key)).removeprefix("torch.")
        require_choice(key, name, list(valid))
        object.__setattr__(self, key, name)


DEFAULTS: dict[str, Any] = {f.name: getattr(Settings(), f.name) for f in fields(Settings)}
