"""What the hooks of a method work with: the trees they pass on, a batch, the cohort, and a client's visit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict, cast

from torch import Tensor

from fedkeep.errors import MethodError
from fedkeep.task import Task
from fedkeep.tree import Tree

# The roles that trees play; all of them are nested dicts of tensors.
Params = Tree  # weights, by name
Grads = Tree  # one gradient for each weight
ServerTree = Tree  # what the server keeps between rounds
Shared = Tree  # what the server sends to every client of a round
Sent = Tree  # what the server sends to one client besides
ClientState = Tree  # what one client keeps between its visits
Local = Tree  # what `prepare` returns for this visit
Note = Tree  # what `annotate` returns: one entry per example
Upload = Tree  # what a client sends


class Facts(TypedDict):
    """What the runtime knows of a client in this round, in the weights' dtype (float32 if that is half precision)."""

    n: Tensor  # examples
    steps: Tensor  # local steps
    effective_steps: Tensor  # see fedkeep.optim
    label_counts: Tensor  # [C]
    lr: Tensor


class Batch(TypedDict, total=False):
    """The examples of one step, padded to a fixed size."""

    x: Any
    y: Tensor
    mask: Tensor  # False for padding
    note: Note  # of these examples, from `annotate`
    selected: Tree  # the examples that `select_examples` chose: x, y, weight, note
    rehearsed: Tree  # what `rehearse` returned, of as many examples as the batch has
    noise: Tensor  # `noise_size` uniform random numbers in [0, 1) per example, new ones in every step
    position: Tensor  # in `refine` and `measure`: the example's place in a random permutation of the client's examples


@dataclass(frozen=True)
class Cohort:
    """The clients of a round, in the order of the uploads' leading axis.

    Whatever else the server uses of a client, its number of examples too, is in that client's upload. So a method's
    uploads show everything that it discloses.
    """

    ids: tuple[int, ...]
    round: int  # from 1
    seed: int  # for the server's own random numbers


# What a client hook may read of its visit, besides `task` and `shared`. A hook that is not listed computes a step.
_READABLE = {
    "prepare": ("sent", "client", "facts"),
    "refine": ("sent", "client", "facts", "local"),
    "refined": ("sent", "client", "facts", "local"),
    "start": ("sent", "client", "facts", "local"),
    "annotate": ("local",),
    "rehearse": ("local",),
    "finish": ("sent", "client", "facts", "local"),
    "personal_params": ("sent", "client"),
}
_READABLE_IN_A_STEP = ("facts", "local")


class Visit:
    """One client's visit, as a client hook sees it.

    - `task`: the model as functions, the loss, the numbers of classes and clients.
    - `shared`: what the server sent to every client.
    - `sent`: what the server sent to this client alone (`broadcast_to`).
    - `client`: what the client kept from its last visit.
    - `facts`: what the runtime knows of the client: n, steps, effective_steps, label_counts, lr.
    - `local`: what `prepare` returned for this visit, and `refine` after it.

    Not every hook may read all of it. Reading a part that a hook may not see raises a `MethodError`.
    """

    __slots__ = ("_parts", "hook", "shared", "task")

    def __init__(
        self,
        hook: str,
        task: Task,
        shared: Shared,
        client: ClientState | None = None,
        facts: Tree | None = None,
        local: Local | None = None,
        sent: Sent | None = None,
    ) -> None:
        self.hook, self.task, self.shared = hook, task, shared
        self._parts = {"sent": sent, "client": client, "facts": facts, "local": local}

    @property
    def sent(self) -> Sent:
        """What the server sent to this client alone; empty unless the method has `broadcast_to`."""
        return self._readable("sent")

    @property
    def client(self) -> ClientState:
        """What the client kept from its last visit."""
        return self._readable("client")

    @property
    def facts(self) -> Facts:
        """What the runtime knows of the client."""
        return cast(Facts, self._readable("facts"))

    @property
    def local(self) -> Local:
        """What `prepare` returned, and `refine` after it."""
        return self._readable("local")

    def _readable(self, part: str) -> Tree:
        readable, value = _READABLE.get(self.hook, _READABLE_IN_A_STEP), self._parts[part]
        if part not in readable or value is None:
            names = ", ".join(f"visit.{name}" for name in ("task", "shared", *readable))
            raise MethodError(
                f"{self.hook} cannot read visit.{part}, only {names}; return what it needs from prepare",
                key=f"visit.{part}",
                value=self.hook,
                valid=("task", "shared", *readable),
            )
        return value
