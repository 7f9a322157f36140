"""Gradients of dense layers' weights as products that are not multiplied out.

The gradient of a dense layer is as large as its weights, and for few examples the time of a step is that of writing
and reading it. The optimiser can multiply the factors itself, tile by tile, and never write the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.nested import map_nested
from fedkeep._util.private_apis import wrapper_tensor
from fedkeep.tree import Tree


class Product(Tensor):
    """dy^T x of every client, [K, O, I], from dy [K, B, O] and x [K, B, I]. Whatever reads it multiplies it out."""

    factors: tuple[Tensor, Tensor]

    @staticmethod
    def of(dy: Tensor, x: Tensor) -> Product:
        """Return the product of these factors."""
        self: Product = wrapper_tensor(Product, (len(x), dy.shape[2], x.shape[2]), x.dtype, x.device)
        self.factors = (dy, x)
        return self

    def dense(self) -> Tensor:
        """Multiply out."""
        dy, x = self.factors
        return torch.bmm(dy.mT, x)

    def centred(self) -> Product:
        """Return the product without its mean over the inputs, which is dy^T times x without its mean."""
        dy, x = self.factors
        return Product.of(dy, x - x.mean(2, keepdim=True)) if x.shape[2] > 1 else self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if args and isinstance(args[0], Product) and func._schema.is_mutable:
            raise NotImplementedError(f"{func} would change a product that has not been multiplied out")
        return func(*_dense(args), **_dense(kwargs or {}))


def _dense(given: Any) -> Any:
    return map_nested(Product, Product.dense, given)


def multiply_out(grads: Tree) -> Tree:
    """Return gradients with every product multiplied out."""
    return tree.map(_dense, grads)
