"""Trees: nested dicts whose leaves are tensors.

Weights, the server's state, messages and the clients' states are all trees. So all of them can be stacked on a client
axis, sent as bytes and saved in a checkpoint with the same few functions.

Keys are visited in sorted order, whatever the order of insertion. So sums over leaves are bit for bit the same before
and after a tree was sent.

>>> import torch
>>> two = stack([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 6.0])}])
>>> mean(two, torch.tensor([3.0, 1.0]))
{'w': tensor([1.5000, 3.0000])}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Tree = dict[str, Any]
T = TypeVar("T")  # a tree, or a bare leaf

_SEPARATOR = "/"
MAX_DEPTH = 32  # levels of a tree that is read from flat paths


def map(fn: Callable[..., Any], first: T, *others: Any) -> T:
    """Apply `fn` to the leaves at the same place of every tree. A bare leaf is a tree too."""
    if not isinstance(first, dict):
        return fn(first, *others)  # type: ignore[no-any-return]
    for other in others:
        if not isinstance(other, dict) or other.keys() != first.keys():
            theirs = sorted(other) if isinstance(other, dict) else "a leaf"
            raise KeyError(f"trees differ: {sorted(first)} and {theirs}")
    return {key: map(fn, first[key], *(tree[key] for tree in others)) for key in sorted(first)}  # type: ignore[return-value]


def items(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, leaf) in sorted order of the keys; the path joins keys with '/'."""
    if not isinstance(tree, dict):
        yield prefix, tree
        return
    for key in sorted(tree):
        yield from items(tree[key], f"{prefix}{_SEPARATOR}{key}" if prefix else key)


def leaves(tree: Any) -> list[Tensor]:
    """Return the leaves, in sorted order of the keys."""
    return [leaf for _, leaf in items(tree)]


def spec(tree: Any) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Return path, shape and dtype of every leaf.

    >>> spec({"n": torch.tensor(1.0)})
    (('n', (), 'float32'),)
    """
    found = ((path, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")) for path, leaf in items(tree))
    return tuple(sorted(found))


def like(tree: Tree, values: Sequence[Any]) -> Tree:
    """Return a tree of this structure with these values, in the order of `leaves`."""
    source = iter(values)
    return map(lambda _: next(source), tree)


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack trees of one structure on a new leading axis."""
    return map(lambda *ts: torch.stack(ts), *trees)


def take(tree: T, index: Any) -> T:
    """Index the leading axis of every leaf: one client (an int), some (a tensor), or a range (a slice)."""
    return map(lambda t: t[index], tree)


def cat(trees: Sequence[Tree]) -> Tree:
    """Concatenate along the existing leading axis."""
    return map(lambda *ts: torch.cat(ts), *trees)


def align(*batches: T) -> list[T]:
    """Return batches of texts with the same width, so that they can be joined; other examples are left as they are.

    The second axis of whole numbers is filled up with 0, or False in a mask, where it is shorter than in others.

    >>> short, long = {"ids": torch.tensor([[5]])}, {"ids": torch.tensor([[6, 7]])}
    >>> align(short, long)[0]
    {'ids': tensor([[5, 0]])}
    """
    first = leaves(batches[0])
    if any(t.ndim != 2 or t.is_floating_point() for t in first):
        return list(batches)
    width = max(t.shape[1] for batch in batches for t in leaves(batch))
    return [map(lambda t: F.pad(t, (0, width - t.shape[1])), batch) for batch in batches]


def zeros_like(tree: Tree) -> Tree:
    """Return the same structure, filled with zeros."""
    return map(torch.zeros_like, tree)


def add(a: Tree, b: Tree) -> Tree:
    """Return a + b."""
    return map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """Return a - b."""
    return map(torch.sub, a, b)


def scale(tree: Tree, factor: Tensor | float) -> Tree:
    """Return the tree times a number."""
    return map(lambda t: t * factor, tree)


def mean(stacked: Tree, weights: Tensor | None = None) -> Tree:
    """Average over the leading axis, weighted if weights are given (they need not sum to one)."""
    if weights is None:
        return map(lambda t: t.mean(0), stacked)

    def average(t: Tensor) -> Any:
        if not t.is_floating_point():
            raise TypeError(f"only floating-point leaves have a weighted mean, not {t.dtype}")
        w = weights.to(torch.promote_types(torch.promote_types(weights.dtype, torch.float32), t.dtype))
        return torch.tensordot((w / w.sum()).to(t.dtype), t, dims=1)

    return map(average, stacked)


def dot(a: Tree, b: Tree) -> Tensor:
    """Return the sum of the products of corresponding entries; 0 for empty trees."""
    return sum(leaves(map(lambda x, y: (x * y).sum(), a, b)), torch.tensor(0.0))


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """Return ||a - b||^2, the sum of the squared differences of corresponding entries; 0 for empty trees.

    >>> squared_distance({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 5.0])})
    tensor(9.)
    """
    return sum(leaves(map(lambda x, y: F.mse_loss(x, y, reduction="sum"), a, b)), torch.tensor(0.0))


def to(tree: T, *args: Any, **kwargs: Any) -> T:
    """Call `Tensor.to` on every leaf."""
    return map(lambda t: t.to(*args, **kwargs), tree)


def detach(tree: T) -> T:
    """Return the tree with every leaf detached from autograd."""
    return map(lambda t: t.detach(), tree)


def copy_(into: Tree, values: Tree) -> None:
    """Copy values into the leaves of a tree of the same structure."""
    map(lambda t, v: t.copy_(v), into, values)


def nbytes(tree: Any) -> int:
    """Return the number of bytes of all leaves: the cost of sending the tree."""
    return sum(t.numel() * t.element_size() for t in leaves(tree))


def flatten(tree: Tree) -> dict[str, Tensor]:
    """Return {path: leaf}; an empty dict inside becomes a zero-sized leaf whose path ends in '/'."""
    flat: dict[str, Tensor] = {}

    def walk(node: Tree, prefix: str) -> None:
        for key, value in node.items():
            if not isinstance(key, str) or not key or _SEPARATOR in key:
                raise KeyError(f"a tree's keys are non-empty strings without '{_SEPARATOR}', not {key!r}")
            path = prefix + key
            if not isinstance(value, dict):
                flat[path] = value
            elif value:
                walk(value, path + _SEPARATOR)
            else:
                flat[path + _SEPARATOR] = torch.zeros(0, dtype=torch.uint8)

    walk(tree, "")
    return flat


def unflatten(flat: dict[str, Tensor]) -> Tree:
    """Undo `flatten`; raise a ValueError for paths that no tree has, or of more than `MAX_DEPTH` levels."""
    tree: Tree = {}
    for path, leaf in flat.items():
        *parents, last = path.split(_SEPARATOR, MAX_DEPTH)
        if not path or "" in parents or _SEPARATOR in last:
            raise ValueError(f"{path[:80]!r} is not a path of 1 to {MAX_DEPTH} non-empty keys")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ValueError(f"{path!r} is below {key!r}, which is a leaf")
        if last in node:
            raise ValueError(f"{path!r} is both a leaf and a branch")
        if last:
            node[last] = leaf
    return tree


def to_cpu_copies(tree: Tree) -> dict[str, Tensor]:
    """Return {path: contiguous copy on the CPU}, ready to be written: no two share memory."""
    return {path: leaf.detach().cpu().contiguous().clone() for path, leaf in flatten(tree).items()}


def to_bytes(tree: Tree) -> bytes:
    """Serialise to the safetensors format: no pickle, safe to read from untrusted sources."""
    import safetensors.torch

    return bytes(safetensors.torch.save(to_cpu_copies(tree)))


def from_bytes(data: bytes) -> Tree:
    """Undo `to_bytes`. The leaves are copies in torch's own, aligned memory: sums can depend on alignment."""
    import safetensors.torch

    return unflatten({path: leaf.clone() for path, leaf in safetensors.torch.load(data).items()})
