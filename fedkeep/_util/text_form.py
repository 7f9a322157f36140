"""Form of a data set's texts: what a model must know of the tokens that it gets."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST = 2**16  # tokens of a text
_WIDTHS = 8  # different widths of batches, at most
_MULTIPLE = 8  # of tokens: odd widths are slow on a GPU


@dataclass(frozen=True)
class TextForm:
    """The longest text in tokens, the number of different tokens, the padding token, and which tokenizer made them."""

    max_length: int
    vocabulary: int
    padding: int
    tokenizer: str  # its kind, and a hash of its vocabulary: the same on every machine, whatever its folder is called

    def width(self, longest: int) -> int:
        """Return the width of a batch whose longest text has this many tokens.

        There are at most eight widths: a CUDA graph and a recording are made for each.

        >>> [TextForm(64, 1000, 0, "words:1000").width(longest) for longest in (0, 5, 17, 64)]
        [8, 8, 24, 64]
        >>> TextForm(500, 1000, 0, "words:1000").width(3)
        64
        """
        share = -(-self.max_length // _WIDTHS)
        step = -(-share // _MULTIPLE) * _MULTIPLE
        return min(self.max_length, max(1, -(-longest // step)) * step)

    def __str__(self) -> str:
        return f"texts of up to {self.max_length} tokens"
