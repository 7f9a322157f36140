"""Partition: the examples of each client, as indices into the training data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedkeep._util.html import Html
from fedkeep._util.text import format_value, one_line
from fedkeep._util.validate import require_number
from fedkeep.data.display import describe_partition, partition_html
from fedkeep.data.seeds import split_rng
from fedkeep.errors import PartitionError


@dataclass(frozen=True, repr=False)
class Partition:
    """The examples of each client, as two arrays: client k has `indices[offsets[k]:offsets[k + 1]]`.

    Indices are stored in 32 bits where they fit, because they take most of the memory when there are many clients.
    """

    indices: np.ndarray
    offsets: np.ndarray
    file: str | None = field(default=None, compare=False)  # the federation file that it was read from
    held: Partition | None = field(default=None, compare=False)  # what `hold_out` left out, by client
    owners: np.ndarray | None = field(default=None, compare=False)  # [N] who each client is, where known
    labels: np.ndarray | None = field(default=None, compare=False)  # of all examples, where known: for display alone

    def __post_init__(self) -> None:
        if self.indices.dtype == np.int64 and len(self.indices) < 2**31 and self.indices.max(initial=0) < 2**31:
            object.__setattr__(self, "indices", self.indices.astype(np.int32))

    def __repr__(self) -> str:
        return f"<Partition: {describe_partition(self)}>"

    def _repr_html_(self) -> str:
        return partition_html(self)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, k: int) -> np.ndarray:
        if not 0 <= k < len(self):
            raise IndexError(f"there is no client {k}: clients are 0 to {len(self) - 1}")
        return self.indices[self.offsets[k] : self.offsets[k + 1]].astype(np.int64)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[k] for k in range(len(self)))

    def size(self, k: int) -> int:
        """Return the number of examples of one client."""
        return int(self.offsets[k + 1] - self.offsets[k])

    def name(self, k: int) -> str:
        """Return the name of one client: its owner, such as a hospital, where known."""
        return f"client {k}" if self.owners is None else owner_name(self.owners[k])

    @property
    def sizes(self) -> np.ndarray:
        """Number of examples of each client, [N]."""
        return np.diff(self.offsets)

    def label_counts(self, y: Any, n_classes: int | None = None) -> np.ndarray:
        """Return the number of examples of each client and class, [N, C]."""
        y = np.asarray(y)
        highest = int(y.max())
        n_classes = n_classes or highest + 1
        if highest >= n_classes:
            raise PartitionError(
                f"there is a label {highest}, but with n_classes = {n_classes} labels are 0 to {n_classes - 1}",
                key="n_classes",
                value=n_classes,
            )
        owner = np.repeat(np.arange(len(self)), self.sizes)
        flat = np.bincount(owner * n_classes + y[self.indices], minlength=len(self) * n_classes)
        return flat.reshape(len(self), n_classes)

    def heat_map(self, data: Any) -> Html:
        """Return a picture for a notebook: how many examples of each class a client has, of a data set or labels."""
        return Html(partition_html(self, getattr(data, "y_train", data), getattr(data, "class_names", None)))

    def hold_out(self, share: float, seed: int = 0) -> Partition:
        """Return the partition without a fraction `share` of every client's examples, chosen at random.

        These are the examples that a client holds out for validation, `held` of the result. At least one example per
        client remains. Flashback's clients train on 90% of their examples: `hold_out(0.1)`.
        """
        require_number("share", share, low=0, below=1, error=PartitionError)
        keep = np.maximum(self.sizes - np.floor(share * self.sizes + 1e-9).astype(np.int64), np.minimum(self.sizes, 1))
        order = split_rng(seed, "held").random(len(self.indices))
        owner = np.repeat(np.arange(len(self)), self.sizes)
        shuffled = np.lexsort([order, owner])  # positions in `indices`, shuffled within each client
        rank = np.arange(len(shuffled)) - np.repeat(self.offsets[:-1], self.sizes)
        kept = rank < np.repeat(keep, self.sizes)
        remaining, held = np.sort(shuffled[kept]), np.sort(shuffled[~kept])
        left_out = Partition(self.indices[held], np.concatenate([[0], np.cumsum(self.sizes - keep)]))
        offsets = np.concatenate([[0], np.cumsum(keep)])
        return Partition(self.indices[remaining], offsets, held=left_out, owners=self.owners, labels=self.labels)

    @classmethod
    def of(cls, clients: Partition | Iterable[Any], n: int) -> Partition:
        """Return a partition or any iterable of index arrays as a Partition, checked against n examples."""
        if isinstance(clients, Partition):
            part = clients
        else:
            if isinstance(clients, Mapping):
                clients = clients.values()
            if not isinstance(clients, Iterable) or (hasattr(clients, "ndim") and not clients.ndim):
                raise PartitionError(
                    f"clients must be one index array each, not {format_value(clients)}", key="clients", value=clients
                )
            parts = [_to_indices(k, indices) for k, indices in enumerate(clients)]
            if not parts:
                raise PartitionError("clients is empty: at least one client is needed", key="clients", value=[])
            part = cls.from_parts([p.astype(np.int64) for p in parts])
        if len(part.indices) and not (part.indices.min() >= 0 and part.indices.max() < n):
            bad = int(part.indices.max() if part.indices.max() >= n else part.indices.min())
            raise PartitionError(
                f"a client has example {bad}, but the training examples are 0 to {n - 1}", key="clients", value=bad
            )
        if not len(part.indices):
            raise PartitionError("no client has any example", key="clients", value=[])
        return part

    @classmethod
    def from_parts(cls, parts: Sequence[np.ndarray]) -> Partition:
        """Return the partition with one index array per client."""
        return Partition(np.concatenate(parts), np.concatenate([[0], np.cumsum([len(p) for p in parts])]))


def owner_name(owner: Any) -> str:
    """Return what an owner of examples is called; one that is a number needs a word.

    >>> owner_name("Aachen"), owner_name(17)
    ('Aachen', 'id 17')
    """
    return owner if isinstance(owner, str) else f"id {owner}"


def _to_indices(client: int, indices: Any) -> np.ndarray:
    """Return one client's indices as an array.

    A single number is rejected: a flat array names an owner for each example, which is not a partition.
    """
    try:
        array: np.ndarray = np.asarray(indices)
    except (ValueError, TypeError, RuntimeError) as error:  # lists of unequal length, tensors that are not on the CPU
        raise PartitionError(
            f"client {client} must be a flat index array: {one_line(error)}", key="clients", value=indices
        ) from error
    if array.ndim != 1:
        shown = f"an array of shape {array.shape}" if array.ndim else format_value(array.item())
        raise PartitionError(
            f"client {client} must be a flat index array, not {shown}; for an array with the owner of each example use "
            "partition.by_id",
            key="clients",
            value=indices,
        )
    if len(array) and not np.issubdtype(array.dtype, np.integer):
        raise PartitionError(
            f"client {client}: indices must be whole numbers, not {array.dtype}", key="clients", value=str(array.dtype)
        )
    return array
