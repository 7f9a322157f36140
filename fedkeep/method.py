"""The contract. A method is written once, as pure functions on trees, and runs in every runtime.

The base class *is* FedAvg; a method overrides only what its paper changes. No method knows which runtime calls it,
and no runtime knows a method's name.

What the hooks are given:

- `task`: the model as functions, the loss, the numbers of classes and clients, the server's public set, and for a
  server that trains: the clients' optimiser and the learning rate of a round, `task.lr(round)`.
- `server`: what the server keeps between rounds; `shared`: what it sends to every client of a round.
- `client`: what one client keeps between its visits; `local`: what `prepare` made of it for this round.
- `facts`: what the runtime knows of a client this round, as tensors in the weights' dtype: `n` examples, `steps`,
  `effective_steps` (see `optim`), `label_counts` [C], `lr`.
- `batch`: `x`, `y`, `mask` (False: padding), `note` (from `annotate`), `drawn` (the examples `draw` named); in
  `measure` also `place`, counting the client's examples in a random order, so that a method can stop at some number.
- `cohort`: the ids, the round (from 1) and a seed, nothing else. Whatever else the server uses of a client, its
  weight n too, is in that client's upload. So what a method discloses is read off its trees, not claimed.

Client hooks are pure and of fixed shape: no `.item()`, no boolean indexing, no sizes that depend on data. Server
hooks are ordinary Python.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import numbers
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fedkeep import tree
from fedkeep.errors import MethodError
from fedkeep.losses import masked_mean
from fedkeep.task import Task
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

HOOKS = (
    "init_server", "broadcast", "aggregate", "init_client", "start", "prepare", "annotate", "draw", "loss", "correct",
    "measure", "finish", "personal",
)  # fmt: skip


@dataclass(frozen=True)
class Cohort:
    """The clients of a round, in the order of the uploads' leading axis."""

    ids: tuple[int, ...]
    round: int
    seed: int


@dataclass(frozen=True)
class Hyper:
    """What is known of a hyperparameter beside its default; the contract suite uses the last three.

    At `neutral` the method equals FedAvg. At `other` the weights must come out differently than at the default,
    the method's other fields being as in `within`.
    """

    help: str
    low: float | None = None
    above: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] | None = None
    whole: bool = False
    neutral: Any = None
    other: Any = None
    within: dict[str, Any] = field(default_factory=dict)

    def check(self, method: str, name: str, value: Any) -> None:
        """Raise unless the value is one of the choices, or a number within the bounds."""
        if self.choices is not None:
            if not any(value is c or (type(value) is type(c) and value == c) for c in self.choices):
                listing = ", ".join(repr(c) for c in self.choices)
                raise MethodError(f"{method}: {name} must be one of {listing}, not {value!r}")
            return
        kind = numbers.Integral if self.whole else numbers.Real
        number: Any = math.nan if isinstance(value, bool) or not isinstance(value, kind) else value
        bounds = [
            f"of at least {self.low:g}" if self.low is not None else "",
            f"above {self.above:g}" if self.above is not None else "",
            f"of at most {self.high:g}" if self.high is not None else "",
        ]
        ok = (
            math.isfinite(number)
            and (self.low is None or number >= self.low)
            and (self.above is None or number > self.above)
            and (self.high is None or number <= self.high)
        )
        if not ok:
            wanted = " ".join(["a whole number" if self.whole else "a number", *filter(None, bounds)])
            raise MethodError(f"{method}: {name} must be {wanted}, not {value!r}")


def hyper(default: Any, help: str, **known: Any) -> Any:
    """Declare a hyperparameter: a dataclass field that says what it means and how it is tested."""
    return field(default=default, metadata={"hyper": Hyper(help, **known)})


@dataclass(frozen=True)
class FedAvg:
    """FedAvg: average the clients' weights by their numbers of examples.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
    """

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__.lower()
        for known in vars(cls):
            close = difflib.get_close_matches(known, HOOKS, n=1, cutoff=0.8)
            if close and close[0] != known:
                log.warning(
                    "%s.%s is not a hook and will not be called; did you mean %s?", cls.__name__, known, close[0]
                )

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if "hyper" in f.metadata:
                f.metadata["hyper"].check(self.name, f.name, getattr(self, f.name))

    # The server

    def init_server(self, task: Task, params: Tree) -> Tree:
        """Make what the server keeps: always "params", and whatever else. Refuse here what is missing."""
        return {"params": params}

    def broadcast(self, server: Tree) -> Tree:
        """Choose what goes to every client: always "params"."""
        return {"params": server["params"]}

    def aggregate(self, task: Task, server: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """Make the next server tree of the uploads, which are stacked on a leading client axis."""
        return {**server, "params": tree.mean(uploads["params"], uploads["n"])}

    # The client

    def init_client(self, task: Task, params: Tree) -> Tree:
        """Make a client's state at its first visit, when the global weights are `params`."""
        return {}

    def start(self, shared: Tree, client: Tree) -> Tree:
        """Choose the weights at which local training starts."""
        return shared["params"]  # type: ignore[no-any-return]

    def prepare(self, task: Task, shared: Tree, client: Tree, facts: Tree) -> Tree:
        """Make what the hooks below need this round: `local`."""
        return {}

    def annotate(self, task: Task, shared: Tree, local: Tree, x: Any, y: Tensor) -> Tree:
        """Say something of each example that is constant within a round: a teacher's logits, features, a weight."""
        return {}

    def draw(
        self, task: Task, shared: Tree, facts: Tree, y: Tensor, valid: Tensor, noise: Tensor, note: Tree
    ) -> tuple[Tensor, Tensor] | None:
        """Name some of the client's own examples for the round: (index [D], weight [D]).

        `noise` is a uniform number per example, `valid` is False in padding. The loss then finds them, with their
        weight and note and never augmented, in `batch["drawn"]`.
        """
        return None

    def loss(self, task: Task, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tensor:
        """Return the scalar that a local step descends."""
        z = task.apply(params, batch["x"], train=True)
        return masked_mean(task.criterion(z, batch["y"]), batch["mask"])

    def correct(self, grads: Tree, params: Tree, shared: Tree, local: Tree) -> Tree:
        """Change the gradient, before clipping and momentum."""
        return grads

    def measure(self, task: Task, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tree:
        """Sum something over a batch, after training; the sums over one pass reach `finish`."""
        return {}

    def finish(
        self, shared: Tree, params: Tree, local: Tree, client: Tree, facts: Tree, measured: Tree
    ) -> tuple[Tree, Tree]:
        """Return (upload, the client's next state)."""
        return {"params": params, "n": facts["n"]}, client

    def personal(self, shared: Tree, client: Tree) -> Tree:
        """Choose the weights this client would use for itself."""
        return shared["params"]  # type: ignore[no-any-return]

    # What the runtimes ask

    @classmethod
    def uses(cls, hook: str) -> bool:
        """Say whether this method overrides a hook; engines skip the passes that nobody asked for."""
        return getattr(cls, hook) is not getattr(FedAvg, hook)

    @classmethod
    def hyperparameters(cls) -> dict[str, Hyper]:
        """Return the declared hyperparameters by name."""
        return {f.name: f.metadata["hyper"] for f in dataclasses.fields(cls) if "hyper" in f.metadata}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the hyperparameters' defaults by name."""
        return {f.name: f.default for f in dataclasses.fields(cls) if "hyper" in f.metadata}

    def described(self) -> dict[str, Any]:
        """Return the method's name and the values of its hyperparameters, as plain data."""
        return {"name": self.name, **{name: getattr(self, name) for name in self.hyperparameters()}}
