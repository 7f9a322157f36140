"""FEMNIST, characters with their writers: LEAF's json files, or a parquet file with a column of writers.

Caldas et al., LEAF: a benchmark for federated settings, 2018. Without a test part, one is split off as LEAF does it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep._util.text import one_line
from fedkeep.data.seeds import split_rng
from fedkeep.data.sources import tables
from fedkeep.data.sources.common import Missing, Options, Part, Raw
from fedkeep.errors import DataError

N_CLASSES = 62
_WHOLE = ("all_data", "sampled_data", "rem_user_data")
_INSIDE = (".", "data", "leaf/data/femnist/data")
_SHARE = 0.1  # LEAF's default


def folder(path: Path, options: Options) -> Raw:
    """Read what is there: train/*.json and test/*.json, json files not yet split, or parquet files."""
    options.only("femnist", "test", "test_writers", "x", "y", "ids")
    for inside in (path / name for name in _INSIDE):
        if _json(inside / "train"):
            test = _json(inside / "test")
            raw = Raw(_leaf(_json(inside / "train")), _leaf(test) if test else None, "femnist")
            return _whole(raw, options)
        for found in (*(_json(inside / name) for name in _WHOLE), _json(inside, "all_data*.json")):
            if found:
                return split(Raw(_leaf(found), None, "femnist"), options)
    if not tables.holds(path):
        raise Missing(f"{path} holds no json files of LEAF (train/*.json, test/*.json) and no train*.parquet")
    columns = Options(x=options.x, y=options.y, ids=options.ids or "writer_id")
    raw = tables.folder(path, columns)
    return _whole(raw, options)


def _whole(raw: Raw, options: Options) -> Raw:
    if raw.test is None:
        return split(raw, options)
    options.no_share(raw.name)
    return raw


def holds(path: Path) -> bool:
    """Say whether a folder holds LEAF's json files."""
    return bool(_json(path / "train") or _json(path / "all_data"))


def split(raw: Raw, options: Options) -> Raw:
    """Split off the test part as LEAF does: a share of each writer's examples, or all examples of a share of writers.

    A writer of a single example cannot be on both sides and is left out of the first kind of split.
    """
    ids, rng, share = raw.train.ids, split_rng(0, "test"), options.test or _SHARE
    assert ids is not None
    writers, owner = np.unique(ids, return_inverse=True)
    if options.test_writers:
        tested = rng.permutation(len(writers))[int((1 - share) * len(writers)) :]
        test = np.flatnonzero(np.isin(owner, tested))
        train = np.setdiff1d(np.arange(len(ids)), test)
    else:
        order, sizes = np.argsort(owner, kind="stable"), np.bincount(owner)
        shuffled = [rng.permutation(p) for p in np.split(order, np.cumsum(sizes)[:-1]) if len(p) > 1]
        kept = [1 if len(p) == 2 else max(1, int((1 - share) * len(p))) for p in shuffled]
        train, test = (
            np.sort(np.concatenate([*pieces, order[:0]]))
            for pieces in (
                [p[:k] for p, k in zip(shuffled, kept, strict=True)],
                [p[k:] for p, k in zip(shuffled, kept, strict=True)],
            )
        )
    return dataclasses.replace(raw, train=raw.train.take(train), test=raw.train.take(test))


def _json(path: Path, pattern: str = "*.json") -> list[Path]:
    return sorted(path.glob(pattern)) if path.is_dir() else []


def _leaf(paths: list[Path]) -> Part:
    written = []
    for path in paths:
        for writer, (x, y) in _writers(path).items():
            if len(x) != len(y):
                raise DataError(f"{path}: writer {writer} has {len(x)} images and {len(y)} labels")
            written.append((x, y, np.full(len(y), writer)))
    if not written:
        raise DataError(f"{paths[0].parent} holds no examples")
    return Part(*(np.concatenate(arrays) for arrays in zip(*written, strict=True)))


def _writers(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read a json file. A writer becomes arrays as soon as it is parsed: as Python numbers it is 32 times as big."""
    try:
        with path.open() as file:
            content = json.load(file, object_hook=_as_arrays)
        writers = {str(writer): data for writer, data in content["user_data"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DataError(f"{path} cannot be read as a json file of LEAF: {one_line(error)}") from error
    if wrong := [writer for writer, data in writers.items() if not isinstance(data, tuple)]:
        raise DataError(f"{path}: writer {wrong[0]} lacks images x or labels y")
    return {writer: data for writer, data in writers.items() if len(data[1])}


def _as_arrays(found: dict[str, Any]) -> Any:
    if not {"x", "y"} <= found.keys():
        return found
    x = np.asarray(found["x"], np.float32)
    if len(found["y"]) and (x.ndim != 2 or x.shape[1] != 28 * 28):
        raise ValueError(f"images are lists of 784 numbers, not of shape {x.shape[1:]}")
    if x.size and not (x.min() >= 0 and x.max() <= 1):
        raise ValueError("pixels must lie between 0 and 1")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, 1, 28, 28), np.asarray(found["y"], np.int64)
