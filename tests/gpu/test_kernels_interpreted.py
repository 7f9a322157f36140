"""The Triton kernels on the CPU, in Triton's interpreter, against torch's own layers (`make test-kernels`).

All numbers are small integers. Products and sums of them are exact in float32, in TF32 and in any order, so the results
must equal those of torch in float64 bit for bit. The interpreter does not support bfloat16; tests/gpu/test_gpu.py
covers that on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeep import tree
from fedkeep.engine.gpu import layers
from fedkeep.engine.mapping import map_clients

pytest.importorskip("triton", reason="Triton is not installed; `make test-kernels` installs it")
if torch.cuda.is_available():
    pytest.skip("there is a CUDA device: tests/gpu/test_gpu.py tests the compiled kernels", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 must be set before Triton is imported", allow_module_level=True)

from fedkeep.engine.gpu import kernels

DTYPES = [torch.float32, torch.float16]


def integers(*shape: int, seed: int = 0, largest: int = 3) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=draw).to(torch.float32)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected.to(actual.dtype))


def per_client(fn: Callable[..., Tensor], *stacked: Tensor) -> Tensor:
    """Apply a function to one client after the other, in float64."""
    return torch.stack([fn(*(t.double() for t in one)) for one in zip(*stacked, strict=True)])


def channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 1, 3, 4, 2)


def window_first(w: Tensor) -> Tensor:
    return w.permute(0, 3, 4, 2, 1).contiguous()


# (clients, images, input channels, height, width, output channels, window height, window width, stride, padding)
CONVOLUTIONS = {
    "3x3": (2, 3, 4, 8, 8, 5, 3, 3, 1, (1, 1)),
    "one client, one image, one channel": (1, 1, 1, 5, 5, 1, 3, 3, 1, (0, 0)),
    "5x5, odd image": (3, 2, 3, 11, 9, 20, 5, 5, 1, (0, 0)),
    "1x1": (2, 3, 33, 5, 4, 16, 1, 1, 1, (0, 0)),
    "1x1, stride 2": (2, 2, 6, 7, 5, 4, 1, 1, 2, (0, 0)),
    "window as large as the image": (2, 3, 2, 4, 5, 3, 4, 5, 1, (0, 0)),
    "oblong window and padding": (2, 2, 3, 9, 6, 4, 2, 5, 1, (1, 3)),
    "stride 2, even image": (2, 3, 4, 8, 8, 5, 3, 3, 2, (1, 1)),
    "stride 2, odd image": (2, 3, 4, 9, 7, 5, 3, 3, 2, (1, 1)),
    "stride 2, last row and column unused": (2, 2, 3, 8, 10, 4, 3, 3, 2, (0, 0)),
    "stride 3, wider than the window": (1, 2, 3, 11, 10, 4, 2, 2, 3, (0, 0)),
    "several tiles along every axis": (2, 2, 5, 17, 16, 66, 3, 3, 1, (1, 1)),
}


class Convolution:
    """Inputs of one convolution in torch's layout, and the output and gradients that torch computes in float64."""

    def __init__(self, K, B, C, H, W, O, R, S, stride, pad) -> None:
        self.stride, self.pad, self.window, self.size = stride, pad, (R, S), (H, W)
        self.x, self.w, self.bias = integers(K, B, C, H, W), integers(K, O, C, R, S, seed=1), integers(K, O, seed=2)
        x, w, bias = (t.double().requires_grad_() for t in (self.x, self.w, self.bias))
        self.y = per_client(lambda x, w, b: F.conv2d(x, w, b, stride, pad), x, w, bias)
        self.dy = integers(*self.y.shape, seed=3, largest=1)
        self.dx, self.dw, self.dbias = torch.autograd.grad(self.y, (x, w, bias), self.dy.double())


@pytest.fixture(params=CONVOLUTIONS)
def conv(request: pytest.FixtureRequest) -> Convolution:
    return Convolution(*CONVOLUTIONS[request.param])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolution_equals_torch(conv: Convolution, dtype: torch.dtype) -> None:
    x, w, bias = channels_last(conv.x.to(dtype)), window_first(conv.w.to(dtype)), conv.bias.to(dtype)
    y = kernels.convolve(x, w, bias, conv.stride, conv.pad)
    assert y.dtype == dtype
    assert_same(y, channels_last(conv.y))


def test_convolution_without_bias_equals_torch(conv: Convolution) -> None:
    y = kernels.convolve(channels_last(conv.x), window_first(conv.w), None, conv.stride, conv.pad)
    assert_same(y, channels_last(conv.y - conv.bias[:, None, :, None, None]))


def test_nan_reaches_only_the_outputs_whose_window_covers_it(conv: Convolution) -> None:
    """Tiles are larger than windows; what is gathered outside of a window must not count, not even times zero."""
    x = conv.x.clone()
    x[-1, -1, -1, -1, -1] = torch.nan
    x[0, 0, 0, x.shape[3] // 2, 0] = torch.nan
    y = kernels.convolve(channels_last(x), window_first(conv.w), None, conv.stride, conv.pad)
    expected = per_client(lambda x, w: F.conv2d(x, w, None, conv.stride, conv.pad), x, conv.w)
    torch.testing.assert_close(y, channels_last(expected).float(), rtol=0, atol=0, equal_nan=True)


def test_kernels_read_images_of_any_memory_layout() -> None:
    """Channels-last, with gaps, and one image for all clients (stride 0)."""
    conv = Convolution(*CONVOLUTIONS["oblong window and padding"])
    x, w, dy = channels_last(conv.x), window_first(conv.w), channels_last(conv.dy).contiguous()
    for layout in (x.contiguous(), torch.stack([x, x + 1], -1)[..., 0], x[:1, :1].expand_as(x)):
        reference = layout.permute(0, 1, 4, 2, 3).contiguous()
        expected = per_client(lambda x, w: F.conv2d(x, w, None, conv.stride, conv.pad), reference, conv.w)
        assert_same(kernels.convolve(layout, w, None, conv.stride, conv.pad), channels_last(expected))
        expected_dw = kernels.weight_gradient(layout.contiguous(), dy, conv.window, conv.stride, conv.pad)
        assert_same(kernels.weight_gradient(layout, dy, conv.window, conv.stride, conv.pad), expected_dw)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_input_gradient_equals_torch(conv: Convolution, dtype: torch.dtype) -> None:
    dy, w = channels_last(conv.dy.to(dtype)).contiguous(), window_first(conv.w.to(dtype))
    assert_same(kernels.input_gradient(dy, w, conv.size, conv.stride, conv.pad), channels_last(conv.dx))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_gradient_equals_torch(conv: Convolution, dtype: torch.dtype) -> None:
    x, dy = channels_last(conv.x.to(dtype)), channels_last(conv.dy.to(dtype)).contiguous()
    dw = kernels.weight_gradient(x, dy, conv.window, conv.stride, conv.pad)
    assert dw.dtype == dtype
    assert_same(dw, window_first(conv.dw))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_gradient_equals_torch(conv: Convolution, dtype: torch.dtype) -> None:
    db = kernels.bias_gradient(channels_last(conv.dy.to(dtype)).contiguous())
    assert db.dtype == dtype
    assert_same(db, conv.dbias)


POOLING = [
    ((4, 6, 8, 3), 2),
    ((3, 7, 9, 5), 2),
    ((2, 9, 10, 17), 3),
    ((2, 5, 4, 3), 1),
    ((1, 15, 16, 2), 15),
    ((5, 3, 2, 300), 2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "size"), POOLING, ids=str)
def test_pooling_and_its_gradient_equal_torch(shape: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    """With many ties, as the numbers are few: the first maximum of a window gets the gradient."""
    x = integers(*shape).to(dtype)
    reference = x.double().permute(0, 3, 1, 2).contiguous().requires_grad_()
    expected = F.max_pool2d(reference, size)
    y, argmax = kernels.pool(x, size)
    assert_same(y, expected.permute(0, 2, 3, 1))
    dy = integers(*y.shape, seed=1).to(dtype)
    (dx,) = torch.autograd.grad(expected, reference, dy.double().permute(0, 3, 1, 2))
    assert_same(kernels.pool_gradient(dy, argmax, shape, size), dx.permute(0, 2, 3, 1))


@pytest.mark.parametrize("position", range(4))
def test_pooling_returns_nan_where_a_window_has_one(position: int) -> None:
    x = integers(2, 4, 4, 3)
    x[1, 2 + position // 2, position % 2, 1] = torch.nan
    y, argmax = kernels.pool(x, 2)
    expected = F.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
    assert torch.equal(y.isnan(), expected.isnan())
    assert y.isnan().sum() == 1
    assert argmax[1, 1, 0, 1] == position


def test_round_to_tf32_returns_the_nearest_number_with_ten_bits_of_mantissa() -> None:
    draw = torch.Generator().manual_seed(0)
    t = torch.randn(3000, generator=draw) * 10.0 ** torch.randint(-20, 20, (3000,), generator=draw)
    mantissa, exponent = torch.frexp(t.double())
    expected = torch.ldexp((mantissa * 2**11).round(), exponent - 11)
    assert_same(kernels.round_to_tf32(t), expected)


def test_round_to_tf32_rounds_ties_away_from_zero_and_keeps_zero_and_infinity() -> None:
    tie = 1 + 2.0**-11
    t = torch.tensor([tie, -tie, 0.0, -0.0, torch.inf, -torch.inf, 1 + 2.0**-10, 2 - 2.0**-23])
    expected = torch.tensor([1 + 2.0**-10, -1 - 2.0**-10, 0.0, -0.0, torch.inf, -torch.inf, 1 + 2.0**-10, 2.0])
    rounded = kernels.round_to_tf32(t)
    assert_same(rounded, expected)
    assert torch.equal(rounded.signbit(), expected.signbit())


def test_round_to_tf32_accepts_any_memory_layout_and_leaves_other_types_alone() -> None:
    t = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    for layout in (t.permute(2, 0, 1), t[:, ::2], t[:1].expand(3, 5, 6), t[:, :0]):
        assert_same(kernels.round_to_tf32(layout), kernels.round_to_tf32(layout.contiguous()))
    half = t.half()
    assert kernels.round_to_tf32(half) is half


# The layers, as a model under vmap calls them


def supported(params: tree.Tree, x: Tensor) -> Tensor:
    """Three convolutions, two of them with a bias, one pooling, one dense layer."""
    x = F.max_pool2d(F.conv2d(x, params["w1"], params["b1"], padding=(2, 1)), 2)
    x = F.conv2d(x, params["w2"], stride=2, padding=1)
    x = F.conv2d(x, params["w3"], params["b3"])
    return F.linear(x.flatten(1), params["w4"], params["b4"])


def unsupported(params: tree.Tree, x: Tensor) -> Tensor:
    """Groups, "same" padding, dilation, overlapping pooling, weights shared by all clients: calls left to vmap."""
    x = F.conv2d(x, params["w1"][:3, :1], groups=3, padding=1)
    x = F.conv2d(x, params["w2"][:4, :3], padding="same")
    x = F.max_pool2d(F.conv2d(x, params["w2"], padding=2, dilation=2), 2, stride=1)
    return (
        F.conv2d(x, torch.ones(2, 6, 1, 1, dtype=x.dtype)) + params["b4"].sum() + sum(p.sum() for p in params.values())
    )


def gradients(each: Callable[..., Any], network: Callable[..., Tensor], dtype: torch.dtype) -> tree.Tree:
    K, B = 3, 2
    shapes = {
        "w1": (4, 3, 5, 3),
        "b1": (4,),
        "w2": (6, 4, 3, 3),
        "w3": (4, 6, 1, 1),
        "b3": (4,),
        "w4": (7, 48),
        "b4": (7,),
    }
    params = {
        n: integers(K, *s, seed=i, largest=1).to(dtype).requires_grad_() for i, (n, s) in enumerate(shapes.items())
    }
    x = integers(K, B, 3, 13, 15, seed=9, largest=1).to(dtype).requires_grad_()
    z = each(network, params, x)
    grads = torch.autograd.grad(z.sum(), [x, *params.values()])
    return {"z": z.detach(), **dict(zip(["x", *params], grads, strict=True))}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are called, in order."""
    names: list[str] = []

    def record(name: str, kernel: Callable[..., Any]) -> None:
        monkeypatch.setattr(kernels, name, lambda *args: (names.append(name), kernel(*args))[1])

    for name in ("convolve", "weight_gradient", "bias_gradient", "pool", "pool_gradient"):
        record(name, getattr(kernels, name))
    return names


@pytest.mark.parametrize("network", [supported, unsupported])
def test_layers_under_vmap_equal_torch(network: Callable[..., Tensor], calls: list[str]) -> None:
    exact = gradients(map_clients, network, torch.float64)
    ours = gradients(layers.vmap_with_kernels, network, torch.float32)
    for name, expected in exact.items():
        assert_same(ours[name], expected)
    counts = {"convolve": 6, "weight_gradient": 3, "bias_gradient": 2, "pool": 1, "pool_gradient": 1}
    assert {name: calls.count(name) for name in calls} == (counts if network is supported else {})
