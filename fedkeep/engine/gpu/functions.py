"""Layers and losses of a stack of models as autograd functions, computed by the kernels for all clients at once.

Every tensor has the client axis first: x [K, B, ...], weights [K, ...]. Where all clients have the same images, x is
expanded along that axis (stride 0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedkeep.engine.gpu.kernels import kernels
from fedkeep.engine.gpu.products import Product

_Ctx = Any
DROPOUT_AXES = 4  # of one client's tensor, at most
FEW = 128  # examples of a dense layer whose time is that of reading and writing its weights


class Linear(torch.autograd.Function):
    """x [K, B, I] times w [K, O, I] transposed, plus b [K, O].

    `dtype` is the type of the factors, if it is not that of the arguments.
    """

    has_weights = True

    @staticmethod
    def forward(ctx: _Ctx, x: Tensor, w: Tensor, b: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.dtype = dtype
        factors = x.to(dtype), w.to(dtype).mT
        y = torch.bmm(*factors) if b is None else torch.baddbmm(b.to(dtype)[:, None], *factors)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        needed, dtype = ctx.needs_input_grad, ctx.dtype
        dy = dy.to(dtype)
        return (
            torch.bmm(dy, w.to(dtype)).to(x.dtype) if needed[0] else None,
            _weight_gradient(dy, x.to(dtype), w.dtype) if needed[1] else None,
            kernels().dense.sum_rows(dy).to(w.dtype) if needed[2] else None,
            None,
        )


def _weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dy^T x; for few examples, as a product that the optimiser multiplies out."""
    if dtype == x.dtype == torch.float32 and x.shape[1] <= FEW:
        return Product.of(dy.contiguous(), x.contiguous())
    return torch.bmm(dy.mT, x).to(dtype)


class Conv2d(torch.autograd.Function):
    """x [K, B, C, H, W] convolved with w [K, O, C, R, S], plus b [K, O]; then ReLU and 2 x 2 max pooling if wanted.

    The output has its channels last: [K, B, OH, OW, O].
    """

    has_weights = True

    @staticmethod
    def forward(
        ctx: _Ctx, x: Tensor, w: Tensor, b: Tensor | None, stride: int, pad: tuple[int, int], relu: bool, pool: bool
    ) -> Tensor:  # fmt: skip
        conv, factors = kernels().convolution, kernels().factors
        geometry = factors.Geometry(tuple(x.shape[3:]), tuple(w.shape[3:]), stride, pad)
        images, weights = factors.prepare_images(x, pad), factors.prepare_weights(w)
        bias = None if b is None else b.contiguous()
        y, place = conv.convolve(images, weights, bias, geometry.output, x.dtype, stride, relu, pool)
        ctx.save_for_backward(*images, w, place if pool else y if relu else None)
        ctx.geometry, ctx.pool, ctx.x_dtype = geometry, pool, x.dtype
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, dy: Tensor) -> Any:
        conv, factors = kernels().convolution, kernels().factors
        values, inverse, w, kept = ctx.saved_tensors
        needed, place = ctx.needs_input_grad, kept if ctx.pool else None
        g, sums = factors.gather_gradient(_channels_first(dy), kept)
        dx = dw = None
        if needed[0]:
            rotated = factors.prepare_rotated_weights(w)
            dx = _channels_first(conv.input_gradient(g, place, rotated, ctx.geometry, ctx.x_dtype))
        if needed[1]:
            dw = conv.weight_gradient(factors.Factors(values, inverse), g, place, ctx.geometry, w.shape[2], w.dtype)
        return dx, dw, kernels().dense.sum_rows(sums).to(w.dtype) if needed[2] else None, None, None, None, None


class MaxPool2d(torch.autograd.Function):
    """Maximum of every window of x [K, B, C, H, W], channels last; windows do not overlap."""

    has_weights = False

    @staticmethod
    def forward(ctx: _Ctx, x: Tensor, size: int) -> Tensor:
        x = x.permute(0, 1, 3, 4, 2).contiguous()
        ctx.size, ctx.shape = size, x.shape
        y, argmax = kernels().pooling.pool(x, size)
        ctx.save_for_backward(argmax)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, dy: Tensor) -> Any:
        (argmax,) = ctx.saved_tensors
        return _channels_first(kernels().pooling.pool_gradient(dy.contiguous(), argmax, ctx.shape, ctx.size)), None


class GroupNorm(torch.autograd.Function):
    """x [K, B, C, ...] normalised over groups of channels, times w [K, C], plus b [K, C]; then ReLU if wanted.

    The output has its channels last: [K, B, ..., C].
    """

    has_weights = True

    @staticmethod
    def forward(
        ctx: _Ctx, x: Tensor, w: Tensor | None, b: Tensor | None, groups: int, eps: float, relu: bool
    ) -> Tensor:  # fmt: skip
        w, b = (None if t is None else t.contiguous() for t in (w, b))
        y, mean, rstd = kernels().group_norm.normalise(x, groups, w, b, eps, relu)
        ctx.save_for_backward(x, w, y if relu else None, mean, rstd)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, dy: Tensor) -> Any:
        x, w, y, mean, rstd = ctx.saved_tensors
        dx, dw, db = kernels().group_norm.gradients(
            dy.movedim(-1, 2), x if y is None else y, x, w, mean, rstd, relu=y is not None
        )
        affine = w is not None
        return (
            dx.movedim(-1, 2),
            dw.to(w.dtype) if affine else None,
            db.to(w.dtype) if affine else None,
            None,
            None,
            None,
        )


class Dropout(torch.autograd.Function):
    """`fedkeep._util.counter_random.drop` of x [K, ...] with keys [K]; the gradient draws the same again."""

    has_weights = False

    @staticmethod
    def forward(ctx: _Ctx, x: Tensor, keys: Tensor, stream: int, p: float, batch: int | None) -> Tensor:
        keys = keys.contiguous()
        ctx.save_for_backward(keys)
        ctx.options = stream, p, batch
        return kernels().dropout.drop(x.contiguous(), keys, *ctx.options)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, dy: Tensor) -> Any:
        return kernels().dropout.drop(dy.contiguous(), *ctx.saved_tensors, *ctx.options), None, None, None, None


class CrossEntropy(torch.autograd.Function):
    """`fedkeep.losses.cross_entropy` of z [K, B, C] and y [K, B]."""

    has_weights = False

    @staticmethod
    def forward(ctx: _Ctx, z: Tensor, y: Tensor) -> Tensor:
        z, y = z.contiguous(), y.contiguous()
        ctx.save_for_backward(z, y)
        return kernels().losses.cross_entropy(z.flatten(0, 1), y.flatten()).view(y.shape)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, grad: Tensor) -> Any:
        z, y = ctx.saved_tensors
        dz = kernels().losses.cross_entropy_gradient(z.flatten(0, 1), y.flatten(), grad.contiguous().flatten())
        return dz.view(z.shape), None


class Kl(torch.autograd.Function):
    """`fedkeep.losses.kl` of logits [K, B, C]; with y, `not_true_kl`."""

    has_weights = False

    @staticmethod
    def forward(ctx: _Ctx, z: Tensor, teacher: Tensor, y: Tensor | None, tau: float) -> Tensor:
        z, teacher = z.contiguous(), teacher.contiguous()
        y = None if y is None else y.contiguous()
        ctx.save_for_backward(z, teacher, y)
        ctx.tau = tau
        classes = None if y is None else y.flatten()
        out: Tensor = kernels().losses.kl(z.flatten(0, 1), teacher.flatten(0, 1), classes, tau)
        return out.view(z.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, grad: Tensor) -> Any:
        z, teacher, y = ctx.saved_tensors
        dz, dt = kernels().losses.kl_gradient(
            z.flatten(0, 1), teacher.flatten(0, 1), None if y is None else y.flatten(), ctx.tau,
            grad.contiguous().flatten(), of_teacher=ctx.needs_input_grad[1],
        )  # fmt: skip
        return dz.view(z.shape), None if dt is None else dt.view(z.shape), None, None


class MaskedMean(torch.autograd.Function):
    """`fedkeep.losses.masked_mean` of values [K, B]."""

    has_weights = False

    @staticmethod
    def forward(ctx: _Ctx, values: Tensor, mask: Tensor) -> Tensor:
        mask = mask.contiguous()
        ctx.save_for_backward(mask)
        return kernels().losses.masked_mean(values.contiguous(), mask)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, grad: Tensor) -> Any:
        return kernels().losses.masked_mean_gradient(ctx.saved_tensors[0], grad.contiguous()), None


def _channels_first(x: Tensor) -> Tensor:
    """[K, B, H, W, C] -> [K, B, C, H, W], a view."""
    return x.permute(0, 1, 4, 2, 3)
