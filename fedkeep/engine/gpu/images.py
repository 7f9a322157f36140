"""Gathering examples as model inputs: by one kernel for images on a GPU, otherwise by the input pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.data.augment import InputPipeline
from fedkeep.engine.gpu.kernels import has_triton
from fedkeep.tree import Tree


def gather(
    x: Any, at: Tensor | slice, inputs: InputPipeline, drawn: Tree | None = None, width: int | None = None
) -> Any:
    """Return the examples x[at] as model inputs.

    `drawn` are the random parameters of their augmentation, `width` is that of a batch of texts.
    """
    if isinstance(x, Tensor) and has_triton(x.device):
        from fedkeep.engine.gpu.kernels import images

        if images.supported(x, inputs):
            if isinstance(at, slice):
                at = torch.arange(len(x), device=x.device)[at]
            return images.gather(x, at, inputs, drawn)
    return inputs(tree.take(x, at), drawn, width)
