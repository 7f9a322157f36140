"""Outputs of layers that are not computed when the layer is called, because ReLU or pooling may follow.

Both are often part of the layer's own kernel. Until it is clear what follows, a `Deferred` stands for the output;
whatever else is done with it computes it first. Before a tensor changes in place, all outputs are computed, since it
may be a layer's input.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedkeep._util.nested import map_nested
from fedkeep._util.private_apis import wrapper_tensor


class _Outstanding(threading.local):
    """The layers of this thread that have not been computed yet."""

    def __init__(self) -> None:
        self.layers: weakref.WeakSet[Pending] = weakref.WeakSet()


_OUTSTANDING = _Outstanding()


@dataclass(eq=False)
class Pending:
    """A layer that has not been computed yet."""

    layer: Callable[[bool, bool], Tensor]  # layer(relu, pool) computes it
    can_pool: bool
    relu: bool = False
    pool: bool = False
    with_grad: bool = field(default_factory=torch.is_grad_enabled)  # when the layer was called
    value: Tensor | None = None

    def __post_init__(self) -> None:
        _OUTSTANDING.layers.add(self)

    def compute(self) -> Tensor:
        """Compute the layer, once; as if it had been computed when it was called."""
        if self.value is None:
            _OUTSTANDING.layers.discard(self)
            with torch.set_grad_enabled(self.with_grad):
                self.value = self.layer(self.relu, self.pool)
        return self.value


def compute_outstanding() -> None:
    """Compute every layer that has not been computed yet."""
    for pending in list(_OUTSTANDING.layers):
        pending.compute()


def may_change_in_place(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a torch function may change a tensor: by its name, or by a True among its arguments."""
    name = getattr(func, "__name__", "")
    named = name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return named or "out" in kwargs or any(value is True for value in (*args, *kwargs.values()))


class Deferred(Tensor):
    """Stands for the output of a layer that has not been computed yet, because ReLU or pooling may follow."""

    pending: Pending

    @staticmethod
    def of(pending: Pending, shape: Any, dtype: torch.dtype, device: torch.device) -> Deferred:
        """Return a stand-in of this shape."""
        self: Deferred = wrapper_tensor(Deferred, shape, dtype, device)
        self.pending = pending
        return self

    def followed_by(self, *, relu: bool = False, pool: bool = False) -> Deferred:
        """Return the stand-in for what ReLU or pooling makes of this output."""
        was, shape = self.pending, list(self.shape)
        if pool:
            shape[-2:] = [shape[-2] // 2, shape[-1] // 2]
        pending = Pending(
            was.layer,
            was.can_pool,
            was.relu or relu,
            was.pool or pool,
            was.with_grad and torch.is_grad_enabled(),
        )
        return Deferred.of(pending, shape, self.dtype, self.device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*computed(args), **computed(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} was called on a layer's output that has not been computed yet")


_METADATA = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.size,
    Tensor.dim,
}


def computed(given: Any) -> Any:
    """Return a value, or what is inside of lists, tuples and dicts, with every deferred output computed."""
    return map_nested(Deferred, lambda deferred: deferred.pending.compute(), given)
