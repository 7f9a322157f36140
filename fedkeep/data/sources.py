"""Where data sets come from: scikit-learn's digits (embedded), `.npz` files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedkeep.data.dataset import Dataset, from_arrays
from fedkeep.data.plan import split_rng
from fedkeep.errors import DataError, nearest

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


def load(source: str | Path, *, public: float | int | None = None, validation: float = 0.25, seed: int = 0) -> Dataset:
    """Load a data set by name or from an `.npz` file, and split off the server's public part if one is asked for.

    `public` is a share of the training data, or a count per class; `seed` decides which examples it takes.

    >>> data = load("digits", public=0.1)
    >>> data.n_classes, len(data.y_train) + len(data.public.y) + len(data.public.y_val), len(data.y_test)
    (10, 1438, 359)
    """
    if str(source).endswith(".npz"):
        data = _npz(Path(source))
    elif source in _NAMED:
        data = _NAMED[str(source)]()
    else:
        raise DataError(f"unknown data set {str(source)!r}: {nearest(str(source), [*_NAMED, 'FILE.npz'])}")
    return data if public is None else data.with_public(public, validation, seed)


def digits() -> Dataset:
    """Scikit-learn's 1,797 handwritten digits, 8x8 grey images in [0, 1]; a fixed fifth of each class is the test."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = torch.from_numpy(raw.images).float().unsqueeze(1) / 16
    y = raw.target
    rng = split_rng(0, "test")
    by_class = [rng.permutation(np.flatnonzero(y == c)) for c in range(10)]
    test = np.sort(np.concatenate([members[: round(len(members) / 5)] for members in by_class]))
    train = np.setdiff1d(np.arange(len(y)), test)
    return from_arrays(x[train], y[train], x[test], y[test], name="digits")


def _npz(path: Path) -> Dataset:
    """Read x_train, y_train, x_test, y_test (and, optionally, mean, std, n_classes) from a file."""
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # a damaged file fails in zlib, struct, zipfile or numpy, each in its own way
        raise DataError(f"{path} cannot be read as plain arrays: {error}") from error
    missing = [name for name in _ARRAYS if name not in arrays]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)} (it has {', '.join(arrays) or 'nothing'})")
    n_classes = arrays["n_classes"].squeeze().tolist() if "n_classes" in arrays else None
    return from_arrays(
        *(arrays[name] for name in _ARRAYS),
        n_classes=n_classes,
        mean=arrays.get("mean"),
        std=arrays.get("std"),
        name=path.stem,
    )


_NAMED = {"digits": digits}
