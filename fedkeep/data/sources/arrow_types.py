"""Types of a table's columns: numbers, text, categories and images."""

from __future__ import annotations

from typing import Any

from fedkeep.data.sources.common import require_package


def is_number(kind: Any) -> bool:
    """Return whether a column of this type holds numbers or booleans."""
    types = require_package("pyarrow", "reading tables").types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def is_whole(kind: Any) -> bool:
    """Return whether a column of this type holds whole numbers."""
    return bool(require_package("pyarrow", "reading tables").types.is_integer(kind))


def is_text(kind: Any) -> bool:
    """Return whether a column of this type holds text."""
    types = require_package("pyarrow", "reading tables").types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_words(kind: Any) -> bool:
    """Return whether a column of this type holds text, or categories with a name each."""
    types = require_package("pyarrow", "reading tables").types
    return is_text(kind.value_type if types.is_dictionary(kind) else kind)


def is_image(kind: Any) -> bool:
    """Return whether a struct has bytes and, if any, a path that is text; where all are empty, its type is null."""
    types = require_package("pyarrow", "reading tables").types
    fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    data, path = fields.get("bytes"), fields.get("path")
    if data is None or not (types.is_binary(data) or types.is_large_binary(data) or types.is_null(data)):
        return False
    return path is None or is_text(path) or bool(types.is_null(path))
