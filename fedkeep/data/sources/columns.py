"""Columns of a table: conversion of images, text, lists, numbers and words to arrays."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedkeep._util.text import list_some
from fedkeep.data.convert import to_objects
from fedkeep.data.labels import whole_numbers
from fedkeep.data.sources import text_columns
from fedkeep.data.sources.arrow_types import is_image, is_number, is_text, is_words
from fedkeep.data.sources.categories import Categories, feature_names, find_categories, one_hot
from fedkeep.data.sources.choice import PIXEL, Chosen
from fedkeep.data.sources.common import Options, path_inside, require_package
from fedkeep.data.sources.images import decode
from fedkeep.errors import DataError

if TYPE_CHECKING:
    from fedkeep.data.sources.tables import Table


def labels(table: Table, name: str) -> np.ndarray:
    """Return the classes: whole numbers, or text."""
    column, pa = _column(table, name), require_package("pyarrow", "reading tables")
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int64())
    if not (is_text(column.type) or is_number(column.type)):
        raise DataError(
            f"{table.name}: the column {name!r} must hold classes, as whole numbers or text, not {column.type}",
            key="y",
            value=name,
        )
    values = whole_numbers(column.to_numpy())
    empty = [row for row, label in enumerate(values) if not label.strip()] if is_text(column.type) else []
    if empty:
        raise DataError(
            f"{table.name}: the column {name!r} has {len(empty)} empty label{'s' * (len(empty) > 1)}, the first in "
            f"{table.place(empty[0])}: drop these rows or fill the cells",
            key=name,
            value=empty[0],
        )
    return values


def is_boolean(table: Table, name: str) -> bool:
    """Return whether a column holds booleans."""
    return bool(require_package("pyarrow", "reading tables").types.is_boolean(table.arrow.column(name).type))


def id_column(table: Table, name: str) -> np.ndarray:
    """Return a column of ids. Text is an array of objects: an array of strings gives each the longest's size."""
    values: np.ndarray = _column(table, name).to_numpy()
    if values.dtype.kind != "O":
        return values
    return to_objects([value if isinstance(value, str) else str(value) for value in values])


def categories(table: Table, chosen: Chosen, options: Options) -> Categories:
    """Return the categories of the columns of words, if the examples are numbers and words; they become one-hot."""
    by_name = _input_columns(table, chosen, options)
    features = all(is_number(column.type) or is_words(column.type) for column in by_name.values())
    if len(by_name) == 1 or not features or options.text is not None or options.tokenizer is not None:
        return {}
    return find_categories(by_name, table.name)


def inputs(table: Table, chosen: Chosen, options: Options, found: Categories, like: Any = None) -> Any:
    """Return the examples: decoded images, tokenised text, lists of numbers, or numbers and one-hot categories."""
    by_name = _input_columns(table, chosen, options)
    if options.text is not None:
        joined = text_columns.join_columns(table, by_name, is_text)
        return text_columns.tokenise(table.name, ", ".join(chosen.x), joined, options, table.place)
    if found:
        options.require_memory(4 * table.arrow.num_rows * len(feature_names(chosen.x, found)), table.name)
        return _stack_features(by_name, found, table.name)
    if all(is_number(column.type) for column in by_name.values()):
        return _stack_columns(by_name, options.size, table.name)
    if len(by_name) > 1:
        return {name: _one_column(table, name, column, options, None) for name, column in by_name.items()}
    [(name, column)] = by_name.items()
    return _one_column(table, name, column, options, like)


def _one_column(table: Table, name: str, column: Any, options: Options, like: Any) -> Any:
    types = require_package("pyarrow", "reading tables").types
    kind = column.type
    if types.is_struct(kind) and is_image(kind):
        shape = like.shape[1:] if isinstance(like, np.ndarray) and like.ndim == 4 else None
        return decode(_image_structs(table, name, column), len(column), options, shape)
    if types.is_binary(kind) or types.is_large_binary(kind):
        rows = ((f"{table.name}, row {i}", io.BytesIO(value.as_py())) for i, value in enumerate(column))
        shape = like.shape[1:] if isinstance(like, np.ndarray) and like.ndim == 4 else None
        return decode(rows, len(column), options, shape)
    if is_text(kind):
        return text_columns.tokenise(table.name, name, column.to_pylist(), options, table.place)
    if is_number(kind):
        return column.to_numpy()
    return _stack_lists(table, name, column, options.size)


def _image_structs(table: Table, name: str, column: Any) -> Iterator[tuple[str, Any]]:
    """Yield the images of a Hugging Face column: their bytes, or the path to a file."""
    for row, value in enumerate(column):
        image = value.as_py()
        if image["bytes"] is not None:
            yield f"{table.name}, row {row}", io.BytesIO(image["bytes"])
        elif image.get("path"):
            path = Path(image["path"])
            if table.folder is not None:
                path = path_inside(table.folder, image["path"], f"{table.name}, row {row}")
            yield str(path), path
        else:
            raise DataError(
                f"{table.name}, row {row}: the column {name!r} has neither bytes nor a path", key=table.name, value=name
            )


def _stack_columns(by_name: Mapping[str, Any], size: tuple[int, int] | None, where: str) -> np.ndarray:
    """Return columns of numbers as one array [n, columns]; pixels become images of bytes."""
    first, n = next(iter(by_name.values())), len(by_name)
    pixels = size is not None or all(PIXEL.fullmatch(name) for name in by_name)
    as_bytes = pixels and all(_fits_bytes(column.to_numpy()) for column in by_name.values())
    out = np.empty((len(first), n), np.uint8 if as_bytes else np.float32)
    for i, column in enumerate(by_name.values()):
        out[:, i] = column.to_numpy()
    return _to_images(out, size, where) if pixels else out


def _stack_features(by_name: Mapping[str, Any], found: Categories, where: str) -> np.ndarray:
    """Return columns of numbers and of words as one array [n, features]."""
    parts = [
        one_hot(column, found[name], name, where) if name in found else _as_feature(column, name, where)
        for name, column in by_name.items()
    ]
    return np.concatenate(parts, axis=1)


def _as_feature(column: Any, name: str, where: str) -> np.ndarray:
    if not is_number(column.type):
        raise DataError(
            f"{where}: the column {name!r} must hold numbers, as in the training data, not {column.type}",
            key="x",
            value=name,
        )
    return np.asarray(column.to_numpy(), np.float32)[:, None]


def _stack_lists(table: Table, name: str, column: Any, size: tuple[int, int] | None) -> np.ndarray:
    """Return (nested) lists of numbers, all of the same length, as an array; two or three axes are images."""
    pa, compute = require_package("pyarrow", "reading tables"), require_package("pyarrow.compute", "reading tables")
    array = column.combine_chunks()
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    shape = [len(array)]
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        lengths = compute.unique(compute.list_value_length(array)).to_pylist()
        if len(lengths) != 1 or array.null_count:
            raise DataError(
                f"{table.name}: the lists of the column {name!r} must have the same length, not "
                f"{list_some(_format_lengths(lengths))}",
                key="x",
                value=name,
            )
        shape.append(lengths[0])
        array = array.flatten()
    if not is_number(array.type) or len(shape) == 1 or array.null_count:
        raise DataError(
            f"{table.name}: the column {name!r} must hold images, numbers or text, not {column.type}",
            key="x",
            value=name,
        )
    x = array.to_numpy(zero_copy_only=False).reshape(shape)
    x = x.astype(np.float32) if x.dtype.kind == "f" else x
    if x.ndim == 2:
        return x if size is None else _to_images(x, size, table.name)
    if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    return _to_bytes(x[:, None] if x.ndim == 3 else x)


def _to_images(x: np.ndarray, size: tuple[int, int] | None, where: str) -> np.ndarray:
    """Return flat pixels [n, k] as images of this size; by default square, with one or three channels."""
    k = x.shape[1]
    if size is None:
        side = next((math.isqrt(k // c) for c in (1, 3) if k % c == 0 and math.isqrt(k // c) ** 2 * c == k), 0)
        size = (side, side)
    if not all(size) or k % (size[0] * size[1]):
        fits = f"do not fit size = {size}" if all(size) else "are not a square image: give size=(height, width)"
        raise DataError(f"{where}: {k} pixels per example {fits}", key="size", value=size if all(size) else None)
    return _to_bytes(x.reshape(len(x), -1, *size))


def _to_bytes(x: np.ndarray) -> np.ndarray:
    return x.astype(np.uint8) if _fits_bytes(x) else x


def _fits_bytes(x: np.ndarray) -> bool:
    return bool(x.dtype.kind in "iu" and x.size and x.min() >= 0 and x.max() <= 255)


def _input_columns(table: Table, chosen: Chosen, options: Options) -> dict[str, Any]:
    option = "x" if options.text is None else "text"
    remedy = f", or leave the column out: {option}= names the others" if len(chosen.x) > 1 else ""
    return {name: _column(table, name, remedy) for name in chosen.x}


def _column(table: Table, name: str, remedy: str = "") -> Any:
    column = table.arrow.column(name)
    if column.null_count:
        compute = require_package("pyarrow.compute", "reading tables")
        row = compute.index(compute.is_null(column), True).as_py()
        number = column.null_count
        raise DataError(
            f"{table.name}: the column {name!r} has {number} empty cell{'s' * (number > 1)}, the first in "
            f"{table.place(row)}: drop these rows or fill the cells{remedy}",
            key=name,
            value=row,
        )
    if require_package("pyarrow", "reading tables").types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column


def _format_lengths(lengths: list[int | None]) -> list[str]:
    return [str(length) for length in sorted(lengths, key=lambda length: length or 0)]
