"""Checks of clients' uploads before aggregation: what cannot be read or no honest client can send is rejected.

The server knows the form of an upload from the method itself, and the meaning of its entries from the method's
`bounds`. So it needs no other client to judge one: the form comes first, then the numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from flwr.app import RecordDict

from fedkeep import tree
from fedkeep._util.text import one_line
from fedkeep.bounds import Received, broken_bound
from fedkeep.errors import FedkeepError
from fedkeep.flower import records
from fedkeep.flower.federation_server import FederationServer
from fedkeep.method import FedAvg
from fedkeep.task import Task
from fedkeep.tree import Tree

TreeSpec = tuple[tuple[str, tuple[int, ...], str], ...]  # path, shape and dtype of every leaf


@dataclass(frozen=True)
class Limits:
    """Upper limits for an update, far above what training produces: only broken or hostile updates exceed them."""

    update: float = 10.0  # how far the weights may move in a round, in multiples of their norm (or of 1, if larger)
    value: float = 1e9  # the largest absolute value outside the weights
    models: float = 16.0  # the size of a message, in multiples of the model's size
    examples: float = 1e9  # the largest number of examples of one client


class RejectedUpdate(FedkeepError):  # noqa: N818 (an event, not a mistake of the caller)
    """An update that must not be used. `key` is the leaf, or the limit of the message's size."""


def unreadable(error: Exception) -> RejectedUpdate:
    """Return the rejection of a reply that led to an error of any kind when it was read."""
    kind = type(error).__name__
    return RejectedUpdate(f"its reply cannot be read ({kind}: {one_line(error)})", key="reply", value=kind)


@dataclass(frozen=True)
class ExpectedUpload:
    """What the server expects of every upload of one round."""

    form: TreeSpec
    method: FedAvg
    task: Task
    server: Tree  # before the round, on the CPU
    round: int
    lr: float
    epochs: int
    batch_size: int
    drop_last: bool
    limits: Limits

    @classmethod
    def of(cls, federation: FederationServer, server: Tree, number: int, limits: Limits) -> ExpectedUpload:
        """Return what the federation's server expects in a round, when it has this tree."""
        settings = federation.settings
        return cls(
            form=federation.upload_spec,
            method=federation.method,
            task=federation.task,
            server=tree.to(server, "cpu"),
            round=number,
            lr=settings.lr_in(number),
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            drop_last=settings.drop_last,
            limits=limits,
        )

    def unpack(self, content: RecordDict, bounds: bool = True) -> Tree:
        """Return the upload in a reply; raise RejectedUpdate if it cannot be read or must not be used.

        Without `bounds`, only the form and the general limits are checked.
        """
        try:
            self._require_size(content)
            upload = records.from_records(content)
            self.require_form(upload)
            self.require_values(upload, bounds)
        except RejectedUpdate:
            raise
        except FedkeepError as error:
            raise error.converted(RejectedUpdate, one_line(error)) from error
        except Exception as error:  # whatever a reply contains, it is the fault of one node
            raise unreadable(error) from error
        return upload

    def require_form(self, upload: Tree) -> None:
        """Raise unless the upload has exactly the names, shapes and dtypes that the method's clients send."""
        received = tree.spec(upload)
        if received != self.form:
            raise _difference(received, self.form)

    def require_values(self, upload: Tree, bounds: bool = True) -> None:
        """Raise if a value is NaN or infinite, above the limits, or outside the method's bounds."""
        limits = self.limits
        for path, leaf in tree.items(upload):
            if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                raise RejectedUpdate(f"{path} contains NaN or infinite values", key=path)
            most, name = (limits.examples, "examples") if path == "n" else (limits.value, "value")
            if path.startswith("params/") or not leaf.numel():
                continue
            if (top := float(leaf.double().abs().max())) > most:
                raise RejectedUpdate(
                    f"{path} contains {top:.3g}, above the limit of {most:g} (limits.{name})", key=path, value=top
                )
        if "params" in upload:
            self._require_near(upload["params"])
        broken = broken_bound(self.method.bounds, self.received(upload)) if bounds else None
        if broken is not None:
            name, problem = broken
            raise RejectedUpdate(f"{name} {problem.reason}: no honest client sends that", key=name, value=problem.value)

    def received(self, upload: Tree) -> Received:
        """Return the upload with what the server knows of its visit."""
        return Received(
            upload,
            self.server,
            self.method,
            self.task,
            self.round,
            self.lr,
            self.epochs,
            self.batch_size,
            self.drop_last,
        )

    def _require_near(self, params: Tree) -> None:
        distance, norm = distance_between(params, self.server["params"])
        if not distance <= self.limits.update * max(norm, 1.0):
            raise RejectedUpdate(
                f"params moved by {distance:.3g}, from a norm of {norm:.3g} (limits.update)",
                key="params",
                value=distance,
            )

    def _require_size(self, content: RecordDict) -> None:
        most = int(self.limits.models * tree.nbytes(self.server["params"])) + (1 << 20)
        if (size := records.size(content)) > most:
            raise RejectedUpdate(
                f"it has {size:,} bytes, above the limit of {most:,} (limits.models)", key="limits.models", value=size
            )


def distance_between(params: Tree, own: Tree) -> tuple[float, float]:
    """Return the distance of weights from the server's, and the norm of the server's."""
    uploaded, own = tree.to(params, "cpu", torch.float64), tree.to(own, "cpu", torch.float64)
    gap = tree.sub(uploaded, own)
    return math.sqrt(float(tree.dot(gap, gap))), math.sqrt(float(tree.dot(own, own)))


def _difference(received: TreeSpec, expected: TreeSpec) -> RejectedUpdate:
    path = min(set(received) ^ set(expected))[0]
    leaves = [{name: (shape, dtype) for name, shape, dtype in spec} for spec in (received, expected)]
    got, wanted, name = leaves[0].get(path), leaves[1].get(path), one_line(path, 80)
    if got is None:
        return RejectedUpdate(f"{name} is missing", key=name)
    if wanted is None:
        return RejectedUpdate(f"{name} is not expected in an upload", key=name, value=got)
    return RejectedUpdate(f"{name} is {got}, expected {wanted}", key=name, value=got, valid=[wanted])
