"""Sources of data sets: names, files, folders and the Hugging Face hub. `docs/data.md` lists them all."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep._util.text import did_you_mean
from fedkeep._util.validate import require_bool
from fedkeep.data.dataset import Dataset, from_arrays
from fedkeep.data.normalise import check_normalise
from fedkeep.data.public_options import check_public_options
from fedkeep.data.sources import arrays, cifar, femnist, generated, hub, idx, images, named, objects, tables
from fedkeep.data.sources.common import Missing, Options, Raw, errors_named, hold_out, to_path
from fedkeep.errors import DataError

__all__ = ["load"]

_FILES = (".npz", *tables.SUFFIXES)
_PICKLES = (".pkl", ".pickle", ".pt", ".pth")

Source = Any  # a name, a path, an object of another library, or a pair or dict of paths or objects
_SINGLE_TABLE_TEST = 0.2  # the default test share of a single table


def load(
    source: Source,
    *,
    root: str | Path | None = None,
    public: float | int | None = None,
    public_ids: int | None = None,
    public_alpha: float | None = None,
    public_only: bool = False,
    min_per_id: int | None = None,
    held_out: float | None = None,
    validation: float = 0.25,
    seed: int = 0,
    n_classes: int | None = None,
    mean: Any = None,
    std: Any = None,
    normalise: str | None = None,
    **options: Any,
) -> Dataset:
    """Load a data set and, with `public` or `public_ids`, move a part of it to the server's public set.

    `source` is one of

    - a name: digits, squares, wards, mnist, cifar10, cifar100, cinic10, tiny_imagenet, femnist, sst5, ag_news
    - an .npz, .parquet, .csv or .jsonl file, or a pair (or dict) of tables to train and to test on
    - a folder: IDX files, CIFAR binary batches, images by class, tables
    - a pandas or polars DataFrame, an Arrow table, a Hugging Face Dataset or DatasetDict, a torch Dataset whose items
      are pairs (example, class) or dicts, or a pair (or dict) of these to train and to test on
    - "hf:NAME" for a Hugging Face data set
    - "generated:NAME" for random data of the size of a named data set
    - a data set, to which the options below apply

    `root` is the folder of the named data sets; the default is $FEDKEEP_DATA, else ~/.cache/fedkeep.

    `public` is a fraction of the training examples, or a number of examples per class. `public_ids` is a number of
    owners (writers) whose examples all become public instead. `validation` is the fraction of the public set that is
    held out, and `seed` decides which examples are chosen. With `public_alpha`, the classes of a fraction are
    unbalanced: their proportions are drawn from Dirichlet(public_alpha). With `public_only`, the clients have the
    training part of the public set and nothing else. `min_per_id` leaves out owners with fewer examples.

    `held_out` is a fraction of each class of the training examples that takes the place of the test set, so that
    hyperparameters can be chosen without it.

    `n_classes` must agree with the data. `mean` and `std` replace the usual normalisation of a named data set;
    `normalise="standard"` uses those of the training examples, per feature. The other options control reading: size, x,
    y, text, label, classes, ids, tokenizer, max_length, splits, test, first_label, merge_validation, test_writers,
    max_gb.

    >>> data = load("digits", public=0.1)
    >>> data.n_classes, len(data.y_train) + len(data.public.y) + len(data.public.y_val), len(data.y_test)
    (10, 1438, 359)
    """
    name = source if isinstance(source, str | Path) else "source"
    require_bool("public_only", public_only, DataError)
    check_normalise({"normalise": normalise, "mean": mean, "std": std})
    of_public_set = {"public": public, "public_ids": public_ids}
    check_public_options({**of_public_set, "public_alpha": public_alpha, "public_only": public_only})
    with errors_named(name):
        data = _load(source, root, n_classes, mean, std, options)
        data = data if held_out is None else data.with_held_out_test(held_out)
        data = data if min_per_id is None else data.drop_small_owners(min_per_id)
        data = _with_public(data, public, public_ids, public_alpha, validation, seed)
        data = data.only_public() if public_only else data
        return data if normalise is None else data.standardised()


def _load(
    source: Source,
    root: str | Path | None,
    n_classes: int | None,
    mean: Any,
    std: Any,
    options: dict[str, Any],
) -> Dataset:
    parsed = Options.parse(options, [name for name in inspect.signature(load).parameters if name != "options"])
    if isinstance(source, Dataset):
        if given := [*options, *(name for name, value in (("mean", mean), ("std", std)) if value is not None)]:
            raise DataError(f"the option {given[0]} does not apply to a data set that is loaded", key=given[0])
        return source
    raw = _number_from_zero(_with_test(_read(source, root, parsed), parsed), parsed, n_classes)
    _require_n_classes(raw, n_classes)
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
            class_names=_class_names(raw, parsed),
            name=raw.name,
        )
    except DataError as error:
        raise error.converted(DataError, f"{raw.name}: {error}") from error
    return data if raw.feature_names is None else dataclasses.replace(data, feature_names=tuple(raw.feature_names))


def _class_names(raw: Raw, options: Options) -> Sequence[str] | None:
    """Return the names of the classes: the option `classes`, else those that the source declares, if they are names."""
    if options.classes is not None:
        return list(options.classes)
    names = [str(name) for name in raw.class_names or ()]
    return names if names and all(name.strip() for name in names) and len(set(names)) == len(names) else None


def _with_public(
    data: Dataset,
    public: float | int | None,
    public_ids: int | None,
    alpha: float | None,
    validation: float,
    seed: int,
) -> Dataset:
    if public_ids is not None:
        return data.with_public(public_ids, validation, seed, by_id=True, alpha=alpha)
    if public is not None:
        return data.with_public(public, validation, seed, alpha=alpha)
    return data


def _read(source: Source, root: str | Path | None, options: Options) -> Raw:
    if objects.recognises(source):
        raw = objects.read(source, options)
        return raw if raw.test is not None else hold_out(raw, options.test or _SINGLE_TABLE_TEST)
    if isinstance(source, Mapping | tuple | list):
        return tables.read_files(*_parse_pair(source), options)
    if not isinstance(source, str | Path):
        kind = type(source).__name__
        raise DataError(
            f"source must be a name, a path, {objects.KINDS}, or a pair of files or objects, not {kind}; for arrays "
            "use fk.data.from_arrays",
            key="source",
            value=kind,
        )
    if isinstance(source, str):
        if source.startswith(hub.PREFIX):
            return hub.read(source.removeprefix(hub.PREFIX), options)
        if source.startswith(generated.PREFIX):
            return generated.read(source.removeprefix(generated.PREFIX), options)
        name = named.canonical_name(source)
        if name is not None:
            return named.read(name, root, options)
    path = to_path(source, "source")
    if path.is_dir():
        return _read_folder(path, options)
    return _read_file(path, source, options)


def _read_file(path: Path, source: str | Path, options: Options) -> Raw:
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return arrays.read_npz(path, options)
    if tables.is_table(path):
        return hold_out(tables.read_files([path], None, options), options.test or _SINGLE_TABLE_TEST)
    if suffix in _PICKLES:
        raise DataError(
            f"{path} is a pickle. Pickles can run code and are never loaded; save the arrays as .npz",
            key=str(path),
            value=suffix,
            valid=_FILES,
        )
    if path.is_file():
        raise DataError(
            f"{path} cannot be loaded: a single file must be one of {', '.join(_FILES)}; for another format load its "
            "folder",
            key=str(path),
            value=suffix,
            valid=_FILES,
        )
    if suffix or isinstance(source, Path) or "/" in source or "\\" in source:
        raise Missing(f"there is no file or folder {path}", key=str(path))
    valid = [*named.NAMES, "hf:NAME", "generated:NAME", "FILE", "FOLDER"]
    raise DataError(
        f"unknown data set {source!r}: {did_you_mean(source, valid)}", key="source", value=source, valid=valid
    )


def _read_folder(path: Path, options: Options) -> Raw:
    """Read a folder with the reader that recognises its files."""
    kind = cifar.recognises(path)
    if kind is not None:
        return cifar.read_folder(path, options, kind)
    if idx.recognises(path):
        return idx.read_folder(path, options)
    if (path / "val" / "val_annotations.txt").is_file():
        return named.read_tiny_imagenet(path, options)
    if femnist.recognises(path):
        return femnist.read_folder(path, options)
    if images.has_train_folder(path):
        return images.read_folder(path, options)
    if tables.recognises(path):
        return tables.read_folder(path, options)
    if images.has_class_folders(path):  # after tables, because tables may refer to images in folders next to them
        return images.read_folder(path, options)
    raise Missing(
        f"{path} contains no known format: IDX files, CIFAR binary batches, images in train/<class>/ and "
        "test/<class>/, or tables train*.parquet (or csv) and test*",
        key=str(path),
    )


def _parse_pair(source: Sequence[Any] | Mapping[str, Any]) -> tuple[list[Path], list[Path]]:
    parts = dict(source) if isinstance(source, Mapping) else dict(zip(("train", "test"), source, strict=False))
    if set(parts) != {"train", "test"} or len(source) != 2:
        raise DataError(
            f"source must be a pair (train, test) or a dict {{'train': ..., 'test': ...}}, not {list(source)!r}",
            key="source",
            value=list(source),
            valid=("train", "test"),
        )
    train, test = (_parse_paths(part, parts[part]) for part in ("train", "test"))
    return train, test


def _parse_paths(part: str, value: Any) -> list[Path]:
    paths = [value] if isinstance(value, str | Path) else value
    if not isinstance(paths, list | tuple) or not paths or not all(isinstance(p, str | Path) for p in paths):
        raise DataError(
            f"source: {part} must be a file or a list of files, not {value!r}; for arrays use fk.data.from_arrays",
            key="source",
            value=value,
        )
    return [to_path(path, "source") for path in paths]


def _with_test(raw: Raw, options: Options) -> Raw:
    """Return the data with a test set. If there is none, it is split off only on request: files may be missing."""
    if raw.test is not None:
        return raw
    if options.test is None:
        raise DataError(
            f"{raw.name} has no test set: add one, or hold out a fraction of each class with test=0.2", key="test"
        )
    return hold_out(raw, options.test)


def _number_from_zero(raw: Raw, options: Options, n_classes: int | None) -> Raw:
    """Return the data with labels from 0. A missing class 0 raises an error, unless the number of classes is known."""
    first = options.first_label or 0
    if first and raw.has_whole_labels:
        raw = raw.map(lambda part: dataclasses.replace(part, y=np.asarray(part.y).astype(np.int64) - first))
    if raw.n_classes is None and n_classes is None and raw.has_whole_labels:
        lowest = int(min(y.min() for y in raw.labels))
        if lowest > 0:
            raise DataError(
                f"{raw.name}: the lowest label is {lowest + first}, but classes are numbered from 0: give "
                f"first_label={lowest + first}, or n_classes= if class 0 has no examples",
                key="first_label",
                value=options.first_label,
                valid=[lowest + first],
            )
    return raw


def _require_n_classes(raw: Raw, n_classes: int | None) -> None:
    """Raise if a given number of classes is not that of the data."""
    if n_classes is None:
        return
    actual, explanation = raw.n_classes, ""
    if actual is None and raw.has_whole_labels:
        low, high = int(min(y.min() for y in raw.labels)), int(max(y.max() for y in raw.labels))
        actual, explanation = high + 1, f" (labels {low} to {high})"
    if actual is not None and actual != n_classes:
        raise DataError(
            f"n_classes = {n_classes}, but {raw.name} has {actual} classes{explanation}",
            key="n_classes",
            value=n_classes,
            valid=[actual],
        )
