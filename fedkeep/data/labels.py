"""Labels of a user's arrays, numbered from 0: whole numbers, texts, booleans, or whole numbers stored as floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep._util.text import format_value, list_some, one_line
from fedkeep.data.convert import MAX_CLASSES, require_dense
from fedkeep.errors import DataError

_BOOLEANS = ("False", "True")


def number_labels(
    y_train: Any, y_test: Any, class_names: Sequence[str] | None = None
) -> tuple[Tensor, Tensor, Sequence[str] | None]:
    """Return the classes of training and test examples as whole numbers, and the names of the classes, if any.

    Texts are numbered in the order of `class_names`, or else in sorted order, and booleans are class 0 and class 1.
    """
    train, test = to_label_array(y_train, "y_train"), to_label_array(y_test, "y_test")
    texts = [_is_text(array) for array in (train, test)]
    if texts[0] != texts[1]:
        holds = ["texts" if text else "numbers" for text in texts]
        raise DataError(f"y_train holds {holds[0]}, but y_test holds {holds[1]}", key="y_test", value=str(test.dtype))
    if texts[0]:
        names = _sorted_names(train) if class_names is None else list(class_names)
        return number_texts(train, names, "y_train"), number_texts(test, names, "y_test"), names
    if class_names is None and train.dtype.kind == test.dtype.kind == "b":
        class_names = _BOOLEANS
    return _to_tensor(train, "y_train"), _to_tensor(test, "y_test"), class_names


def require_numbers(y: Any, key: str) -> None:
    """Raise if labels are texts: every node of a federation would number them in its own way."""
    if _is_text(to_label_array(y, key)):
        raise DataError(
            f"{key} returned labels that are texts, which every node would number in its own way: return a "
            "fedkeep.data.Dataset made with class_names= or classes=",
            key=key,
        )


def whole_numbers(labels: np.ndarray) -> np.ndarray:
    """Return floats that are all whole numbers as such, and other labels as they are."""
    is_whole = labels.dtype.kind == "f" and np.isfinite(labels).all() and (labels == np.rint(labels)).all()
    return labels.astype(np.int64) if is_whole and np.abs(labels).max(initial=0) < 2**53 else labels


def to_label_array(y: Any, key: str) -> np.ndarray:
    """Return labels as a flat array of whole numbers, booleans or texts."""
    if isinstance(y, Tensor):
        dense = require_dense(y, key).detach().cpu()
        array = (dense.double() if dense.is_floating_point() else dense).numpy()
    else:
        try:
            array = np.asarray(y)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # lists of unequal length
            raise DataError(f"{key} cannot be made an array: {one_line(error)}", key=key, value=y) from error
    if array.ndim > 1 and array.size != len(array):
        raise DataError(
            f"{key} has the shape {array.shape}, but one class per example is needed, [n]: multi-label data is not "
            "supported; of one-hot labels pass y.argmax(1)",
            key=key,
            value=array.shape,
        )
    array = _of_one_kind(array.reshape(-1), key) if array.dtype.kind == "O" else array.reshape(-1)
    array = whole_numbers(array)
    if array.dtype.kind not in "buiUO":
        wrong = array[~np.equal(np.rint(array), array)][0].item() if array.dtype.kind == "f" else str(array.dtype)
        raise DataError(
            f"{key} must hold one class per example, as whole numbers, texts or booleans, not {format_value(wrong)}",
            key=key,
            value=wrong,
        )
    return array


def _of_one_kind(array: np.ndarray, key: str) -> np.ndarray:
    """Return an array of Python objects as texts, booleans or numbers; raise at the first that differs."""
    kinds: tuple[tuple[Any, Any], ...] = ((str, None), (bool | np.bool_, bool), (int | float | np.number, float))
    for kind, dtype in kinds:
        if len(array) and isinstance(array[0], kind):
            wrong = next((i for i, value in enumerate(array) if not isinstance(value, kind)), None)
            if wrong is None:
                return array if dtype is None else array.astype(dtype)
            break
    else:
        wrong = 0
    value = array[wrong] if len(array) else None
    raise DataError(
        f"{key} must hold one class per example, as whole numbers, texts or booleans, but example {wrong} has "
        f"{format_value(value)}",
        key=key,
        value=value,
    )


def _is_text(array: np.ndarray) -> bool:
    return array.dtype.kind in "UO"


def _sorted_names(labels: np.ndarray) -> list[str]:
    names = sorted(set(labels.tolist()))
    if names and not names[0].strip():
        first = labels.tolist().index(names[0])
        raise DataError(f"y_train: example {first} has an empty label", key="y_train", value=first)
    if len(names) == 1:
        raise DataError(
            f"all labels in y_train are {names[0]!r}, but at least two classes are needed", key="y_train", value=names
        )
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"y_train has {len(names)} different texts, but at most {MAX_CLASSES} classes are supported",
            key="y_train",
            value=len(names),
        )
    return names


def number_texts(
    labels: np.ndarray, names: Sequence[str], key: str, place: Callable[[int], str] = "example {}".format
) -> Tensor:
    """Return the number of each label in these names; raise at the first that is not among them.

    `place` returns where an example is, for the message.
    """
    index = {name: c for c, name in enumerate(names)}
    numbers = [index.get(label, -1) for label in labels.tolist()]
    if -1 in numbers:
        first = numbers.index(-1)
        raise DataError(
            f"{key}, {place(first)}: the label {str(labels[first])!r} is not one of the classes ({list_some(names)})",
            key=key,
            value=str(labels[first]),
            valid=names,
        )
    return torch.tensor(numbers, dtype=torch.long)


def to_labels(y: Any, key: str) -> Tensor:
    """Return classes that are whole numbers, or booleans, as a tensor; texts raise an error."""
    labels = to_label_array(y, key)
    if _is_text(labels):
        raise DataError(f"{key} must hold whole numbers, not texts such as {labels[0]!r}", key=key, value=labels[0])
    return _to_tensor(labels, key)


def _to_tensor(labels: np.ndarray, key: str) -> Tensor:
    """Return whole numbers or booleans as a tensor; a number below 0 raises an error."""
    if len(labels) and (lowest := int(labels.min())) < 0:
        raise DataError(f"{key} contains the label {lowest}, but classes are numbered from 0", key=key, value=lowest)
    return torch.from_numpy(labels.astype(np.int64))
