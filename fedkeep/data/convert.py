"""Conversion of a user's arrays to the tensors of a data set, with checks that name the array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.text import one_line
from fedkeep._util.validate import require_whole
from fedkeep.data.texts import Texts
from fedkeep.errors import DataError, FedkeepError

MAX_CLASSES = 10_000  # a confusion matrix takes the square of it


def to_inputs(x: Any, key: str) -> Any:
    """Return examples as a tensor, or a dict of tensors; they must be finite numbers. Texts stay as they are."""
    if isinstance(x, Texts):
        return x
    if isinstance(x, dict):
        if not x:
            raise DataError(f"{key} is an empty dict", key=key, value=x)
        return {name: to_inputs(value, f"{key}[{name!r}]") for name, value in x.items()}
    tensor = require_dense(x, key) if isinstance(x, Tensor) else _to_tensor(x, key)
    _require_channels_first(tensor, key)
    if not tensor.ndim:
        raise DataError(f"{key} must be an array of examples, not a single number", key=key, value=tensor.item())
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        first = int((~torch.isfinite(tensor)).nonzero()[0, 0])
        raise DataError(f"{key} contains NaN or infinite numbers, first in example {first}", key=key, value=first)
    return tensor.detach().cpu()


def cat_inputs(parts: Sequence[Any]) -> Any:
    """Return the examples of several parts, one after another."""
    return Texts.cat(parts) if isinstance(parts[0], Texts) else tree.cat(parts)


def require_lengths(x: Any, y: Tensor, part: str) -> None:
    """Raise unless there are examples, and one label for each."""
    if not len(y):
        raise DataError(f"y_{part} is empty: there are no examples", key=f"y_{part}", value=0)
    for path, leaf in tree.items(x):
        if len(leaf) != len(y):
            key = f"x_{part}{path and f'[{path!r}]'}"
            raise DataError(f"{key} has {len(leaf)} examples, but y_{part} has {len(y)}", key=key, value=len(leaf))


def require_n_classes(n_classes: int | None, highest: int) -> int:
    """Return the number of classes: as given, or counted up to the highest label."""
    if n_classes is None and highest < 1:
        raise DataError(
            "all labels in y_train and y_test are 0, but at least two classes are needed", key="y_train", value=0
        )
    if highest >= MAX_CLASSES:
        raise DataError(
            f"there is a label {highest}, but at most {MAX_CLASSES} classes are supported: number them from 0, without "
            "gaps",
            key="y_train",
            value=highest,
        )
    if n_classes is None:
        return highest + 1
    number = require_whole("n_classes", n_classes, low=2, high=MAX_CLASSES, error=DataError)
    if highest >= number:
        raise DataError(
            f"there is a label {highest}, but with n_classes = {number} labels are 0 to {number - 1}",
            key="n_classes",
            value=number,
        )
    return number


def to_class_names(names: Sequence[str] | None, n_classes: int | None) -> tuple[str, ...] | None:
    """Return the names of the classes, different and one for each class, or None."""
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) and name.strip() for name in names):
        raise DataError(f"class_names must be texts, one for each class, not {names!r}", key="class_names", value=names)
    if len(set(names)) != len(names):
        raise DataError("class_names must be different for each class", key="class_names", value=list(names))
    if n_classes is not None and len(names) != n_classes:
        raise DataError(
            f"class_names has {len(names)} names, but there are {n_classes} classes",
            key="class_names",
            value=len(names),
        )
    return tuple(names)


def to_normalisation(mean: Any, std: Any, x: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return mean and std in a shape that broadcasts against one example, or None for both."""
    if (mean is None) != (std is None):
        key, missing = ("mean", "std") if std is None else ("std", "mean")
        raise DataError(f"{key} needs {missing} as well: normalisation uses both", key=missing)
    mean, std = _fit_to_example(mean, "mean", x), _fit_to_example(std, "std", x)
    if std is not None and not bool((std > 0).all()):
        values = std.flatten().tolist()
        raise DataError(f"std must be above 0, not {values}", key="std", value=values)
    return mean, std


def to_ids(key: str, ids: Any, y: Tensor) -> np.ndarray | None:
    """Return the owners of the examples as an array, one for each."""
    if ids is None:
        return None
    array = as_ids(ids, key)
    if len(array) != len(y):
        raise DataError(
            f"{key} must have one entry for each of the {len(y)} examples, not {len(array)}", key=key, value=len(array)
        )
    return array


def as_ids(ids: Any, key: str = "ids", error: type[FedkeepError] = DataError) -> np.ndarray:
    """Return ids as a flat array; texts in a list as objects, because in an array of strings all are equally long."""
    if ids is None:
        raise error(f"{key} is None: the owners are not known; pass {key}= where the examples are loaded", key=key)
    if isinstance(ids, list | tuple) and ids and all(isinstance(one, str) for one in ids):
        return to_objects(ids)
    try:
        array: np.ndarray = np.asarray(ids).reshape(-1)
        np.unique(array)  # they must have an order
    except (ValueError, TypeError, RuntimeError) as reason:
        raise error(f"{key} must be numbers or texts, one per example: {one_line(reason)}", key=key) from reason
    return array


def to_objects(texts: Sequence[str]) -> np.ndarray:
    """Return texts as an array of objects."""
    array = np.empty(len(texts), object)
    array[:] = texts
    return array


def is_one_of(ids: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return for each id whether it is one of the chosen ones; `np.isin`, but fast for objects too."""
    if ids.dtype.kind != "O" and chosen.dtype.kind != "O":
        return np.isin(ids, chosen)
    wanted = set(chosen.tolist())
    return np.fromiter((one in wanted for one in ids.tolist()), bool, len(ids))


def _require_channels_first(x: Tensor, key: str) -> None:
    """Raise if these look like images [n, height, width, channels]."""
    if x.ndim != 4 or x.shape[1] <= 4 or x.shape[2] <= 4:
        return
    if x.shape[3] in (3, 4) or (x.shape[3] == 1 and x.shape[1] == x.shape[2]):
        raise DataError(
            f"{key} has the shape {tuple(x.shape)}, but images are [n, channels, height, width]: pass "
            "np.moveaxis(x, 3, 1), or x.permute(0, 3, 1, 2) of a tensor",
            key=key,
            value=tuple(x.shape),
        )


def require_dense(x: Tensor, key: str) -> Tensor:
    """Return a tensor; raise unless it is dense, real and has values."""
    if x.layout != torch.strided or x.is_meta or x.is_complex():
        raise DataError(f"{key} must be a dense tensor of real numbers, not {x.layout}, {x.dtype}", key=key)
    return x


def _to_tensor(x: Any, key: str) -> Tensor:
    try:
        array = np.asarray(x)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # lists of unequal length
        raise DataError(f"{key} cannot be made an array: {one_line(error)}", key=key, value=x) from error
    if array.dtype.kind not in "buif" or array.dtype.itemsize > 8:
        raise DataError(f"{key} must hold numbers, not {array.dtype}", key=key, value=str(array.dtype))
    native = array.dtype.newbyteorder("=")
    return torch.from_numpy(np.require(array, dtype=native, requirements=["C", "W"]))


def _fit_to_example(value: Any, key: str, x: Any) -> Tensor | None:
    """Return a mean or std in a shape that broadcasts against one example; for images, one number per channel."""
    if value is None:
        return None
    if isinstance(x, dict | Texts):
        kind = "a dict" if isinstance(x, dict) else "texts"
        raise DataError(f"{key} needs examples that are one array each, not {kind}", key=key, value=value)
    shape = x.shape[1:]
    given = value if isinstance(value, Tensor) else _to_tensor(value, key)
    tensor: Tensor = to_inputs(given if given.ndim else given.reshape(1), key).double()
    fitted = tensor.reshape(-1, 1, 1) if tensor.ndim == 1 and len(shape) == 3 else tensor
    try:
        fitted.expand(shape)
    except RuntimeError:
        raise DataError(
            f"{key} of shape {tuple(tensor.shape)} does not fit examples of shape {tuple(shape)}", key=key, value=value
        ) from None
    return fitted
