"""Parts of a batch, whose gradients are added up: a step in the memory of a part (the setting `accumulate`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.tree import Tree

_OF_EXAMPLES = ("x", "y", "mask", "note", "rehearsed", "noise")  # selected examples belong to every part


def weighted_parts(batch: Tree, axis: int, size: int, dtype: torch.dtype) -> Iterator[tuple[Tree, Tensor]]:
    """Yield parts of at most `size` examples, each with its weight: its share of the client's real examples.

    `axis` is that of the examples: 0 for one client, 1 for a stack, whose weights are one per client. The weights of a
    client add up to 1, so that terms of a loss which are no mean over examples count once.

    >>> batch = {"x": torch.arange(5), "mask": torch.tensor([True, True, True, False, False])}
    >>> [(part["x"].tolist(), round(float(weight), 2)) for part, weight in weighted_parts(batch, 0, 2, torch.float32)]
    [([0, 1], 0.67), ([2, 3], 0.33), ([4], 0.0)]
    """
    mask: Tensor = batch["mask"]
    n, places = mask.sum(axis).clamp(min=1), mask.shape[axis]
    own = {key: value for key, value in batch.items() if key in _OF_EXAMPLES}
    for start in range(0, places, size):
        part = {**batch, **tree.take(own, (slice(None),) * axis + (slice(start, start + size),))}
        real: Tensor = part["mask"]
        part["mask"] = real | ~real.any(axis, keepdim=True)  # no client computes with no example at all
        if "dropout_key" in part:  # other draws for the examples of every part
            part["dropout_key"] = part["dropout_key"] + start
        yield part, real.sum(axis).to(dtype) / n
