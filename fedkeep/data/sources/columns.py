"""Columns of a table: which of them to use, and conversion of images, text, lists and numbers to arrays."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedkeep._util.text import did_you_mean, list_some
from fedkeep.data.convert import to_objects
from fedkeep.data.sources import text_columns
from fedkeep.data.sources.common import Options, path_inside, require_package
from fedkeep.data.sources.images import decode
from fedkeep.errors import DataError

if TYPE_CHECKING:
    from fedkeep.data.sources.tables import Table

# the usual names of columns, in order of preference
_Y = ("label", "labels", "fine_label", "target", "class", "character", "y")
_X = ("image", "img", "images", "pixels", "pixel_values", "features", "input_ids", "text", "sentence", "content", "x")
_ROW_NUMBERS = ("", "id", "index", "Unnamed: 0", "__index_level_0__")  # added by programs that write tables
_PIXEL = re.compile(r"(pixel|px)[_ ]?\d+|\d+x\d+", re.IGNORECASE)


@dataclass(frozen=True)
class Chosen:
    """The chosen columns: of the examples, the classes and, optionally, the owners."""

    x: tuple[str, ...]
    y: str
    ids: str | None

    @property
    def names(self) -> list[str]:
        """The names of all chosen columns."""
        return [*self.x, self.y, *([] if self.ids is None else [self.ids])]


def choose(schema: Any, options: Options, where: str) -> Chosen:
    """Return the columns named by the options; for the others, columns with a usual name."""
    names = list(schema.names)
    y = options.y or next((name for usual in _Y for name in names if name.lower() == usual), None)
    if y is None:
        raise DataError(
            f"{where}: name the column of the classes with y= (columns: {list_some(names)})", key="y", valid=names
        )
    given = options.x if options.text is None else options.text
    if given is not None:
        x = (given,) if isinstance(given, str) else tuple(given)
    else:
        x = _usual_x(schema, {y, options.ids}, where)
    chosen = Chosen(x, y, options.ids)
    require_columns(schema, chosen, where)
    return chosen


def require_columns(schema: Any, chosen: Chosen, where: str) -> None:
    """Raise unless each chosen column exists exactly once."""
    names = list(schema.names)
    counts, x = Counter(names), set(chosen.x)
    for name in chosen.names:
        option = "x" if name in x else "y" if name == chosen.y else "ids"
        if counts[name] > 1:
            raise DataError(f"{where} has {counts[name]} columns named {name!r}", key=option, value=name)
        if name not in counts:
            raise DataError(
                f"{where} has no column {name!r}: {did_you_mean(name, names)}",
                key=option,
                value=name,
                valid=names,
            )


def _usual_x(schema: Any, used: set[str | None], where: str) -> tuple[str, ...]:
    """Return the columns of the examples: one with a usual name, else all pixels, else all columns of numbers."""
    names = [name for name in schema.names if name not in used and name not in _ROW_NUMBERS]
    known = next((name for usual in _X for name in names if name.lower() == usual), None)
    if known is not None:
        return (known,)
    if pixels := [name for name in names if _PIXEL.fullmatch(name)]:
        return tuple(pixels)
    kinds = dict(zip(schema.names, schema.types, strict=True))
    other = [name for name in names if not _is_number(kinds[name])]
    if len(names) == 1 or (names and not other):
        return tuple(names)
    raise DataError(
        f"{where}: name the columns of the examples with x= (columns: {list_some(list(schema.names))})",
        key="x",
        valid=schema.names,
    )


def labels(table: Table, name: str) -> np.ndarray:
    """Return the classes: whole numbers, or text."""
    column, pa = _column(table, name), require_package("pyarrow", "reading tables")
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int64())
    if not (is_text(column.type) or _is_number(column.type)):
        raise DataError(
            f"{table.name}: the column {name!r} must hold classes, as whole numbers or text, not {column.type}",
            key="y",
            value=name,
        )
    values: np.ndarray = column.to_numpy()
    return values


def id_column(table: Table, name: str) -> np.ndarray:
    """Return a column of ids. Text is an array of objects: an array of strings gives each the longest's size."""
    values: np.ndarray = _column(table, name).to_numpy()
    if values.dtype.kind != "O":
        return values
    return to_objects([value if isinstance(value, str) else str(value) for value in values])


def inputs(table: Table, chosen: Chosen, options: Options, like: Any = None) -> Any:
    """Return the examples: decoded images, tokenised text, lists of numbers, or one number per column."""
    by_name = {name: _column(table, name) for name in chosen.x}
    if options.text is not None:
        joined = text_columns.join_columns(table, by_name, is_text)
        return text_columns.tokenise(table.name, ", ".join(chosen.x), joined, options)
    if all(_is_number(column.type) for column in by_name.values()):
        return _stack_columns(by_name, options.size, table.name)
    if len(by_name) > 1:
        return {name: _one_column(table, name, column, options, None) for name, column in by_name.items()}
    [(name, column)] = by_name.items()
    return _one_column(table, name, column, options, like)


def _one_column(table: Table, name: str, column: Any, options: Options, like: Any) -> Any:
    types = require_package("pyarrow", "reading tables").types
    kind = column.type
    if types.is_struct(kind) and _is_image(kind):
        shape = like.shape[1:] if isinstance(like, np.ndarray) and like.ndim == 4 else None
        return decode(_image_structs(table, name, column), len(column), options, shape)
    if types.is_binary(kind) or types.is_large_binary(kind):
        rows = ((f"{table.name}, row {i}", io.BytesIO(value.as_py())) for i, value in enumerate(column))
        shape = like.shape[1:] if isinstance(like, np.ndarray) and like.ndim == 4 else None
        return decode(rows, len(column), options, shape)
    if is_text(kind):
        return text_columns.tokenise(table.name, name, column.to_pylist(), options)
    if _is_number(kind):
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
    pixels = size is not None or all(_PIXEL.fullmatch(name) for name in by_name)
    as_bytes = pixels and all(_fits_bytes(column.to_numpy()) for column in by_name.values())
    out = np.empty((len(first), n), np.uint8 if as_bytes else np.float32)
    for i, column in enumerate(by_name.values()):
        out[:, i] = column.to_numpy()
    return _to_images(out, size, where) if pixels else out


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
    if not _is_number(array.type) or len(shape) == 1 or array.null_count:
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


def _column(table: Table, name: str) -> Any:
    column = table.arrow.column(name)
    if column.null_count:
        compute = require_package("pyarrow.compute", "reading tables")
        row = compute.index(compute.is_null(column), True).as_py()
        raise DataError(
            f"{table.name}: the column {name!r} has {column.null_count} empty cells, the first in row {row}",
            key=name,
            value=row,
        )
    if require_package("pyarrow", "reading tables").types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column


def _is_number(kind: Any) -> bool:
    types = require_package("pyarrow", "reading tables").types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_image(kind: Any) -> bool:
    """Return whether a struct has bytes and, if any, a path that is text; where all are empty, its type is null."""
    types = require_package("pyarrow", "reading tables").types
    fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    data, path = fields.get("bytes"), fields.get("path")
    if data is None or not (types.is_binary(data) or types.is_large_binary(data) or types.is_null(data)):
        return False
    return path is None or is_text(path) or bool(types.is_null(path))


def is_text(kind: Any) -> bool:
    """Return whether a column of this type holds text."""
    types = require_package("pyarrow", "reading tables").types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _format_lengths(lengths: list[int | None]) -> list[str]:
    return [str(length) for length in sorted(lengths, key=lambda length: length or 0)]
