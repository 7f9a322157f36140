"""Data augmentation, and the conversion of stored examples to model inputs.

Augmentation runs on the device. Its random parameters are drawn beforehand, in the client's plan. So a client sees the
same augmented images in every engine, and nothing random happens inside `vmap`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeep._util.validate import require_bool, require_choice, require_whole
from fedkeep.data.texts import Texts
from fedkeep.errors import DataError
from fedkeep.tree import Tree

PADDINGS = ("zeros", "reflect")
_MAX_PIXELS = 1024  # of padding on a side, and of the side of a square


@dataclass(frozen=True)
class Augment:
    """Random crop, horizontal flip and cutout for images; each is off by default.

    Crop and flip work on the raw image, so zero padding is black. Cutout works on the normalised image, so its square
    has the mean colour. Both are usual in torchvision pipelines. With padding="reflect" the padding mirrors the image
    at its border pixels, which are not repeated.
    """

    crop: int = 0  # pixels of padding on each side before a crop of the original size
    flip: bool = False
    cutout: int = 0  # side of the square in pixels
    padding: str = "zeros"  # of the crop: "zeros" or "reflect"

    def __post_init__(self) -> None:
        for name in ("crop", "cutout"):
            size = require_whole(f"augment.{name}", getattr(self, name), low=0, high=_MAX_PIXELS, error=DataError)
            object.__setattr__(self, name, size)
        require_bool("augment.flip", self.flip, DataError)
        require_choice("augment.padding", self.padding, PADDINGS, error=DataError)
        if self.padding != "zeros" and not self.crop:
            raise DataError(
                f"augment.padding = {self.padding!r} has no effect without augment.crop: set crop, such as crop = 4",
                key="augment.padding",
                value=self.padding,
            )

    def __bool__(self) -> bool:
        return bool(self.crop or self.flip or self.cutout)

    def largest_crop(self, image: tuple[int, int]) -> int:
        """Return the largest `crop` for images of this height and width: a reflection has one pixel less than these."""
        return max(image) if self.padding == "zeros" else max(min(image) - 1, 0)

    def draw(self, rng: np.random.Generator, steps: int, width: int, image: tuple[int, int]) -> dict[str, np.ndarray]:
        """Draw the random parameters of every example in every step, [S, B] each."""
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
        """Return raw images [N, C, H, W] cropped and flipped; each random parameter is [N]."""
        if not (self.crop or self.flip):
            return x
        n, channels, height, width = x.shape
        rows = torch.arange(height, device=x.device).expand(n, height)
        columns = torch.arange(width, device=x.device).expand(n, width)
        if self.flip:
            columns = torch.where(drawn["flip"].bool()[:, None], columns.flip(1), columns)
        if self.crop:
            rows, columns = rows + drawn["top"][:, None], columns + drawn["left"][:, None]
            if self.padding == "zeros":
                x = F.pad(x, (self.crop,) * 4)
            else:
                rows, columns = _reflected(rows - self.crop, height), _reflected(columns - self.crop, width)
        example = torch.arange(n, device=x.device)[:, None, None, None]
        channel = torch.arange(channels, device=x.device)[None, :, None, None]
        return x[example, channel, rows[:, None, :, None], columns[:, None, None, :]]

    def cut_out(self, x: Tensor, drawn: Tree) -> Tensor:
        """Return normalised images [N, C, H, W] with a square set to 0, clipped at the border."""
        if not self.cutout:
            return x
        half = self.cutout // 2

        def outside(centre: Tensor, length: int) -> Tensor:
            low = centre[:, None] - half
            position = torch.arange(length, device=x.device)
            return (position < low) | (position >= low + self.cutout)

        keep = outside(drawn["row"], x.shape[2])[:, :, None] | outside(drawn["column"], x.shape[3])[:, None, :]
        return x * keep[:, None]


def _reflected(position: Tensor, length: int) -> Tensor:
    """Return positions outside of 0 to length - 1, by less than that, mirrored at the border.

    >>> _reflected(torch.tensor([-2, -1, 0, 1, 2, 3, 4]), length=3).tolist()
    [2, 1, 0, 1, 2, 1, 0]
    """
    return length - 1 - (length - 1 - position.abs()).abs()


@dataclass(frozen=True)
class InputPipeline:
    """Conversion of stored examples to model inputs.

    Bytes are scaled to [0, 1], augmented, normalised with `mean` and `std`, and converted to `dtype`. Texts are padded.
    """

    dtype: torch.dtype = torch.float32
    mean: Tensor | None = None
    std: Tensor | None = None
    augment: Augment | None = None

    @property
    def without_augmentation(self) -> InputPipeline:
        """The same pipeline without augmentation."""
        return replace(self, augment=None)

    def __call__(self, x: Tensor | Tree | Texts, drawn: Tree | None = None, width: int | None = None) -> Tensor | Tree:
        """Return a batch as model inputs. Without `drawn`, as in evaluation, nothing is augmented.

        `width` is that of a batch of texts; by default that of its longest.
        """
        if isinstance(x, Texts):
            return x.pad(width)
        if isinstance(x, dict):
            return {key: self._to_float(value) for key, value in x.items()}
        if self.augment is not None and drawn:
            x = self.augment.crop_and_flip(x, drawn)
        x = self._to_float(x)
        if self.mean is not None and self.std is not None:
            x = (x - self.mean.to(x)) / self.std.to(x)
        if self.augment is not None and drawn:
            x = self.augment.cut_out(x, drawn)
        return x

    def _to_float(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            return x.to(self.dtype) / 255
        return x.to(self.dtype) if x.is_floating_point() else x
