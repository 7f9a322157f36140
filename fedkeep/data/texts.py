"""Texts as token ids: stored one after another without padding, and padded when a batch is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep._util.text_form import TextForm
from fedkeep.tree import Tree

_TOKENS_ON_CPU, _TOKENS_ON_GPU = 2**12, 2**18  # in one pass without gradients, padding included: what a cache holds


@dataclass(frozen=True, repr=False)
class Texts:
    """Texts of different lengths: the leaf of a tree, in the place of a tensor with one row per example.

    Indexing returns some of the texts, which share the tokens of all. `pad` makes a batch of them.

    >>> texts = Texts.of([[5, 6, 7], [8]], TextForm(max_length=64, vocabulary=10, padding=0, tokenizer="words:10"))
    >>> texts[[1, 0]].pad(width=4)["input_ids"].tolist()
    [[8, 0, 0, 0], [5, 6, 7, 0]]
    """

    tokens: Tensor  # of all texts, one after another
    start: Tensor  # [n] where each text begins
    length: Tensor  # [n] its number of tokens
    form: TextForm

    def __repr__(self) -> str:
        return f"<Texts: {len(self.length)} texts of up to {self.form.max_length} tokens of {self.form.tokenizer}>"

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], form: TextForm) -> Texts:
        """Return texts given as one list of token ids each; ids take 16 bits if the vocabulary allows it."""
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        kind = np.int16 if form.vocabulary <= 2**15 else np.int32
        tokens = np.concatenate([np.asarray(text, dtype=kind) for text in texts] or [np.zeros(0, kind)])
        start = np.cumsum(lengths) - lengths
        return cls(torch.from_numpy(tokens), torch.from_numpy(start), torch.from_numpy(lengths), form)

    @classmethod
    def cat(cls, parts: Sequence[Texts]) -> Texts:
        """Return the texts of several parts, one after another."""
        before = np.cumsum([0, *(len(part.tokens) for part in parts[:-1])]).tolist()
        return cls(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.start + n for part, n in zip(parts, before, strict=True)]),
            torch.cat([part.length for part in parts]),
            parts[0].form,
        )

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int | np.integer):
            first = int(self.start[index])
            return self.tokens[first : first + int(self.length[index])]
        return replace(self, start=self.start[index], length=self.length[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return lengths and tokens as one array, which does not depend on how the texts are stored."""
        length, start = self.length.cpu(), self.start.cpu()
        first = torch.cumsum(length, 0) - length  # of each text, in the result
        at = torch.repeat_interleave(start - first, length) + torch.arange(int(length.sum()))
        return torch.cat([length, self.tokens.cpu()[at].long()]).numpy().astype(dtype or np.int32)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of texts and the longest that they may be."""
        return len(self), self.form.max_length

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self.tokens.device

    @property
    def at_a_time(self) -> int:
        """How many texts may pass through a model at a time, so that memory suffices for long ones too."""
        most = _TOKENS_ON_CPU if self.device.type == "cpu" else _TOKENS_ON_GPU
        return max(1, most // self.form.max_length)

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield the positions of all texts, those of similar length together: little of a batch is padding then.

        A batch has at most as many tokens, padding included, as `size` texts of the maximum length.

        >>> texts = Texts.of([[1], [2] * 64, [3], [4] * 30], TextForm(64, 10, 0, "words:10"))
        >>> [at.tolist() for at in texts.batches(1)]
        [[1], [3, 0], [2]]
        """
        order = torch.argsort(self.length, descending=True, stable=True)
        lengths, start = self.length[order].tolist(), 0
        while start < len(lengths):
            many = max(1, size * self.form.max_length // self.form.width(lengths[start]))
            yield order[start : start + many]
            start += many

    def numel(self) -> int:
        """Return the number of tokens."""
        return int(self.length.sum())

    def element_size(self) -> int:
        """Return the bytes of a token."""
        return self.tokens.element_size()

    def to(self, place: torch.device | str) -> Texts:
        """Return the texts on a device."""
        return replace(self, tokens=self.tokens.to(place), start=self.start.to(place), length=self.length.to(place))

    def pad(self, width: int | None = None) -> Tree:
        """Return the texts as model inputs: `input_ids` and `attention_mask` (False for padding), [n, width] each.

        By default the width is that of the longest. Longer texts than the width lose their end.
        """
        if width is None:
            width = self.form.width(int(self.length.max()) if len(self) else 1)
        place = torch.arange(width, device=self.device)
        mask = place < self.length[:, None]
        at = torch.where(mask, self.start[:, None] + place, 0)
        ids = self.tokens[at].long() if len(self.tokens) else at
        return {"input_ids": torch.where(mask, ids, self.form.padding), "attention_mask": mask}
