"""Arrays: scikit-learn's digits, which come with it, points in a plane, and `.npz` files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from fedkeep._util.text import list_some, one_line
from fedkeep.data.sources.common import Missing, Options, Part, Raw, hold_out
from fedkeep.errors import DataError

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_OPTIONAL = ("mean", "std", "n_classes", "ids", "class_names")


def read_digits(options: Options) -> Raw:
    """Return scikit-learn's 1,797 handwritten digits, 8x8 grey images in [0, 1].

    The test set is a fixed fifth of each class.
    """
    options.reject_except("digits")
    table = _read_digits_table()
    x = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.float32) / 16
    return hold_out(Raw(Part(x, table[:, -1].astype(np.int64)), None, "digits", 10), 0.2)


def read_squares(options: Options) -> Raw:
    """Return 1,000 points drawn uniformly from (-4, 4)^2; a point's class is its quadrant (FedGKD figure 5).

    The points are always the same. The test set is a fixed fifth of each class.
    """
    options.reject_except("squares")
    x = np.random.default_rng(4).uniform(-4, 4, size=(1000, 2)).astype(np.float32)
    y = (x[:, 0] > 0) + 2 * (x[:, 1] > 0)
    return hold_out(Raw(Part(x, y.astype(np.int64)), None, "squares", 4), 0.2)


def _read_digits_table() -> np.ndarray:
    """Return pixels and class, [1797, 65].

    They are read from scikit-learn's file, because importing scikit-learn takes a second or two.
    """
    spec = importlib.util.find_spec("sklearn")
    file = Path(spec.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if spec else Path()
    if file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    raw = load_digits()
    return np.column_stack([raw.data, raw.target])


def read_npz(path: Path, options: Options) -> Raw:
    """Read x_train, y_train, x_test, y_test (and optionally mean, std, n_classes, ids, class_names) from a file."""
    options.reject_except("an .npz file", "first_label", "classes")
    if not path.is_file():
        raise Missing(f"there is no file {path}", key=str(path))
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            sizes = {entry.filename.removesuffix(".npy"): entry.file_size for entry in file.zip.infolist()}
            names = [name for name in file.files if name in (*_ARRAYS, *_OPTIONAL)]
            options.require_memory(sum(sizes.get(name, 0) for name in names), path)
            arrays, stored = {name: file[name] for name in names}, list(file.files)
    except DataError:
        raise
    except Exception as error:  # a damaged file can fail in zlib, struct, zipfile or numpy
        raise DataError(f"{path} cannot be read as arrays: {one_line(error)}", key=str(path)) from error
    missing = [name for name in _ARRAYS if name not in arrays]
    if missing:
        raise DataError(
            f"{path} has no {', '.join(missing)} (it has {list_some(stored) if stored else 'nothing'})",
            key=str(path),
            value=stored,
            valid=_ARRAYS,
        )
    for name in arrays:
        if not isinstance(arrays[name], np.ndarray):  # what does not begin as an array does
            raise DataError(f"{path}: {name} is not an array", key=name)
        if name not in _OPTIONAL and not arrays[name].ndim:
            raise DataError(f"{path}: {name} must be an array of examples, not a single value", key=name)
    return Raw(
        Part(arrays["x_train"], arrays["y_train"], arrays.get("ids")),
        Part(arrays["x_test"], arrays["y_test"]),
        path.stem,
        _whole_number(path, arrays["n_classes"]) if "n_classes" in arrays else None,
        arrays.get("mean"),
        arrays.get("std"),
        arrays["class_names"].reshape(-1).tolist() if "class_names" in arrays else None,
    )


def _whole_number(path: Path, array: np.ndarray) -> int:
    if array.size != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{path}: n_classes must be one whole number", key="n_classes", value=array.tolist())
    return int(array.item())
