"""IDX, the format of MNIST and its relatives: two zero bytes, a type, a number of axes, their lengths, the numbers."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from fedkeep._util.text import list_some, one_line
from fedkeep.data.sources.common import Missing, Options, Part, Raw
from fedkeep.errors import DataError

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP = b"\x1f\x8b"
_WORDS = {"train": ("train",), "test": ("t10k", "test")}


def read(path: Path) -> np.ndarray:
    """Read one IDX file, compressed or not: its first bytes tell, whatever its name."""
    data = _content(path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _TYPES or len(data) < 4 + 4 * data[3]:
        raise DataError(f"{path} is not an IDX file, or is damaged: its header makes no sense")
    dtype, axes = np.dtype(_TYPES[data[2]]), data[3]
    shape = tuple(np.frombuffer(data, ">u4", axes, 4).tolist())
    expected, found = math.prod(shape) * dtype.itemsize, len(data) - 4 - 4 * axes
    if expected != found:
        raise DataError(
            f"{path} is damaged: its header promises {'x'.join(map(str, shape))} values, {expected} bytes, but "
            f"{found} follow"
        )
    return np.frombuffer(data, dtype, offset=4 + 4 * axes).reshape(shape)


def holds(folder: Path) -> bool:
    """Say whether a folder looks like one of IDX files."""
    return any("idx" in path.name.lower() for path in folder.iterdir() if path.is_file())


def folder(path: Path, options: Options) -> Raw:
    """Read the four files of a folder: images and labels, to train and to test (t10k or test)."""
    options.only("IDX files", "first_label")
    return Raw(_part(path, "train"), _part(path, "test"), path.name)


def _part(folder: Path, part: str) -> Part:
    images, labels = _find(folder, part, "images"), _find(folder, part, "labels")
    x, y = read(images), read(labels)
    if x.ndim < 2:
        raise DataError(f"{images} holds numbers on {x.ndim} axes: images have at least two, and labels have one")
    if y.ndim != 1:
        raise DataError(f"{labels} holds numbers on {y.ndim} axes: labels have one")
    if len(x) != len(y):
        raise DataError(f"{images} holds {len(x)} images, but {labels.name} {len(y)} labels")
    return Part(x[:, None] if x.ndim == 3 else x, y)


def _find(folder: Path, part: str, what: str) -> Path:
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and "idx" in path.name.lower())
    fits = [n for n in names if what in n.lower() and any(word in n.lower() for word in _WORDS[part])]
    plain = [n for n in fits if not n.endswith(".gz")]
    fits = plain + [n for n in fits if n.endswith(".gz") and n.removesuffix(".gz") not in plain]
    if not fits:
        axes = {"images": 3, "labels": 1}[what]
        raise Missing(f"{folder} lacks {_WORDS[part][0]}-{what}-idx{axes}-ubyte (or .gz) (it has {list_some(names)})")
    if len(fits) > 1:
        raise DataError(f"{folder} holds several sets of IDX files, keep one: {list_some(fits)}")
    return folder / fits[0]


def _content(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == _GZIP else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read, it may be damaged: {one_line(error)}") from error
