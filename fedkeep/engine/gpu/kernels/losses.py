"""Losses per example over rows of logits, and the mean over the real examples of a batch: one kernel each way.

They compute what `fedkeep.losses` defines. Rows are examples of all clients, C classes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 1024  # logits that a program has at a time


@triton.jit
def _log_softmax(z, real):
    z = tl.where(real, z, -1e30)  # not minus infinity, whose difference is not a number
    z = z - tl.max(z, 1)[:, None]
    return z - tl.log(tl.sum(tl.exp(z), 1))[:, None]


@triton.jit
def _cross_entropy(z, y, out, dz, n, C: tl.constexpr, GRADIENT: tl.constexpr, BR: tl.constexpr,
                   BC: tl.constexpr):  # fmt: skip
    """out = -log softmax(z)[y]; or, from the gradient of that in `out`, dz."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    c = tl.arange(0, BC)
    real = (row[:, None] < n) & (c[None, :] < C)
    at = row[:, None] * C + c[None, :]
    log_q = _log_softmax(tl.load(z + at, mask=real, other=0.0).to(tl.float32), c[None, :] < C)
    truth = tl.load(y + row, mask=row < n, other=0)
    own = c[None, :] == truth[:, None]
    if GRADIENT:
        grad = tl.load(out + row, mask=row < n, other=0.0).to(tl.float32)
        value = (tl.exp(log_q) - tl.where(own, 1.0, 0.0)) * grad[:, None]
        tl.store(dz + at, value.to(dz.dtype.element_ty), mask=real)
    else:
        tl.store(out + row, -tl.sum(tl.where(own, log_q, 0.0), 1).to(out.dtype.element_ty), mask=row < n)


@triton.jit
def _kl(z, t, y, out, dz, dt, n, tau, C: tl.constexpr, NOT_TRUE: tl.constexpr, GRADIENT: tl.constexpr,
        TEACHER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """out = tau^2 KL(softmax(t / tau) || softmax(z / tau)), without class y if NOT_TRUE; or dz and dt."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    c = tl.arange(0, BC)
    inside = (row[:, None] < n) & (c[None, :] < C)
    counted = tl.broadcast_to(c[None, :] < C, (BR, BC))
    if NOT_TRUE:
        counted = counted & (c[None, :] != tl.load(y + row, mask=row < n, other=0)[:, None])
    at = row[:, None] * C + c[None, :]
    log_q = _log_softmax(tl.load(z + at, mask=inside, other=0.0).to(tl.float32) / tau, counted)
    log_p = _log_softmax(tl.load(t + at, mask=inside, other=0.0).to(tl.float32) / tau, counted)
    p = tl.exp(log_p)
    gap = tl.where(counted, log_p - log_q, 0.0)
    divergence = tl.sum(p * gap, 1)
    if GRADIENT:
        grad = tl.load(out + row, mask=row < n, other=0.0).to(tl.float32)[:, None] * tau
        tl.store(dz + at, ((tl.exp(log_q) - p) * grad).to(dz.dtype.element_ty), mask=inside)
        if TEACHER:
            tl.store(dt + at, (p * (gap - divergence[:, None]) * grad).to(dt.dtype.element_ty), mask=inside)
    else:
        tl.store(out + row, (tau * tau * divergence).to(out.dtype.element_ty), mask=row < n)


@triton.jit
def _masked_mean(values, mask, out, dv, B: tl.constexpr, GRADIENT: tl.constexpr, BB: tl.constexpr):
    """out[client] = mean of the values [client, B] where the mask is set; or, from its gradient in `out`, dv."""
    client = tl.program_id(0).to(tl.int64)
    count = tl.zeros((BB,), dtype=tl.float32)
    total = tl.zeros((BB,), dtype=tl.float32)
    for start in range(0, B, BB):
        b = start + tl.arange(0, BB)
        counted = tl.load(mask + client * B + b, mask=b < B, other=0) != 0
        count += counted.to(tl.float32)
        if not GRADIENT:
            value = tl.load(values + client * B + b, mask=counted & (b < B), other=0.0)
            total += value.to(tl.float32)
    n = tl.maximum(tl.sum(count), 1.0)
    if GRADIENT:
        share = tl.load(out + client).to(tl.float32) / n
        for start in range(0, B, BB):
            b = start + tl.arange(0, BB)
            counted = tl.load(mask + client * B + b, mask=b < B, other=0) != 0
            tl.store(dv + client * B + b, tl.where(counted, share, 0.0).to(dv.dtype.element_ty), mask=b < B)
    else:
        tl.store(out + client, (tl.sum(total) / n).to(out.dtype.element_ty))


def _rows(classes: int) -> dict[str, int]:
    BC = triton.next_power_of_2(classes)
    return {"BC": BC, "BR": max(1, min(32, _NUMBERS // BC))}


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """Return -log softmax(z)[y] of contiguous z [n, C] and y [n]."""
    n, C = z.shape
    out, tile = z.new_empty(n), _rows(C)
    _cross_entropy[(triton.cdiv(n, tile["BR"]),)](z, y, out, z, n, C, False, **tile)
    return out


def cross_entropy_gradient(z: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of z, from that of `cross_entropy`."""
    n, C = z.shape
    dz, tile = torch.empty_like(z), _rows(C)
    _cross_entropy[(triton.cdiv(n, tile["BR"]),)](z, y, grad, dz, n, C, True, **tile)
    return dz


def kl(z: Tensor, teacher: Tensor, y: Tensor | None, tau: float) -> Tensor:
    """Return tau^2 KL(teacher || z) of contiguous logits [n, C]; over the classes other than y, if that is given."""
    n, C = z.shape
    out, tile = z.new_empty(n), _rows(C)
    _kl[(triton.cdiv(n, tile["BR"]),)](
        z, teacher, z if y is None else y, out, z, z, n, tau, C, y is not None, False, False, **tile
    )
    return out


def kl_gradient(
    z: Tensor, teacher: Tensor, y: Tensor | None, tau: float, grad: Tensor, of_teacher: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of z and, if wanted, of the teacher's logits, from that of `kl`."""
    n, C = z.shape
    dz, dt, tile = torch.empty_like(z), torch.empty_like(teacher) if of_teacher else None, _rows(C)
    _kl[(triton.cdiv(n, tile["BR"]),)](
        z, teacher, z if y is None else y, grad, dz, dz if dt is None else dt, n, tau, C, y is not None, True,
        of_teacher, **tile,
    )  # fmt: skip
    return dz, dt


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of contiguous values [K, B] over the places where the mask is set, [K]."""
    K, B = values.shape
    out = values.new_empty(K)
    _masked_mean[(K,)](values, mask, out, values, B, False, BB=min(1024, triton.next_power_of_2(B)))
    return out


def masked_mean_gradient(mask: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the values, from that of `masked_mean`."""
    K, B = mask.shape
    dv = grad.new_empty(K, B)
    _masked_mean[(K,)](dv, mask, grad, dv, B, True, BB=min(1024, triton.next_power_of_2(B)))
    return dv
