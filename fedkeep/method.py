"""The contract of a method: written once, as pure functions on trees, and run by every runtime.

The base class *is* FedAvg. A method overrides the hooks that its paper changes. No method knows which runtime calls it,
and no runtime knows a method's name. docs/contract.md shows what a runtime does with the hooks.

Server hooks are ordinary Python. Client hooks are pure and of fixed shape: no `.item()`, no boolean indexing, no sizes
that depend on data. Their first argument is the `Visit`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedkeep import optim, tree
from fedkeep._util.hook_checks import check_hooks
from fedkeep._util.hyperparameters import Hyper, hyper
from fedkeep.bounds import Bound
from fedkeep.errors import MethodError
from fedkeep.losses import masked_mean
from fedkeep.task import Task
from fedkeep.tree import Tree
from fedkeep.visit import (
    Batch,
    ClientState,
    Cohort,
    Facts,
    Grads,
    Local,
    Note,
    Params,
    Sent,
    ServerTree,
    Shared,
    Upload,
    Visit,
)  # fmt: skip

__all__ = [
    "HOOKS", "NEEDS", "Batch", "Bound", "ClientState", "Cohort", "Facts", "FedAvg", "Grads", "Hyper", "Local", "Note",
    "Params", "Sent", "ServerTree", "Shared", "Upload", "Visit", "hyper",
]  # fmt: skip

# What a method may need of a run.
NEEDS: dict[str, str] = {
    "whole_batches": "batches that are not divided (`accumulate`), because its loss tracks sums",
    "real_inputs": "examples that are one tensor of real numbers, not tokens",
    "classifier": "a last layer that is linear and trained",
    "every_upload": "every client's upload, not only their mean (robust means, differential privacy)",
}

# The arguments of each hook after `self`.
HOOKS: dict[str, tuple[str, ...]] = {
    "init_server": ("task", "params"),
    "broadcast": ("server",),
    "broadcast_to": ("server", "client"),
    "aggregate": ("task", "server", "uploads", "cohort"),
    "hold_out": (),
    "frozen": ("task",),
    "centred_weights": ("task",),
    "init_client": ("task", "params"),
    "prepare": ("visit",),
    "refine": ("visit", "batch"),
    "refined": ("visit", "passes"),
    "start": ("visit",),
    "annotate": ("visit", "x", "y"),
    "select_examples": ("visit", "y", "valid", "noise", "note"),
    "rehearse": ("visit", "x", "y"),
    "loss": ("visit", "params", "batch"),
    "gradient_point": ("visit", "params", "grads"),
    "combine_gradients": ("visit", "params", "grads"),
    "correct": ("visit", "params", "grads"),
    "measure": ("visit", "params", "batch"),
    "finish": ("visit", "params", "measured"),
    "personal_params": ("visit",),
}


@dataclass(frozen=True)
class FedAvg:
    """FedAvg: average the clients' weights, weighted by their numbers of examples.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
    """

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"  # the name as its paper writes it; by default that of the class
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    passes: ClassVar[tuple[str, ...]] = ("loss",)  # the loss hooks of a step, in order: one gradient each
    optimizers: ClassVar[tuple[str, ...]] = optim.OPTIMIZERS  # the clients' optimisers for which it is defined
    reveals: ClassVar[str] = ""  # what other clients learn of a single client; needed with `broadcast_to`
    # what the entries of an honest upload are like: a federation's server rejects others
    bounds: ClassVar[Mapping[str, Bound]] = {"n": Bound(whole=True, low=1)}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__.lower()
        if "paper" not in vars(cls):
            cls.paper = ""  # it is not that of the parent
        if "title" not in vars(cls):
            cls.title = cls.__name__
        if "averaged" not in vars(cls) and {"aggregate", "finish"} & vars(cls).keys():
            setattr(cls, "averaged", ())  # noqa: B010 (what the parent declares need not hold; mypy: it is a property)
        if "corrects" not in vars(cls) and "correct" in vars(cls):
            setattr(cls, "corrects", True)  # noqa: B010 (as above)
        check_hooks(cls, FedAvg, HOOKS)

    def __post_init__(self) -> None:
        if any(isinstance(value, dataclasses.Field) for value in vars(type(self)).values()):
            raise MethodError(
                f"{type(self).__name__} declares hyperparameters but is not a dataclass: decorate it with "
                "@dataclass(frozen=True)",
                key=self.name,
            )
        for f in dataclasses.fields(self):
            if "hyper" in f.metadata:
                f.metadata["hyper"].check(self.name, f.name, getattr(self, f.name))

    @property
    def averaged(self) -> tuple[str, ...]:
        """The entries of the upload that `aggregate` uses only by their mean: a tuple, or a property if that depends.

        A class with an `aggregate` or `finish` of its own declares it itself, otherwise it is ().
        """
        return ("params",)

    @property
    def needs(self) -> Mapping[str, str]:
        """What a run must have, of `NEEDS`, with advice on how to do without it (or ""); others are refused."""
        return {}

    @property
    def personalises(self) -> bool:
        """Whether clients would use weights of their own: with `personal_params`, unless an option switches it off."""
        return self.uses("personal_params")

    @property
    def corrects(self) -> bool:
        """Whether `correct` changes gradients: if it is overridden, unless an option switches it off."""
        return self.uses("correct")

    @property
    def uploads_as_fedavg(self) -> bool:
        """Whether upload and `aggregate` are FedAvg's, so that an engine may hand over the mean of several clients."""
        return not (self.uses("aggregate") or self.uses("finish"))

    @property
    def noise_size(self) -> int:
        """How many random numbers per example the passes of a step need; they find them in `batch["noise"]`."""
        return 0

    # Server hooks

    def init_server(self, task: Task, params: Params) -> ServerTree:
        """Return the server's first tree: always "params", and whatever else. Raise here if something is missing."""
        return {"params": params}

    def broadcast(self, server: ServerTree) -> Shared:
        """Return what goes to every client: always "params"."""
        return {"params": server["params"]}

    def broadcast_to(self, server: ServerTree, client: int) -> Sent:
        """Return what goes to this client alone, in the same form for every client; its hooks find it in `visit.sent`.

        What is other clients' own, such as their models, is disclosed to this client.
        """
        return {}

    def aggregate(self, task: Task, server: ServerTree, uploads: Tree, cohort: Cohort) -> ServerTree:
        """Return the server's next tree. The uploads are stacked on a leading client axis."""
        return {**server, "params": tree.mean(uploads["params"], uploads["n"])}

    # What local training leaves alone, and what it centres

    def hold_out(self) -> float:
        """Return the share of a client's examples that it never trains on; `refine` gets these instead of all."""
        return 0.0

    def frozen(self, task: Task) -> Sequence[str]:
        """Return the names of the weights that local training leaves as `start` returned them."""
        return ()

    def centred_weights(self, task: Task) -> Sequence[str]:
        """Return the names of the weights whose gradients lose their mean over the inputs of each output."""
        return ()

    # Client hooks

    def init_client(self, task: Task, params: Params) -> ClientState:
        """Return a client's state at its first visit, when the global weights are `params`."""
        return {}

    def prepare(self, visit: Visit) -> Local:
        """Return what the hooks below need in this visit; they find it in `visit.local`."""
        return {}

    def refine(self, visit: Visit, batch: Batch) -> Local:
        """Return the next `visit.local`, given a batch of the client's examples, before training and unaugmented.

        Called for every batch of a pass through the data, or through the held-out examples if the client has any.
        """
        return visit.local

    def refined(self, visit: Visit, passes: int) -> bool | Tensor:
        """Return whether `refine` is finished after so many passes through the data: by default after one."""
        return passes >= 1

    def start(self, visit: Visit) -> Params:
        """Return the weights at which local training starts."""
        return visit.shared["params"]  # type: ignore[no-any-return]

    def annotate(self, visit: Visit, x: Any, y: Tensor) -> Note:
        """Return what is constant for each example in this visit: a teacher's logits, features, a weight."""
        return {}

    def select_examples(
        self, visit: Visit, y: Tensor, valid: Tensor, noise: Tensor, note: Note
    ) -> tuple[Tensor, Tensor] | None:
        """Select some of the client's own examples for the whole visit: (index [D], weight [D]).

        `noise` is a uniform random number per example, `valid` is False for padding. The loss finds the selected
        examples in `batch["selected"]`, never augmented, with their weight and note.
        """
        return None

    def rehearse(self, visit: Visit, x: Any, y: Tensor) -> Tree:
        """Return what local training rehearses of each example, such as pseudo data: once per visit, never augmented.

        The loss finds in `batch["rehearsed"]` that of as many examples as the batch has. They are not those of the
        batch, but follow one another in an order of their own, the same in every epoch.
        """
        return {}

    def loss(self, visit: Visit, params: Params, batch: Batch) -> Tensor:
        """Return the scalar that a local step descends.

        If `prepare` returns a tree `tracked`, return (loss, sums): the sums of every step are added to it, and `finish`
        finds the totals in `visit.local["tracked"]`.
        """
        z = visit.task.apply(params, batch["x"], train=True)
        return masked_mean(visit.task.criterion(z, batch["y"]), batch["mask"])

    def gradient_point(self, visit: Visit, params: Params, grads: Mapping[str, Grads]) -> Params:
        """Return the weights at which the next pass computes its gradient, given the gradients of the passes so far.

        Only called for methods with several `passes`, before each pass but the first.
        """
        return params

    def combine_gradients(self, visit: Visit, params: Params, grads: Mapping[str, Grads]) -> Grads:
        """Return one gradient, given those of all `passes`. Only called for methods with several."""
        return grads["loss"]

    def correct(self, visit: Visit, params: Params, grads: Grads) -> Grads:
        """Return the gradient that the optimiser gets, after centring, before clipping and momentum."""
        return grads

    def measure(self, visit: Visit, params: Params, batch: Batch) -> Tree:
        """Return sums over a batch, after training; the sums over one pass through the data reach `finish`."""
        return {}

    def finish(self, visit: Visit, params: Params, measured: Tree) -> tuple[Upload, ClientState]:
        """Return (upload, the client's next state)."""
        return {"params": params, "n": visit.facts["n"]}, visit.client

    def personal_params(self, visit: Visit) -> Params:
        """Return the weights that this client would use for itself."""
        return visit.shared["params"]  # type: ignore[no-any-return]

    # What the runtimes ask

    @classmethod
    def uses(cls, hook: str) -> bool:
        """Return whether this method overrides a hook; engines skip computations that no hook needs."""
        return getattr(cls, hook) is not getattr(FedAvg, hook)

    @classmethod
    def hyperparameters(cls) -> dict[str, Hyper]:
        """Return the declared hyperparameters by name."""
        return {f.name: f.metadata["hyper"] for f in dataclasses.fields(cls) if "hyper" in f.metadata}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the hyperparameters' defaults by name."""
        return {f.name: f.default for f in dataclasses.fields(cls) if "hyper" in f.metadata}

    @classmethod
    def values_before(cls) -> dict[str, Any]:
        """Return the values, by name, that hyperparameters had in runs that were made before they existed."""
        before = {name: declared.before for name, declared in cls.hyperparameters().items()}
        return {**cls.defaults(), **{name: value for name, value in before.items() if value is not None}}

    def without_effect(self, optimizer: str) -> tuple[str, ...]:
        """Return the hyperparameters that change nothing as the others are, with this optimiser of the clients."""
        others = {**self.to_dict(), "optimizer": optimizer}
        declared = self.hyperparameters().items()
        return tuple(name for name, h in declared if any(others[key] != value for key, value in h.only_with.items()))

    def to_dict(self) -> dict[str, Any]:
        """Return the method's name and the values of its hyperparameters."""
        return {"name": self.name, **{name: getattr(self, name) for name in self.hyperparameters()}}
