"""The binary format of CIFAR: records of one label (CIFAR-100: a coarse and a fine one) and 3,072 bytes of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeep.data.sources.common import Missing, Options, Part, Raw
from fedkeep.errors import DataError

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Format:
    """Which files there are, and which labels stand before the pixels of a record, with their numbers of classes."""

    name: str
    train: tuple[str, ...]
    test: str
    labels: dict[str, int]
    inside: str  # the folder in the archive, as distributed
    pickled: tuple[str, ...]  # what the Python version holds instead
    archive: str


TEN = Format(
    "CIFAR-10",
    tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    "test_batch.bin",
    {"label": 10},
    "cifar-10-batches-bin",
    ("cifar-10-batches-py", "batches.meta", "data_batch_1", "test_batch"),
    "cifar-10-binary.tar.gz",
)
HUNDRED = Format(
    "CIFAR-100",
    ("train.bin",),
    "test.bin",
    {"coarse_label": 20, "fine_label": 100},
    "cifar-100-binary",
    ("cifar-100-python",),
    "cifar-100-binary.tar.gz",
)


def holds(folder: Path) -> Format | None:
    """Say which CIFAR a folder holds, in either version: the pickled one is recognised so that it can be refused."""
    for kind in (TEN, HUNDRED):
        files = (*kind.train, kind.test)
        if any((folder / inside / name).is_file() for inside in (kind.inside, "") for name in files):
            return kind
        if any((folder / name).exists() for name in kind.pickled) or folder.name in kind.pickled:
            return kind
    return None


def folder(path: Path, options: Options, kind: Format) -> Raw:
    """Read all batches of a folder, or of the folder in it that the archive makes."""
    options.only(kind.name, "y")
    label = _which_label(kind, options.y)
    inside = path / kind.inside if (path / kind.inside).is_dir() else path
    missing = [name for name in (*kind.train, kind.test) if not (inside / name).is_file()]
    if missing and any((path / name).exists() or path.name == name for name in kind.pickled):
        raise Missing(
            f"{path} holds the Python version of {kind.name}, which is pickled, and pickles can run code: they are "
            f"never loaded; take the binary version, {kind.archive}"
        )
    if missing:
        raise Missing(f"{inside} lacks {', '.join(missing)}")
    parts = [[_batch(inside / name, kind, label) for name in names] for names in (kind.train, (kind.test,))]
    return Raw(_join(parts[0]), _join(parts[1]), path.name, kind.labels[label])


def _join(batches: list[tuple[np.ndarray, np.ndarray]]) -> Part:
    """Copy the mapped batches, once, into one array."""
    x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    return Part(x.reshape(-1, 3, 32, 32), y)


def _which_label(kind: Format, y: str | None) -> str:
    last = list(kind.labels)[-1]
    if y is not None and y not in kind.labels:
        raise DataError(f"{kind.name} has no label {y!r} (valid: {', '.join(kind.labels)})")
    return y or last


def _batch(path: Path, kind: Format, label: str) -> tuple[np.ndarray, np.ndarray]:
    width = len(kind.labels) + _PIXELS
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    if len(data) % width or not len(data):
        raise DataError(
            f"{path} is damaged: {len(data)} bytes are not a whole number of {kind.name} records of {width} bytes"
        )
    records = data.reshape(-1, width)
    for column, (name, classes) in enumerate(kind.labels.items()):
        wrong = np.flatnonzero(records[:, column] >= classes)
        if len(wrong):
            raise DataError(
                f"{path} is damaged: record {wrong[0]} has the {name.replace('_', ' ')} "
                f"{records[wrong[0], column]}, but {kind.name} has 0 to {classes - 1}"
            )
    return records[:, len(kind.labels) :], records[:, list(kind.labels).index(label)]
