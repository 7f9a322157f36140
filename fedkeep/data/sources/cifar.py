"""CIFAR's binary format: records of one label (CIFAR-100: a coarse and a fine label) and 3,072 bytes of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeep._util.validate import require_choice
from fedkeep.data.sources.common import Missing, Options, Part, Raw
from fedkeep.errors import DataError

_PIXELS = 3 * 32 * 32
_LARGEST_NAMES = 100_000  # bytes of a file with class names


@dataclass(frozen=True)
class Format:
    """The files of a CIFAR version, and the labels of a record."""

    name: str
    train: tuple[str, ...]
    test: str
    labels: dict[str, int]  # the labels before the pixels of a record, with their numbers of classes
    subfolder: str  # the folder in the archive, as distributed
    pickled: tuple[str, ...]  # files and folders of the Python version
    archive: str
    names: dict[str, str]  # of the file with the class names, for each label


TEN_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TEN = Format(
    "CIFAR-10",
    tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    "test_batch.bin",
    {"label": 10},
    "cifar-10-batches-bin",
    ("cifar-10-batches-py", "batches.meta", "data_batch_1", "test_batch"),
    "cifar-10-binary.tar.gz",
    {"label": "batches.meta.txt"},
)
HUNDRED = Format(
    "CIFAR-100",
    ("train.bin",),
    "test.bin",
    {"coarse_label": 20, "fine_label": 100},
    "cifar-100-binary",
    ("cifar-100-python",),
    "cifar-100-binary.tar.gz",
    {"coarse_label": "coarse_label_names.txt", "fine_label": "fine_label_names.txt"},
)


def recognises(path: Path) -> Format | None:
    """Return which CIFAR a folder contains, or None.

    The pickled Python version is recognised as well, so that the error can name the binary version.
    """
    for kind in (TEN, HUNDRED):
        files = (*kind.train, kind.test)
        if any((path / folder / name).is_file() for folder in (kind.subfolder, "") for name in files):
            return kind
        if _has_pickles(path, kind):
            return kind
    return None


def read_folder(path: Path, options: Options, kind: Format) -> Raw:
    """Read all batches of a folder, or of the subfolder that unpacking the archive creates."""
    options.reject_except(kind.name, "y")
    label = _choose_label(kind, options.y)
    folder = path / kind.subfolder if (path / kind.subfolder).is_dir() else path
    missing = [name for name in (*kind.train, kind.test) if not (folder / name).is_file()]
    if missing and _has_pickles(path, kind):
        raise Missing(
            f"{path} contains the Python version of {kind.name}, which is pickled. Pickles can run code and are never "
            f"loaded; download the binary version, {kind.archive}",
            key=str(path),
            valid=[kind.archive],
        )
    if missing:
        raise Missing(f"{folder} has no {', '.join(missing)}", key=str(folder), valid=(*kind.train, kind.test))
    options.require_memory(sum((folder / name).stat().st_size for name in (*kind.train, kind.test)), folder)
    parts = [[_read_batch(folder / name, kind, label) for name in names] for names in (kind.train, (kind.test,))]
    names = _read_class_names(folder / kind.names[label], kind.labels[label])
    return Raw(_join(parts[0]), _join(parts[1]), path.name, kind.labels[label], class_names=names)


def _read_class_names(path: Path, n_classes: int) -> list[str] | None:
    """Return the class names of the file that comes with the batches, one per line; None if it has no such names."""
    if not path.is_file() or path.stat().st_size > _LARGEST_NAMES:
        return None
    names = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return names if len(set(names)) == len(names) == n_classes else None


def _has_pickles(path: Path, kind: Format) -> bool:
    return path.name in kind.pickled or any((path / name).exists() for name in kind.pickled)


def _join(batches: list[tuple[np.ndarray, np.ndarray]]) -> Part:
    """Copy the memory-mapped batches, once, into one array."""
    x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    return Part(x.reshape(-1, 3, 32, 32), y)


def _choose_label(kind: Format, y: str | None) -> str:
    if y is None:
        return list(kind.labels)[-1]
    return require_choice("y", y, kind.labels, f"label of {kind.name}", DataError)


def _read_batch(path: Path, kind: Format, label: str) -> tuple[np.ndarray, np.ndarray]:
    width = len(kind.labels) + _PIXELS
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    if len(data) % width or not len(data):
        raise DataError(
            f"{path} is damaged: its {len(data)} bytes are not a whole number of {kind.name} records of {width} bytes",
            key=str(path),
            value=len(data),
        )
    records = data.reshape(-1, width)
    for column, (name, classes) in enumerate(kind.labels.items()):
        wrong = np.flatnonzero(records[:, column] >= classes)
        if len(wrong):
            raise DataError(
                f"{path} is damaged: in record {wrong[0]}, {name} is {records[wrong[0], column]}, but {kind.name} has "
                f"0 to {classes - 1}",
                key=str(path),
                value=int(records[wrong[0], column]),
            )
    return records[:, len(kind.labels) :], records[:, list(kind.labels).index(label)]
