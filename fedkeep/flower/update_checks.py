"""Checks of clients' uploads before aggregation, so that one broken node cannot spoil the global model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from flwr.app import RecordDict

from fedkeep import tree
from fedkeep.errors import FedkeepError
from fedkeep.flower import records
from fedkeep.tree import Tree

TreeSpec = tuple[tuple[str, tuple[int, ...], str], ...]  # path, shape and dtype of every leaf


@dataclass(frozen=True)
class Limits:
    """Upper limits for an update, far above what training produces: only broken or hostile updates exceed them."""

    update: float = 100.0  # how far the weights may move in a round, in multiples of their norm (or of 1, if larger)
    value: float = 1e9  # the largest absolute value outside the weights, for example of the number of examples
    models: float = 16.0  # the size of a message, in multiples of the model's size


class RejectedUpdate(FedkeepError):  # noqa: N818 (an event, not a mistake of the caller)
    """An update that must not be used. `key` is the leaf, or the limit of the message's size."""


def tree_spec(value: Tree) -> TreeSpec:
    """Return path, shape and dtype of every leaf.

    >>> tree_spec({"n": torch.tensor(1.0)})
    (('n', (), 'float32'),)
    """
    flat = sorted(tree.flatten(value).items())
    return tuple((path, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")) for path, leaf in flat)


def unpack_upload(content: RecordDict, params: Tree, limits: Limits) -> Tree:
    """Return the upload in a reply; raise RejectedUpdate if it is too large or has unusable values."""
    most = int(limits.models * tree.nbytes(params)) + (1 << 20)
    if (size := records.size(content)) > most:
        raise RejectedUpdate(
            f"it has {size:,} bytes, above the limit of {most:,} (limits.models)", key="limits.models", value=size
        )
    try:
        upload = records.from_records(content)
    except FedkeepError as error:
        raise RejectedUpdate(str(error), key=error.key, value=error.value) from error
    require_same_weights(upload, params)
    require_usable_values(upload, params, limits)
    return upload


def require_same_weights(upload: Tree, params: Tree) -> None:
    """Raise unless the uploaded weights have the model's names, shapes and dtypes; an upload may have no weights."""
    if "params" not in upload:
        return
    if not isinstance(upload["params"], dict):
        raise RejectedUpdate("its params are one tensor, not a model's weights", key="params")
    expected, received = (
        {path: (shape, dtype) for path, shape, dtype in tree_spec(weights)} for weights in (params, upload["params"])
    )
    for path in sorted(expected.keys() | received.keys()):
        if expected.get(path) != received.get(path):
            raise _mismatch(f"params/{path}", received.get(path), expected.get(path))


def require_usable_values(upload: Tree, params: Tree, limits: Limits) -> None:
    """Raise if a value is NaN or infinite, or above the limits."""
    for path, leaf in tree.items(upload):
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise RejectedUpdate(f"{path} contains NaN or infinite values", key=path)
        if not path.startswith("params/") and leaf.numel() and (top := float(leaf.double().abs().max())) > limits.value:
            raise RejectedUpdate(
                f"{path} contains {top:.3g}, above the limit of {limits.value:g} (limits.value)", key=path, value=top
            )
    if "n" in upload and not (least := float(upload["n"].double().min())) > 0:
        raise RejectedUpdate(f"n, its number of examples, is {least:g}", key="n", value=least)
    if "params" in upload:
        uploaded, own = tree.to(upload["params"], "cpu", torch.float64), tree.to(params, "cpu", torch.float64)
        gap = tree.sub(uploaded, own)
        distance, norm = (float(tree.dot(value, value)) ** 0.5 for value in (gap, own))
        if not distance <= limits.update * max(norm, 1.0):
            raise RejectedUpdate(
                f"params moved by {distance:.3g}, from a norm of {norm:.3g} (limits.update)",
                key="params",
                value=distance,
            )


def mismatched(uploads: Mapping[int, Tree], expected: TreeSpec | None) -> dict[int, RejectedUpdate]:
    """Return an error for each upload whose structure differs from `expected`, or else from the most common one."""
    specs = {client: tree_spec(upload) for client, upload in uploads.items()}
    if expected is None and specs:
        expected = Counter(specs.values()).most_common(1)[0][0]
    return {client: _difference(spec, expected or ()) for client, spec in specs.items() if spec != expected}


def _difference(received: TreeSpec, expected: TreeSpec) -> RejectedUpdate:
    path = min(set(received) ^ set(expected))[0]
    leaves = [{name: (shape, dtype) for name, shape, dtype in spec} for spec in (received, expected)]
    return _mismatch(path, leaves[0].get(path), leaves[1].get(path))


def _mismatch(
    path: str, received: tuple[tuple[int, ...], str] | None, expected: tuple[tuple[int, ...], str] | None
) -> RejectedUpdate:
    if received is None:
        return RejectedUpdate(f"{path} is missing", key=path)
    if expected is None:
        return RejectedUpdate(f"{path} is not expected in an upload", key=path, value=received)
    return RejectedUpdate(f"{path} is {received}, expected {expected}", key=path, value=received, valid=[expected])
