"""Columns of text: checked, tokenised once, and stored as token ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fedkeep.data.sources.common import Options
from fedkeep.data.texts import Texts
from fedkeep.data.tokenizers import MAX_LENGTH, is_pretrained, make_tokenizer
from fedkeep.errors import DataError

if TYPE_CHECKING:
    from fedkeep.data.sources.tables import Table

log = logging.getLogger("fedkeep")

_AT_A_TIME = 10_000  # texts
_MANY = 0.1  # the share of texts cut to max_length from which on a warning says so


def join_columns(table: Table, by_name: Mapping[str, Any], is_text: Any) -> list[str]:
    """Return one text per row: of one column, or of several, joined by spaces."""
    for name, column in by_name.items():
        if not is_text(column.type):
            raise DataError(f"{table.name}: the column {name!r} holds {column.type}, not text", key="text", value=name)
    columns = [column.to_pylist() for column in by_name.values()]
    return columns[0] if len(columns) == 1 else [" ".join(row) for row in zip(*columns, strict=True)]


def tokenise(
    where: str, name: str, texts: list[str], options: Options, place: Callable[[int], str] = "row {}".format
) -> Any:
    """Return texts as token ids; with a function of the user's own, what it returns. Empty texts raise an error.

    `place` says where a row is, for messages.
    """
    empty = [row for row, text in enumerate(texts) if not text.strip()]
    if empty:
        raise DataError(
            f"{where}: the column {name!r} has {len(empty)} empty text{'s' * (len(empty) > 1)}, the first in "
            f"{place(empty[0])}: drop these rows",
            key=name,
            value=empty[0],
        )
    if callable(options.tokenizer) and not is_pretrained(options.tokenizer):
        if options.max_length is not None:
            raise DataError(
                "max_length does not apply to a tokenizer that is a function: let the function cut the texts",
                key="max_length",
                value=options.max_length,
            )
        return _call(options.tokenizer, texts)
    tokenizer, most = make_tokenizer(options.tokenizer), options.max_length or MAX_LENGTH
    form = tokenizer.form(most)
    parts = [tokenizer.encode(texts[i : i + _AT_A_TIME], most) for i in range(0, len(texts), _AT_A_TIME)]
    encoded = [ids for part in parts for ids in part]
    _require_tokens(where, name, encoded, place)
    n_cut = sum(len(ids) >= most for ids in encoded)
    if n_cut > _MANY * len(encoded):
        log.warning("%s: %d of %d texts have max_length = %d tokens or more: what is longer is cut",
                    where, n_cut, len(encoded), most)  # fmt: skip
    return Texts.of(encoded, form)


def _require_tokens(where: str, name: str, encoded: list[list[int]], place: Callable[[int], str]) -> None:
    row = next((row for row, ids in enumerate(encoded) if not len(ids)), None)
    if row is not None:
        raise DataError(
            f"{where}: the tokenizer finds no token in {place(row)} of the column {name!r}: drop this row",
            key=name,
            value=row,
        )


def _call(tokenizer: Any, texts: list[str]) -> Any:
    tokens = tokenizer(texts)
    if isinstance(tokens, Mapping):
        return {str(key): value if isinstance(value, Tensor) else np.asarray(value) for key, value in tokens.items()}
    if not isinstance(tokens, Tensor | np.ndarray):
        kind = type(tokens).__name__
        raise DataError(
            f"the tokenizer must return a tensor or a dict of tensors, not {kind}", key="tokenizer", value=kind
        )
    return tokens
