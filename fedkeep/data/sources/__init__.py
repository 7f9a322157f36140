"""Where data sets come from: a name, a file, a folder, or the Hugging Face hub. `docs/data.md` has them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep._util.text import did_you_mean
from fedkeep.data.dataset import Dataset, from_arrays
from fedkeep.data.sources import arrays, cifar, femnist, hub, idx, images, named, tables
from fedkeep.data.sources.common import Missing, Options, Raw, hold_out
from fedkeep.errors import DataError

__all__ = ["load"]

Source = str | Path | Sequence[Any] | Mapping[str, Any]
_ALONE = 0.2  # of a single table, which is everything there is


def load(
    source: Source,
    *,
    root: str | Path | None = None,
    public: float | int | None = None,
    public_ids: int | None = None,
    min_per_id: int | None = None,
    validation: float = 0.25,
    seed: int = 0,
    n_classes: int | None = None,
    mean: Any = None,
    std: Any = None,
    **options: Any,
) -> Dataset:
    """Load a data set, and split off the server's public part if one is asked for.

    `source` is a name (digits, mnist, cifar10, cifar100, cinic10, tiny_imagenet, femnist), an .npz, .parquet or .csv
    file, a pair (or dict) of files to train and to test with, a folder (IDX files, CIFAR binary batches, images by
    class, tables), or "hf:NAME" for a Hugging Face data set. `root` is where named data sets are: else
    $FEDKEEP_DATA, else ~/.cache/fedkeep.

    `public` is a share of the training data, or a count per class; `public_ids` a number of owners (writers) whose
    examples it is made of instead; `seed` decides which it takes. `min_per_id` leaves out owners with fewer examples.
    `n_classes` is compared with what is found. `mean` and `std` replace the usual normalisation of a named data set.
    The other options say how to read: size, x, y, ids, tokenizer, splits, test, first_label, merge_validation,
    test_writers.

    >>> data = load("digits", public=0.1)
    >>> data.n_classes, len(data.y_train) + len(data.public.y) + len(data.public.y_val), len(data.y_test)
    (10, 1438, 359)
    """
    how = Options.parse(options)
    raw = _count_from_zero(_with_test(_read(source, root, how), how), how, n_classes)
    _compare(raw, n_classes)
    assert raw.test is not None
    try:
        data = from_arrays(
            raw.train.x,
            raw.train.y,
            raw.test.x,
            raw.test.y,
            n_classes=raw.n_classes if n_classes is None else n_classes,
            mean=raw.mean if mean is None else mean,
            std=raw.std if std is None else std,
            ids=raw.train.ids,
            test_ids=raw.test.ids,
            name=raw.name,
        )
    except DataError as error:
        raise DataError(f"{raw.name}: {error}") from error
    if public is not None and public_ids is not None:
        raise DataError("public and public_ids are two ways to choose the same: give one of them")
    data = data if min_per_id is None else data.drop_small_owners(min_per_id)
    if public_ids is not None:
        return data.with_public(public_ids, validation, seed, by_id=True)
    return data if public is None else data.with_public(public, validation, seed)


def _read(source: Source, root: str | Path | None, options: Options) -> Raw:
    if isinstance(source, Mapping | tuple | list):
        return tables.files(*_pair(source), options)
    if not isinstance(source, str | Path):
        raise DataError(
            f"a source is a name, a path, or a pair of files, not {type(source).__name__}: for arrays there is "
            "fk.data.from_arrays"
        )
    if isinstance(source, str):
        if source.startswith(hub.PREFIX):
            return hub.load(source.removeprefix(hub.PREFIX), options)
        name = named.canonical(source)
        if name is not None:
            return named.load(name, root, options)
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path, options)
    return _file(path, source, options)


def _file(path: Path, source: str | Path, options: Options) -> Raw:
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return arrays.npz(path, options)
    if tables.is_table(path):
        return hold_out(tables.files([path], None, options), options.test or _ALONE)
    if suffix in (".pkl", ".pickle", ".pt", ".pth"):
        raise DataError(f"{path} is a pickle, and pickles can run code: they are never loaded; save arrays as .npz")
    if path.is_file():
        raise DataError(f"{path} is not a file that is read by itself (valid: .npz, .parquet, .csv, or its folder)")
    if suffix or isinstance(source, Path) or "/" in source or "\\" in source:
        raise Missing(f"there is no file or folder {path}")
    raise DataError(f"unknown data set {source!r}: {did_you_mean(source, [*named.NAMES, 'hf:NAME', 'FILE', 'FOLDER'])}")


def _folder(path: Path, options: Options) -> Raw:
    """Recognise what a folder holds."""
    kind = cifar.holds(path)
    if kind is not None:
        return cifar.folder(path, options, kind)
    if idx.holds(path):
        return idx.folder(path, options)
    if (path / "val" / "val_annotations.txt").is_file():
        return named.tiny_imagenet(path, options)
    if femnist.holds(path):
        return femnist.folder(path, options)
    if images.has_parts(path):
        return images.folder(path, options)
    if tables.holds(path):
        return tables.folder(path, options)
    if images.has_classes(path):  # after tables, which may name the images of a folder beside them
        return images.folder(path, options)
    raise Missing(
        f"{path} holds nothing that is recognised: IDX files, CIFAR binary batches, train/<class>/ and test/<class>/ "
        "of images, or tables train*.parquet (or csv) and test*"
    )


def _pair(source: Sequence[Any] | Mapping[str, Any]) -> tuple[list[Path], list[Path]]:
    parts = dict(source) if isinstance(source, Mapping) else dict(zip(("train", "test"), source, strict=False))
    if set(parts) != {"train", "test"} or len(source) != 2:
        raise DataError(
            f"files come as a pair (train, test) or as {{'train': ..., 'test': ...}}, not as {list(source)!r}"
        )
    train, test = (_paths(parts[part]) for part in ("train", "test"))
    return train, test


def _paths(value: Any) -> list[Path]:
    paths = [value] if isinstance(value, str | Path) else value
    if not isinstance(paths, list | tuple) or not paths or not all(isinstance(p, str | Path) for p in paths):
        raise DataError(f"a part is a file or a list of files, not {value!r}: for arrays there is fk.data.from_arrays")
    return [Path(path).expanduser() for path in paths]


def _with_test(raw: Raw, options: Options) -> Raw:
    """Split a test part off where there is none, if that is asked for: it may just be missing."""
    if raw.test is not None:
        return raw
    if options.test is None:
        raise DataError(f"{raw.name} has no test part: give one, or test=0.2 to hold out that share of each class")
    return hold_out(raw, options.test)


def _count_from_zero(raw: Raw, options: Options, n_classes: int | None) -> Raw:
    """Move labels that start elsewhere; refuse a class 0 that never occurs, unless the classes are known."""
    first = options.first_label or 0
    if first and raw.numbered:
        raw = raw.map(lambda part: dataclasses.replace(part, y=np.asarray(part.y).astype(np.int64) - first))
    if raw.n_classes is None and n_classes is None and raw.numbered:
        lowest = int(min(y.min() for y in raw.classes))
        if lowest > 0:
            raise DataError(
                f"{raw.name}: the lowest label is {lowest + first}, but classes count from 0: give "
                f"first_label={lowest + first}, or n_classes= if class 0 has no examples"
            )
    return raw


def _compare(raw: Raw, n_classes: int | None) -> None:
    """Refuse a number of classes that is not the one found."""
    if n_classes is None:
        return
    if raw.n_classes is not None and raw.n_classes != n_classes:
        raise DataError(f"n_classes = {n_classes}, but {raw.name} has {raw.n_classes} classes")
    if raw.n_classes is None and raw.numbered:
        low, high = int(min(y.min() for y in raw.classes)), int(max(y.max() for y in raw.classes))
        if high + 1 != n_classes:
            raise DataError(f"n_classes = {n_classes}, but {raw.name} has labels {low} to {high}: {high + 1} classes")
