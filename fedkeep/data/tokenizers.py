"""Tokenizers: words of our own, which need no file, and those of pre-trained models."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fedkeep._util.pretrained_files import load_tokenizer, tokenizer_identity
from fedkeep._util.text import format_value
from fedkeep._util.text_form import LONGEST, TextForm
from fedkeep._util.validate import require_whole
from fedkeep.errors import DataError

WORDS = "words"
MAX_LENGTH = 128  # tokens of a text, by default
_VOCABULARY, _MAX_VOCABULARY = 2**14, 2**20
_WORD = re.compile(r"\w+|[^\w\s]")


class Tokenizer(Protocol):
    """A function from texts to token ids, and what a model must know of these."""

    def form(self, max_length: int) -> TextForm:
        """Return the form of texts that are cut to this many tokens."""

    def encode(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        """Return the token ids of every text, at most `max_length` of them."""


class Words:
    """Words and punctuation marks in lower case; the id of a word is a hash of it, so there is no vocabulary to share.

    Two words may have the same id. Id 0 is padding.

    >>> Words(1000).encode(["Good, good film."], max_length=5)
    [[627, 72, 627, 933, 660]]
    """

    def __init__(self, vocabulary: int = _VOCABULARY) -> None:
        self.vocabulary = require_whole(
            "tokenizer", vocabulary, low=2, high=_MAX_VOCABULARY, error=DataError, label="the number of words' ids"
        )

    def form(self, max_length: int) -> TextForm:
        """Return the form of texts that are cut to this many words."""
        return TextForm(max_length, self.vocabulary, 0, f"{WORDS}:{self.vocabulary}")

    def encode(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        """Return the ids of the first words of every text."""
        return [[self._id(word) for word in _first_words(text.lower(), max_length)] for text in texts]

    def _id(self, word: str) -> int:
        return 1 + zlib.crc32(word.encode("utf-8", "replace")) % (self.vocabulary - 1)


class Pretrained:
    """The tokenizer of a pre-trained model, of Hugging Face's `transformers`, with the model's special tokens.

    Decoders often have no token for padding; then that for the end of a text takes its place.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if self.padding is None:
            raise DataError(
                "the tokenizer has neither a padding token nor one for the end of a text: set its pad_token",
                key="tokenizer",
            )

    def form(self, max_length: int) -> TextForm:
        """Return the form of texts that are cut to this many tokens."""
        special = self.tokenizer.num_special_tokens_to_add()
        if max_length <= special:
            raise DataError(
                f"max_length = {max_length} leaves no room for a text: the tokenizer adds {special} of its own to each",
                key="max_length",
                value=max_length,
            )
        highest = max(self.tokenizer.get_vocab().values())
        return TextForm(max_length, highest + 1, int(self.padding), tokenizer_identity(self.tokenizer))

    def encode(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        """Return the token ids of every text, with special tokens."""
        encoded = self.tokenizer(
            list(texts), truncation=True, max_length=max_length, padding=False, return_attention_mask=False
        )
        return encoded["input_ids"]  # type: ignore[no-any-return]


def is_pretrained(value: Any) -> bool:
    """Return whether this is a tokenizer of `transformers`."""
    return callable(value) and hasattr(value, "get_vocab") and hasattr(value, "pad_token_id")


def make_tokenizer(given: Any) -> Tokenizer:
    """Return the tokenizer that an option names: `words`, `words:N` for N ids, a folder, a name on the hub, an object.

    >>> make_tokenizer("words:500").form(max_length=64)
    TextForm(max_length=64, vocabulary=500, padding=0, tokenizer='words:500')
    """
    if is_pretrained(given):
        return Pretrained(given)
    name = WORDS if given is None else given
    if not isinstance(name, str | Path):
        raise DataError(f"the tokenizer cannot be {format_value(given)}", key="tokenizer", value=given)
    kind, colon, number = str(name).partition(":")
    if kind == WORDS:
        vocabulary = int(number) if number.isascii() and number.isdigit() and len(number) < 20 else number
        return Words(vocabulary) if colon else Words()  # type: ignore[arg-type]
    return Pretrained(load_tokenizer(str(name), "tokenizer", DataError))


def text_form(tokenizer: Any = None, max_length: int = MAX_LENGTH) -> TextForm:
    """Return the form of texts with this tokenizer, to build a model before there are any texts.

    >>> text_form("words:500", max_length=64).vocabulary
    500
    """
    length = require_whole("max_length", max_length, low=1, high=LONGEST, error=DataError)
    return make_tokenizer(tokenizer).form(length)


def _first_words(text: str, most: int) -> list[str]:
    words: list[str] = []
    for match in _WORD.finditer(text):
        if len(words) == most:
            break
        words.append(match.group())
    return words
