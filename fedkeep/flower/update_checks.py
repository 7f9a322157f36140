"""What the server refuses, before it can reach an aggregate: one node's fault must not become everybody's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import RecordDict

from fedkeep import tree
from fedkeep.errors import FedkeepError
from fedkeep.flower import records
from fedkeep.tree import Tree

TreeSpec = tuple[tuple[str, tuple[int, ...], str], ...]  # path, shape and type of every leaf


@dataclass(frozen=True)
class Limits:
    """What an update may be at most; far beyond what training does, so that only what is broken or hostile meets it."""

    update: float = 100.0  # how far the weights may move in a round, in norms of the weights (of at least 1)
    value: float = 1e9  # the largest number anywhere else in an upload; its number of examples is one
    models: float = 16.0  # how large a message may be, in models


class Refused(FedkeepError):  # noqa: N818 (it is what happened, not a mistake of the caller)
    """An update that must not be used; the message says why."""


def tree_spec(value: Tree) -> TreeSpec:
    """Describe a tree's structure.

    >>> form({"n": torch.tensor(1.0)})
    (('n', (), 'float32'),)
    """
    flat = sorted(tree.flatten(value).items())
    return tuple((path, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")) for path, leaf in flat)


def unpack_upload(content: RecordDict, params: Tree, limits: Limits) -> Tree:
    """Return the upload in a reply, if it is of a bearable size and every number in it can be used."""
    most = int(limits.models * tree.nbytes(params)) + (1 << 20)
    if (found := records.size(content)) > most:
        raise Refused(f"it is {found:,} bytes; at most {most:,} are taken (limits.models)")
    try:
        upload = records.from_records(content)
    except FedkeepError as error:
        raise Refused(str(error)) from error
    require_weights(upload, params)
    require_usable_numbers(upload, params, limits)
    return upload


def require_weights(upload: Tree, params: Tree) -> None:
    """Refuse weights that are not those of the model; an upload need not hold any."""
    if "params" not in upload:
        return
    if not isinstance(upload["params"], dict):
        raise Refused("its params are no weights")
    expected, found = (
        {path: (shape, dtype) for path, shape, dtype in tree_spec(weights)} for weights in (params, upload["params"])
    )
    if wrong := sorted(expected.keys() ^ found.keys()):
        raise Refused(f"its weights are not the model's: {wrong[0]} is {'missing' if wrong[0] in expected else 'odd'}")
    for path, shape in expected.items():
        if found[path] != shape:
            raise Refused(f"params/{path} is {found[path]}, the model's is {shape}")


def require_usable_numbers(upload: Tree, params: Tree, limits: Limits) -> None:
    """Refuse what is not finite, and what is absurdly large."""
    for path, leaf in tree.items(upload):
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise Refused(f"{path} holds numbers that are not finite")
        if not path.startswith("params/") and leaf.numel() and float(leaf.double().abs().max()) > limits.value:
            raise Refused(f"{path} holds {float(leaf.double().abs().max()):.3g}; at most {limits.value:g} is taken")
    if "n" in upload and not float(upload["n"].double().min()) > 0:
        raise Refused(f"it says it has {float(upload['n'].double().min()):g} examples")
    if "params" in upload:
        double = tree.to(upload["params"], "cpu", torch.float64), tree.to(params, "cpu", torch.float64)
        gap = tree.sub(*double)
        moved, size = (float(tree.dot(value, value)) ** 0.5 for value in (gap, double[1]))
        if not moved <= limits.update * max(size, 1.0):
            raise Refused(f"its weights moved by {moved:.3g}, with a norm of {size:.3g} before (limits.update)")


def mismatched(uploads: Mapping[Any, Tree], expected: TreeSpec | None) -> dict[Any, str]:
    """Name the uploads whose structure is not the expected one or, where nothing is expected yet, not the usual one."""
    forms = {key: tree_spec(upload) for key, upload in uploads.items()}
    if expected is None and forms:
        expected = Counter(forms.values()).most_common(1)[0][0]
    return {key: _difference(found, expected or ()) for key, found in forms.items() if found != expected}


def _difference(found: TreeSpec, expected: TreeSpec) -> str:
    odd = sorted(set(found) ^ set(expected))
    path = odd[0][0]
    described = {name: {p: (s, t) for p, s, t in one} for name, one in (("found", found), ("expected", expected))}
    return f"{path} is {described['found'].get(path, 'missing')}, expected {described['expected'].get(path, 'nothing')}"
