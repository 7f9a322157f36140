"""IDX, the format of MNIST: two zero bytes, the data type, the number of axes, their lengths, the numbers."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

from fedkeep._util.text import list_some, one_line
from fedkeep.data.sources.common import Missing, Options, Part, Raw
from fedkeep.errors import DataError

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP = b"\x1f\x8b"
_MAX_AXES = 8
_CHUNK = 2**20  # bytes read at a time
_PART_NAMES = {"train": ("train",), "test": ("t10k", "test")}


def read_file(path: Path, options: Options) -> np.ndarray:
    """Read one IDX file. Its first bytes, not its name, decide whether it is decompressed first."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            return _read_array(cast(IO[bytes], gzip.GzipFile(fileobj=file)) if packed else file, path, options)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read, it may be damaged: {one_line(error)}", key=str(path)) from error


def _read_array(file: IO[bytes], path: Path, options: Options) -> np.ndarray:
    """Read as many bytes as the header announces, and no more."""
    head = file.read(4)
    sizes = file.read(4 * head[3]) if len(head) == 4 else b""
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _TYPES or len(sizes) < 4 * head[3]:
        raise DataError(f"{path} is not an IDX file, or is damaged: its header is invalid", key=str(path))
    dtype, shape = np.dtype(_TYPES[head[2]]), tuple(np.frombuffer(sizes, ">u4").tolist())
    if not 1 <= len(shape) <= _MAX_AXES:
        raise DataError(f"{path} must have 1 to {_MAX_AXES} axes, not {len(shape)}", key=str(path), value=len(shape))
    expected, data = math.prod(shape) * dtype.itemsize, bytearray()
    while len(data) <= expected and (chunk := file.read(min(_CHUNK, expected + 1 - len(data)))):
        data += chunk
        options.require_memory(len(data), path)
    if len(data) != expected:
        actual = f"it has {len(data)}" if len(data) < expected else "it has more"
        raise DataError(
            f"{path} is damaged: according to its header it has {'x'.join(map(str, shape))} values in {expected} "
            f"bytes, but {actual}",
            key=str(path),
            value=len(data),
        )
    return np.frombuffer(data, dtype).reshape(shape)


def recognises(path: Path) -> bool:
    """Return whether a folder contains files with IDX in their names."""
    return bool(_idx_names(path))


def read_folder(path: Path, options: Options) -> Raw:
    """Read the four files of a folder: images and labels, for training (train) and for testing (t10k or test)."""
    options.reject_except("IDX files", "first_label", "classes")
    return Raw(_read_part(path, "train", options), _read_part(path, "test", options), path.name)


def _read_part(folder: Path, part: str, options: Options) -> Part:
    images, labels = _file_of(folder, part, "images"), _file_of(folder, part, "labels")
    x, y = read_file(images, options), read_file(labels, options)
    if x.ndim < 2:
        raise DataError(
            f"{images} must have at least two axes, as images do, not {x.ndim}", key=str(images), value=x.ndim
        )
    if y.ndim != 1:
        raise DataError(f"{labels} must have one axis, as labels do, not {y.ndim}", key=str(labels), value=y.ndim)
    if len(x) != len(y):
        raise DataError(
            f"{images} has {len(x)} images, but {labels.name} has {len(y)} labels", key=str(images), value=len(x)
        )
    return Part(x[:, None] if x.ndim == 3 else x, y)


def _file_of(folder: Path, part: str, content: str) -> Path:
    """Return the file with the images or the labels of one part; an uncompressed one if there are both."""
    names = _idx_names(folder)
    matching = [n for n in names if content in n.lower() and any(name in n.lower() for name in _PART_NAMES[part])]
    unpacked = [n for n in matching if not n.endswith(".gz")]
    matching = unpacked + [n for n in matching if n.endswith(".gz") and n.removesuffix(".gz") not in unpacked]
    if not matching:
        axes = {"images": 3, "labels": 1}[content]
        expected = f"{_PART_NAMES[part][0]}-{content}-idx{axes}-ubyte"
        raise Missing(
            f"{folder} has no {expected} (or .gz) (it has {list_some(names)})",
            key=str(folder),
            value=names,
            valid=[expected, f"{expected}.gz"],
        )
    if len(matching) > 1:
        raise DataError(
            f"{folder} contains several sets of IDX files; keep one: {list_some(matching)}",
            key=str(folder),
            value=matching,
        )
    return folder / matching[0]


def _idx_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file() and "idx" in path.name.lower())
