"""FEMNIST, characters with their writers: LEAF's JSON files, or a parquet file with a column of writers.

Caldas et al., LEAF: a benchmark for federated settings, 2018. If there is no test set, one is split off as in LEAF.
"""

from __future__ import annotations

import dataclasses
import json
import string
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep._util.text import one_line
from fedkeep.data.seeds import split_rng
from fedkeep.data.sources import tables
from fedkeep.data.sources.common import Missing, Options, Part, Raw
from fedkeep.errors import DataError

CLASS_NAMES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
_UNSPLIT = ("all_data", "sampled_data", "rem_user_data")  # LEAF's folders of data without a test set
_SUBFOLDERS = (".", "data", "leaf/data/femnist/data")
_TEST_SHARE = 0.1  # LEAF's default


def recognises(path: Path) -> bool:
    """Return whether a folder contains LEAF's JSON files."""
    return bool(_json_files(path / "train") or _json_files(path / "all_data"))


def read_folder(path: Path, options: Options) -> Raw:
    """Read train/*.json and test/*.json, or JSON files without a test set, or parquet files."""
    options.reject_except("femnist", "test", "test_writers", "x", "y", "ids")
    for folder in (path / name for name in _SUBFOLDERS):
        if train := _json_files(folder / "train"):
            test = _json_files(folder / "test")
            test_part = _read_leaf(test, options) if test else None
            return with_test(Raw(_read_leaf(train, options), test_part, "femnist"), options)
        for unsplit in (*(_json_files(folder / name) for name in _UNSPLIT), _json_files(folder, "all_data*.json")):
            if unsplit:
                return with_test(Raw(_read_leaf(unsplit, options), None, "femnist"), options)
    if not tables.recognises(path):
        raise Missing(
            f"{path} has no JSON files of LEAF (train/*.json, test/*.json) and no train*.parquet", key=str(path)
        )
    columns = Options(x=options.x, y=options.y, ids=options.ids or "writer_id")
    return with_test(tables.read_folder(path, columns), options)


def with_test(raw: Raw, options: Options) -> Raw:
    """Return the data with a test set, split off if there is none."""
    if raw.test is None:
        return _split_off_test(raw, options)
    options.reject_test_share(raw.name)
    return raw


def _split_off_test(raw: Raw, options: Options) -> Raw:
    """Split off a test set as LEAF does: some examples of every writer, or all examples of some writers.

    A writer with a single example cannot be in both parts, and is left out of the first kind of split.
    """
    ids, rng, share = raw.train.ids, split_rng(0, "test"), options.test or _TEST_SHARE
    assert ids is not None
    writers, owner = np.unique(ids, return_inverse=True)
    if options.test_writers:
        test_writers = rng.permutation(len(writers))[int((1 - share) * len(writers)) :]
        test = np.flatnonzero(np.isin(owner, test_writers))
        train = np.setdiff1d(np.arange(len(ids)), test)
    else:
        order, sizes = np.argsort(owner, kind="stable"), np.bincount(owner)
        shuffled = [rng.permutation(p) for p in np.split(order, np.cumsum(sizes)[:-1]) if len(p) > 1]
        n_train = [1 if len(p) == 2 else max(1, int((1 - share) * len(p))) for p in shuffled]
        train, test = (
            np.sort(np.concatenate([*pieces, order[:0]]))
            for pieces in (
                [p[:k] for p, k in zip(shuffled, n_train, strict=True)],
                [p[k:] for p, k in zip(shuffled, n_train, strict=True)],
            )
        )
    return dataclasses.replace(raw, train=raw.train.take(train), test=raw.train.take(test))


def _json_files(path: Path, pattern: str = "*.json") -> list[Path]:
    return sorted(file for file in path.glob(pattern) if file.is_file()) if path.is_dir() else []


def _read_leaf(paths: list[Path], options: Options) -> Part:
    parts = []
    for path in paths:
        options.require_memory(path.stat().st_size, path)
        for writer, (x, y) in _read_writers(path).items():
            if len(x) != len(y):
                raise DataError(
                    f"{path}: writer {writer} has {len(x)} images, but {len(y)} labels", key=str(path), value=writer
                )
            parts.append((x, y, np.full(len(y), writer, object)))
    if not parts:
        raise DataError(f"{paths[0].parent} contains no examples", key=str(paths[0].parent))
    return Part(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _read_writers(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read the images and labels of each writer from a JSON file.

    Each writer is converted to arrays while the file is parsed: as Python numbers it takes 32 times the memory.
    """
    try:
        with path.open() as file:
            content = json.load(file, object_hook=_to_arrays)
        writers = {str(writer): data for writer, data in content["user_data"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as a JSON file of LEAF: {one_line(error)}", key=str(path)) from error
    if wrong := [writer for writer, data in writers.items() if not isinstance(data, tuple)]:
        raise DataError(f"{path}: writer {wrong[0]} has no images x or no labels y", key=str(path), value=wrong[0])
    return {writer: data for writer, data in writers.items() if len(data[1])}


def _to_arrays(parsed: dict[str, Any]) -> Any:
    if not {"x", "y"} <= parsed.keys():
        return parsed
    x, y = np.asarray(parsed["x"], np.float32), np.asarray(parsed["y"])
    if y.ndim != 1 or (len(y) and y.dtype.kind not in "iu"):
        raise ValueError("labels must be a list of whole numbers")
    if len(parsed["y"]) and (x.ndim != 2 or x.shape[1] != 28 * 28):
        raise ValueError(f"images must be lists of 784 numbers, not of shape {x.shape[1:]}")
    if x.size and not (x.min() >= 0 and x.max() <= 1):
        raise ValueError("pixels must be between 0 and 1")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, 1, 28, 28), y.astype(np.int64)
