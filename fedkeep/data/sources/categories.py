"""Categories: columns of words as one-hot inputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedkeep._util.text import list_some
from fedkeep.data.sources.arrow_types import is_words
from fedkeep.errors import DataError

log = logging.getLogger("fedkeep")

MAX_CATEGORIES = 100  # of one column

Categories = Mapping[str, list[str]]


def find_categories(by_name: Mapping[str, Any], where: str) -> Categories:
    """Return the different words of each column of words, in sorted order; too many raise an error."""
    found = {name: sorted(set(column.to_pylist())) for name, column in by_name.items() if is_words(column.type)}
    for name, words in found.items():
        if len(words) > MAX_CATEGORIES:
            raise DataError(
                f"{where}: the column {name!r} has {len(words)} different words ({list_some(words, 3)}), but at most "
                f"{MAX_CATEGORIES} can become one-hot inputs: leave it out of x, or, if it holds text, name it with "
                "text=",
                key="x",
                value=name,
            )
    return found


def feature_names(x: tuple[str, ...], categories: Categories) -> list[str]:
    """Return the names of the inputs that columns of numbers and words become.

    >>> feature_names(("age", "sex"), {"sex": ["f", "m"]})
    ['age', 'sex=f', 'sex=m']
    """
    return [
        one for name in x for one in ([f"{name}={word}" for word in categories[name]] if name in categories else [name])
    ]


def one_hot(column: Any, words: list[str], name: str, where: str) -> np.ndarray:
    """Return a column of words as [n, categories]; a word that is not a category is 0 everywhere."""
    index = {word: i for i, word in enumerate(words)}
    values = [index.get(str(word), -1) for word in column.to_pylist()]
    unknown = values.count(-1)
    if unknown:
        log.warning(
            "%s: in %d rows, %s is not one of the words of the training data: its inputs are 0", where, unknown, name
        )
    return np.concatenate([np.eye(len(words), dtype=np.float32), np.zeros((1, len(words)), np.float32)])[values]
