"""Text models without pre-trained weights: a bag of embeddings and a small transformer.

Their input is a batch of padded texts: `input_ids` and `attention_mask` (False for padding), [batch, width] each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep._util.text_form import LONGEST, TextForm
from fedkeep._util.validate import require_number, require_whole
from fedkeep.errors import ModelError
from fedkeep.models.networks import MAX_LAYERS, MAX_WIDTH, Network

TextInput = dict[str, Tensor]


class Bag(nn.Module):
    """The mean of a text's embeddings, one per token."""

    def __init__(self, form: TextForm, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(form.vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: TextInput) -> Tensor:
        """Return [batch, width]."""
        return self.dropout(mean_of_tokens(self.embedding(x["input_ids"]), x["attention_mask"]))  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """Attention of every token to all tokens of its text, with several heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, masked: Tensor) -> Tensor:
        """Return [batch, tokens, width]; `masked` is added to the scores, [batch, 1, 1, tokens]."""

        def split(t: Tensor) -> Tensor:
            return t.reshape(*t.shape[:-1], self.heads, -1).transpose(1, 2)  # [batch, heads, tokens, width / heads]

        q, k, v = split(self.query(h)), split(self.key(h)), split(self.value(h))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + masked
        weights = self.dropout(scores.softmax(-1))
        return self.output((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and two dense layers, each with a norm before it and a shortcut around it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = SelfAttention(width, heads, dropout)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, masked: Tensor) -> Tensor:
        """Return [batch, tokens, width]."""
        h = h + self.dropout(self.attention(self.norms[0](h), masked))
        return h + self.dropout(self.dense(self.norms[1](h)))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Embeddings of tokens and positions, blocks, and the mean over a text's tokens."""

    def __init__(self, form: TextForm, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(form.vocabulary, width), nn.Embedding(form.max_length, width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: TextInput) -> Tensor:
        """Return [batch, width]."""
        ids, mask = x["input_ids"], x["attention_mask"]
        position = torch.arange(ids.shape[-1], device=ids.device)
        h = self.dropout(self.tokens(ids) + self.positions(position))
        masked = mask_scores(mask, h.dtype)
        for block in self.blocks:
            h = block(h, masked)
        return mean_of_tokens(self.norm(h), mask)


def mean_of_tokens(h: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the real tokens of each text: [batch, tokens, width] -> [batch, width]."""
    weight = mask.to(h.dtype)[..., None]
    return (h * weight).sum(-2) / weight.sum(-2).clamp(min=1)


def mask_scores(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores of attention: 0, and the lowest number for padding; [batch, 1, 1, tokens]."""
    zero = torch.zeros_like(mask, dtype=dtype)
    return zero.masked_fill(~mask, torch.finfo(dtype).min)[:, None, None, :]


def bag(
    input_shape: Any,
    n_classes: int,
    width: int = 64,
    dropout: float = 0.0,
    projection: int | None = None,
    head: str = "linear",
) -> Network:
    """Return a bag of embeddings: the mean of a text's embeddings, and a linear classifier."""
    form = require_text("bag", input_shape)
    require_sizes(width=width)
    require_number("dropout", dropout, low=0, below=1, error=ModelError)
    network = text_network(Bag(form, width, dropout), width, n_classes, form, projection, head)
    network.text_form = replace(form, max_length=LONGEST)  # it has no positions
    return network


def small_transformer(
    input_shape: Any,
    n_classes: int,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    dropout: float = 0.1,
    projection: int | None = None,
    head: str = "linear",
) -> Network:
    """Return a transformer encoder whose weights are random, with a norm before every layer (pre-LN)."""
    form = require_text("small_transformer", input_shape)
    require_sizes(width=width, heads=heads)
    require_whole("layers", layers, low=1, high=MAX_LAYERS, error=ModelError)
    require_number("dropout", dropout, low=0, below=1, error=ModelError)
    if width % heads:
        raise ModelError(f"width = {width} must be a multiple of heads = {heads}", key="heads", value=heads)
    encoder = Encoder(form, width, layers, heads, dropout)
    return text_network(encoder, width, n_classes, form, projection, head)


def text_network(
    body: nn.Module, width: int, n_classes: int, form: TextForm, projection: int | None, head: str
) -> Network:
    """Return a network that knows of which form its texts are."""
    network = Network(body, width, n_classes, projection, head)
    network.text_form = form
    return network


def require_text(name: str, input_shape: Any) -> TextForm:
    """Return the form of the texts; raise if the examples are something else."""
    if not isinstance(input_shape, TextForm):
        raise ModelError(
            f"{name} needs texts, not examples of shape {tuple(input_shape)}: load data with a text column "
            "(load(..., text=...))",
            key="input_shape",
            value=tuple(input_shape),
        )
    return input_shape


def require_sizes(**sizes: int) -> None:
    """Raise unless these are sizes of layers."""
    for name, size in sizes.items():
        require_whole(name, size, low=1, high=MAX_WIDTH, error=ModelError)
