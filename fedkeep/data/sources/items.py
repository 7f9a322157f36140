"""Data sets of torch: objects with a length whose items are pairs (example, class), or dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.text import did_you_mean, format_value, list_some, one_line
from fedkeep.data.convert import as_ids
from fedkeep.data.labels import to_label_array
from fedkeep.data.sources import text_columns
from fedkeep.data.sources.choice import USUAL_Y
from fedkeep.data.sources.common import Options, Part, Raw
from fedkeep.data.sources.images import to_pixels
from fedkeep.errors import DataError

_OF_PAIRS = ("classes", "first_label", "test", "size", "tokenizer", "max_length")
_OF_DICTS = ("x", "y", "ids")


def read(datasets: Sequence[Any], options: Options) -> Raw:
    """Return the examples of a data set, or of one to train and one to test on. Each item is read once."""
    names = [type(dataset).__name__ for dataset in datasets]
    options.reject_except(names[0], *_OF_PAIRS, *_OF_DICTS)
    if len(datasets) > 1:
        options.reject_test_share(names[0])
    parts = [_read_part(dataset, name, options) for dataset, name in zip(datasets, names, strict=True)]
    classes = _declared_classes(datasets[0], [part.y for part in parts])
    return Raw(parts[0], parts[1] if len(parts) > 1 else None, names[0], class_names=classes)


def _read_part(dataset: Any, name: str, options: Options) -> Part:
    if not len(dataset):
        raise DataError(f"{name} has no examples", key="source", value=name)
    xs, ys, ids = [], [], []
    for i in range(len(dataset)):
        x, y, owner = _parts_of(_item(dataset, i, name), i, name, options)
        xs.append(_to_arrays(x, options))
        ys.append(_to_label(y))
        ids.append(owner)
        if i == 0:
            options.require_memory(len(dataset) * tree.nbytes(_tensors(xs[0])), name)
    try:
        labels = to_label_array(_stack(ys, name, "class"), "y")
    except DataError as error:
        raise error.converted(DataError, f"{name}: {error}") from error
    return Part(_join(xs, name, options), labels, as_ids(ids) if options.ids else None)


def _item(dataset: Any, i: int, name: str) -> Any:
    try:
        return dataset[i]
    except Exception as error:  # the user's own code
        raise DataError(
            f"{name}: example {i} cannot be read: {type(error).__name__}: {one_line(error)}", key="source", value=i
        ) from error


def _parts_of(item: Any, i: int, name: str, options: Options) -> tuple[Any, Any, Any]:
    """Return an item's example, class and, if `ids` names it, its owner."""
    if isinstance(item, Mapping):
        return _parts_of_dict(item, i, name, options)
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(
            f"{name}: an item must be a pair (example, class) or a dict, but item {i} is a {type(item).__name__}",
            key="source",
            value=type(item).__name__,
        )
    if option := next((option for option in _OF_DICTS if getattr(options, option) is not None), None):
        raise DataError(f"{option} does not apply to {name}, whose items are pairs (example, class)", key=option)
    return item[0], item[1], None


def _parts_of_dict(item: Mapping[Any, Any], i: int, name: str, options: Options) -> tuple[Any, Any, Any]:
    keys = [str(key) for key in item]
    y = options.y or next((key for usual in USUAL_Y for key in keys if key.lower() == usual), None)
    if y is None:
        raise DataError(f"{name}: name the class of an item with y= (keys: {list_some(keys)})", key="y", valid=keys)
    x = [options.x] if isinstance(options.x, str) else options.x
    x = [key for key in keys if key not in (y, options.ids)] if x is None else x
    for option, key in (("y", y), *(("x", key) for key in x), ("ids", options.ids or y)):
        if key not in item:
            raise DataError(
                f"{name}: item {i} has no {option} = {key!r}: {did_you_mean(key, keys)}",
                key=option,
                value=key,
                valid=keys,
            )
    return item[x[0]] if len(x) == 1 else {key: item[key] for key in x}, item[y], item.get(options.ids)


def _to_arrays(x: Any, options: Options) -> Any:
    """Return one example as an array, a text, or a dict of them; images of PIL as bytes [channels, height, width]."""
    if isinstance(x, Mapping):
        return {str(key): _to_arrays(value, options) for key, value in x.items()}
    if isinstance(x, Tensor):
        return x.detach().cpu()
    if isinstance(x, str):
        return x
    return to_pixels(x, options.size) if hasattr(x, "convert") and hasattr(x, "getbands") else np.asarray(x)


def _tensors(x: Any) -> Any:
    """Return an example as tensors, to count its bytes; texts count nothing."""
    if isinstance(x, dict):
        return {key: _tensors(value) for key, value in x.items()}
    numbers = isinstance(x, np.ndarray) and x.dtype.kind in "biuf"
    return x if isinstance(x, Tensor) else torch.from_numpy(np.ascontiguousarray(x)) if numbers else torch.empty(0)


def _to_label(y: Any) -> Any:
    return y.detach().cpu().numpy() if isinstance(y, Tensor) else y


def _join(xs: list[Any], name: str, options: Options) -> Any:
    """Return all examples as one array, as token ids, or as a dict of arrays."""
    first = xs[0]
    if isinstance(first, dict):
        if wrong := next((i for i, x in enumerate(xs) if not isinstance(x, dict) or set(x) != set(first)), None):
            raise DataError(
                f"{name}: example {wrong} has other keys than example 0, {sorted(first)}", key="source", value=wrong
            )
        return {key: _join([x[key] for x in xs], name, options) for key in first}
    if isinstance(first, str) and all(isinstance(x, str) for x in xs):
        return text_columns.tokenise(name, "example", xs, options)
    return _stack(xs, name, "example")


def _stack(values: list[Any], name: str, what: str) -> Any:
    """Return arrays of one shape as one array."""
    shapes = [tuple(np.shape(value)) for value in values]
    if wrong := next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None):
        raise DataError(
            f"{name}: the {what} of item {wrong} has the shape {shapes[wrong]}, but that of item 0 has {shapes[0]}",
            key="source",
            value=shapes[wrong],
        )
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack(values)
    array = np.asarray(values)
    if what == "example" and array.dtype.kind not in "biuf":
        raise DataError(
            f"{name}: an example must be numbers, an image, a text, or a dict of them, not {format_value(values[0])}",
            key="source",
            value=str(array.dtype),
        )
    return array


def _declared_classes(dataset: Any, labels: Sequence[np.ndarray]) -> list[str] | None:
    """Return the class names that data sets of torchvision have as `classes`, also those of a Subset."""
    while not hasattr(dataset, "classes") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return None
    whole = all(y.dtype.kind in "iu" and int(y.max(initial=0)) < len(names) for y in labels)
    return list(names) if whole else None
