"""Random augmentation on the device, with every parameter drawn beforehand in the plan.

So a client sees the same augmented images in every runtime, and nothing random happens inside `vmap`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeep.errors import DataError
from fedkeep.tree import Tree


@dataclass(frozen=True)
class Augment:
    """Crop out of a zero-padded image, flip left to right, cut out a square: each off by default.

    Crop and flip act on the raw image (padding is black), the cutout on the normalised one (its square is the mean),
    as in the usual torchvision pipelines.
    """

    crop: int = 0
    flip: bool = False
    cutout: int = 0

    def __post_init__(self) -> None:
        for name in ("crop", "cutout"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise DataError(f"augment: {name} is a size in pixels, not {size!r}")
        if not isinstance(self.flip, bool):
            raise DataError(f"augment: flip is True or False, not {self.flip!r}")

    def __bool__(self) -> bool:
        return bool(self.crop or self.flip or self.cutout)

    def draw(self, rng: np.random.Generator, steps: int, width: int, image: tuple[int, int]) -> dict[str, np.ndarray]:
        """Draw the parameters of every example of every step, [S, B] each."""
        size = (steps, width)
        drawn = {}
        if self.crop:
            drawn["top"] = rng.integers(0, 2 * self.crop + 1, size)
            drawn["left"] = rng.integers(0, 2 * self.crop + 1, size)
        if self.flip:
            drawn["flip"] = rng.integers(0, 2, size)
        if self.cutout:
            drawn["row"] = rng.integers(0, image[0], size)
            drawn["column"] = rng.integers(0, image[1], size)
        return drawn

    def crop_and_flip(self, x: Tensor, drawn: Tree) -> Tensor:
        """Crop and flip raw images [N, C, H, W]; the parameters are [N]."""
        if not (self.crop or self.flip):
            return x
        n, channels, height, width = x.shape
        rows = torch.arange(height, device=x.device).expand(n, height)
        columns = torch.arange(width, device=x.device).expand(n, width)
        if self.flip:
            columns = torch.where(drawn["flip"].bool()[:, None], columns.flip(1), columns)
        if self.crop:
            x = F.pad(x, (self.crop,) * 4)
            rows, columns = rows + drawn["top"][:, None], columns + drawn["left"][:, None]
        example = torch.arange(n, device=x.device)[:, None, None, None]
        channel = torch.arange(channels, device=x.device)[None, :, None, None]
        return x[example, channel, rows[:, None, :, None], columns[:, None, None, :]]

    def cut_out(self, x: Tensor, drawn: Tree) -> Tensor:
        """Zero a square of normalised images [N, C, H, W], centred where the plan says, clipped at the border."""
        if not self.cutout:
            return x
        half = self.cutout // 2

        def outside(centre: Tensor, length: int) -> Tensor:
            low = centre[:, None] - half
            at = torch.arange(length, device=x.device)
            return (at < low) | (at >= low + self.cutout)

        keep = outside(drawn["row"], x.shape[2])[:, :, None] | outside(drawn["column"], x.shape[3])[:, None, :]
        return x * keep[:, None]


@dataclass(frozen=True)
class InputPipeline:
    """The way from stored examples to what the model is given: bytes to [0, 1], augmented, normalised, in dtype."""

    dtype: torch.dtype = torch.float32
    mean: Tensor | None = None
    std: Tensor | None = None
    augment: Augment | None = None

    @property
    def without_augmentation(self) -> InputPipeline:
        """The same without augmentation."""
        return replace(self, augment=None)

    def __call__(self, x: Tensor | Tree, drawn: Tree | None = None) -> Tensor | Tree:
        """Convert a batch; without `drawn`, as for evaluation, nothing is augmented."""
        if isinstance(x, dict):
            return {key: self._number(value) for key, value in x.items()}
        if self.augment is not None and drawn:
            x = self.augment.crop_and_flip(x, drawn)
        x = self._number(x)
        if self.mean is not None and self.std is not None:
            x = (x - self.mean.to(x)) / self.std.to(x)
        if self.augment is not None and drawn:
            x = self.augment.cut_out(x, drawn)
        return x

    def _number(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            return x.to(self.dtype) / 255
        return x.to(self.dtype) if x.is_floating_point() else x
