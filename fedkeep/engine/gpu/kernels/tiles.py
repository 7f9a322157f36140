"""Tile sizes of the convolution kernels, as measured on an H200 (`benchmarks/kernel_tiles.py`)."""

from __future__ import annotations

from typing import NamedTuple

import triton


class Tile(NamedTuple):
    """How a kernel divides its work."""

    BM: int  # output pixels, or windows of them
    BK: int  # patch entries
    BO: int  # output channels
    warps: int
    stages: int  # of software pipelining
    programs: int = 528  # that a gradient of weights is divided into at most: enough to occupy a large GPU


def tile_size(size: int, largest: int) -> int:
    """Return the power of two that covers `size`, between 16, the least that `tl.dot` accepts, and `largest`."""
    return max(16, min(largest, triton.next_power_of_2(size)))


def forward_tile(channels: int, outputs: int, pool: bool) -> Tile:
    """Return the tile of a convolution, for input channels of images and output channels; with pooling, of windows."""
    BO = tile_size(outputs, 64)
    if channels < 16:  # entries of several pixels of the window at a time
        return Tile(64 if pool else 128, 32, BO, 4, 1)
    if pool:
        return Tile(64, 32 if channels % 32 == 0 else 16, BO, 4, 3)
    if channels % 32:
        return Tile(256, 16, BO, 4, 2)
    if BO == 64:
        return Tile(128, 64, BO, 4, 3) if channels % 64 == 0 else Tile(256, 32, BO, 4, 4)
    return Tile(256, 32, BO, 4, 2)


def gradient_tile(outputs: int, entries: int, pool: bool) -> Tile:
    """Return the tile of a weight gradient, for output channels and entries of a patch; with pooling, of windows."""
    BO, BK = tile_size(outputs, 64), tile_size(entries, 128)
    if pool:
        return Tile(16 if BO == 64 else 32, BK, BO, 4, 1)
    if BO == 16:
        return Tile(128, min(BK, 64), BO, 4, 1)
    return Tile(64, BK, BO, 4, 2 if BO == 64 else 1)
