"""Dropout whose draws are a function of a key, wherever a model calls it.

`keyed` sets the key around the code that calls a model; `keyed_dropout`, around the model itself, replaces torch's
dropout by one that draws by counter (`fedkeep._util.counter_random`). Within `keyed`, calls are numbered: two layers,
or two calls of the model, have different draws.

Other random functions are left to torch: `F.rrelu`, `torch.bernoulli`, the dropout inside of `nn.LSTM`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from fedkeep._util import counter_random
from fedkeep._util.private_apis import without_override_check

Drop = Callable[[Tensor, Tensor, int, float, int | None], Tensor]  # computes what counter_random.drop does

_ALPHA = -1.0507009873554805 * 1.6732632423543772  # what SELU tends to for small inputs: alpha dropout's "off"


class _Draws:
    """A key, and the number of draws made with it so far."""

    def __init__(self, key: Tensor) -> None:
        self.key, self.numbers = key, itertools.count()

    def next_stream(self) -> int:
        return counter_random.stream(next(self.numbers))


_draws: ContextVar[_Draws | None] = ContextVar("draws", default=None)


@contextmanager
def keyed(key: Tensor) -> Iterator[None]:
    """Set the key, a single int64, from which dropout draws."""
    token = _draws.set(_Draws(key))
    try:
        yield
    finally:
        _draws.reset(token)


def keyed_dropout(
    n_examples: int, batch: int | None = None, drop: Drop = counter_random.drop
) -> AbstractContextManager[Any]:
    """Return the context in which dropout draws from the key; where none is set, torch's dropout stays as it is.

    `n_examples` is the number of examples that the model is called with. If other examples follow those of the batch,
    `batch` is the number of the latter, padding included: the draws of the others do not depend on it.
    """
    draws = _draws.get()
    return nullcontext() if draws is None else _KeyedDropout(draws, n_examples, batch, drop)


def may_drop(model: nn.Module) -> bool:
    """Return whether a model may call dropout.

    A layer of torch or of fedkeep does if it is a dropout layer, or if it has a probability called `dropout`. A class
    of anyone else may call anything.

    >>> may_drop(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), may_drop(nn.Dropout(0.1)), may_drop(nn.Dropout(0.0))
    (False, True, False)
    """
    return any(map(_layer_may_drop, model.modules()))


def _layer_may_drop(layer: nn.Module) -> bool:
    if not type(layer).__module__.startswith(("torch.nn.", "fedkeep.models.")):
        return True
    p = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", 0)
    return isinstance(p, int | float) and p > 0


class _KeyedDropout(TorchFunctionMode):
    """Replaces torch's dropout functions, each by a function of the same arguments."""

    def __init__(self, draws: _Draws, n_examples: int, batch: int | None, drop: Drop) -> None:
        super().__init__()
        self.draws, self.n_examples, self.batch, self._drop = draws, n_examples, batch, drop

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _REPLACEMENTS.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(self, *args, **(kwargs or {}))

    def drop(self, x: Tensor, p: float) -> Tensor:
        """Return x after dropout with new draws."""
        if p <= 0:
            return x
        if p >= 1:
            return x * 0
        return self._drop(x, self.draws.key, self.draws.next_stream(), p, self._rows_of_batch(x))

    def _rows_of_batch(self, x: Tensor) -> int | None:
        """Return how many of the first rows are the batch's; None if nothing follows it, or rows are not examples."""
        if self.batch is None or not x.ndim or len(x) % self.n_examples:
            return None
        return self.batch * (len(x) // self.n_examples)

    def factors(self, x: Tensor, axes: int, p: float) -> Tensor:
        """Return 0 or 1 / (1 - p) for every position along the first axes of x; the other axes have size 1."""
        shape = (*x.shape[:axes], *[1] * (x.ndim - axes))
        return self.drop(torch.ones(shape, dtype=x.dtype, device=x.device), p)


# Each replacement has the arguments of the function that it replaces.


def _dropout(
    mode: _KeyedDropout, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not _is_active(p, training):
        return input
    return _result(mode.drop(input, p), input, inplace)


def _dropout_of_channels(
    mode: _KeyedDropout,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    without_examples: int = 0,
) -> Tensor:
    """Drop whole channels. An input of `without_examples` axes has no axis of examples before them."""
    if not _is_active(p, training):
        return input
    channels = 1 if input.ndim == without_examples else 2
    return _result(input * mode.factors(input, channels, p), input, inplace)


def _alpha_dropout(
    mode: _KeyedDropout,
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    *,
    of_channels: bool = False,
) -> Tensor:
    """Set elements to what SELU returns for very small inputs, and keep mean 0 and variance 1."""
    if not _is_active(p, training):
        return input
    off = mode.factors(input, 2 if of_channels else input.ndim, p) == 0
    scale = 1 / math.sqrt((1 - p) * (1 + p * _ALPHA**2)) if p < 1 else 0.0
    return _result(torch.where(off, _ALPHA * (1 - p), input - _ALPHA * p) * scale, input, inplace)


def _attention(
    mode: _KeyedDropout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention by its formula; torch's kernels draw their own random numbers. Without dropout, use them."""
    if not dropout_p:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        heads = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(heads, dim=-3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    smallest, blocked = torch.finfo(scores.dtype).min, None
    if is_causal:
        blocked = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        blocked = ~attn_mask
    elif attn_mask is not None:
        scores = (scores + attn_mask).clamp(min=smallest)  # a row of -inf alone would be NaN
    if blocked is None:
        weights = scores.softmax(-1)
    else:
        weights = scores.masked_fill(blocked, smallest).softmax(-1).masked_fill(blocked, 0)
    return mode.drop(weights, dropout_p) @ value


_visible_attention = without_override_check(F.multi_head_attention_forward)


def _multi_head_attention(mode: _KeyedDropout, *args: Any, **kwargs: Any) -> Any:
    """Call torch's Python function so that the functions that it calls are replaced."""
    if _visible_attention is None:
        return F.multi_head_attention_forward(*args, **kwargs)
    with mode:
        return _visible_attention(*args, **kwargs)


def _is_active(p: float, training: bool) -> bool:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return training and p > 0


def _result(out: Tensor, input: Tensor, inplace: bool) -> Tensor:
    return input.copy_(out) if inplace else out


def _torch_name(replacement: Callable[..., Tensor], inplace: bool = False, **options: Any) -> Callable[..., Tensor]:
    """Return the replacement of a function of the torch namespace, whose arguments are (input, p, train)."""

    def replace(mode: _KeyedDropout, input: Tensor, p: float, train: bool) -> Tensor:
        return replacement(mode, input, p, train, inplace, **options)

    return replace


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    F.dropout1d: functools.partial(_dropout_of_channels, without_examples=2),
    F.dropout2d: _dropout_of_channels,
    F.dropout3d: functools.partial(_dropout_of_channels, without_examples=4),
    F.alpha_dropout: _alpha_dropout,
    F.feature_alpha_dropout: functools.partial(_alpha_dropout, of_channels=True),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head_attention,
    torch.dropout: _torch_name(_dropout),
    torch.dropout_: _torch_name(_dropout, inplace=True),
    torch.feature_dropout: _torch_name(_dropout_of_channels),
    torch.feature_dropout_: _torch_name(_dropout_of_channels, inplace=True),
    torch.alpha_dropout: _torch_name(_alpha_dropout),
    torch.alpha_dropout_: _torch_name(_alpha_dropout, inplace=True),
    torch.feature_alpha_dropout: _torch_name(_alpha_dropout, of_channels=True),
    torch.feature_alpha_dropout_: _torch_name(_alpha_dropout, inplace=True, of_channels=True),
}
