"""The Triton kernels on the CPU, in Triton's interpreter, against torch's own layers (`make test-kernels`).

All numbers are small integers. Products and sums of them are exact in float32, in TF32 and in any order, so the results
must equal those of torch in float64 bit for bit. The interpreter does not support bfloat16; tests/gpu/test_gpu.py
covers that on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.problems import Problem, gap
from torch import Tensor

from fedkeep import losses, tree
from fedkeep._util import counter_random
from fedkeep.data.augment import Augment, InputPipeline
from fedkeep.engine.gpu import layers
from fedkeep.engine.mapping import map_clients
from fedkeep.engine.stacked import Stacked
from fedkeep.method import FedAvg
from fedkeep.methods import FedKeep, GCFed, Scaffold

pytest.importorskip("triton", reason="Triton is not installed; `make test-kernels` installs it")
if torch.cuda.is_available():
    pytest.skip("there is a CUDA device: tests/gpu/test_gpu.py tests the compiled kernels", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 must be set before Triton is imported", allow_module_level=True)

from fedkeep.engine.gpu import functions, updates
from fedkeep.engine.gpu.accelerator import GpuAccelerator
from fedkeep.engine.gpu.kernels import dense, factors, images, pooling
from fedkeep.engine.gpu.kernels import losses as loss_kernels
from fedkeep.engine.gpu.kernels import updates as update_kernels
from fedkeep.engine.gpu.products import Product
from fedkeep.optim import SGD, Adam, AdamW
from fedkeep.task import Accelerator

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


def channels_first(x: Tensor) -> Tensor:
    return x.movedim(-1, 2)


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

    def __init__(self, K, B, C, H, W, O, R, S, stride, pad, relu=False, pool=False) -> None:
        self.geometry = factors.Geometry((H, W), (R, S), stride, pad)
        self.options = (stride, pad, relu, pool)
        self.x, self.w, self.bias = integers(K, B, C, H, W), integers(K, O, C, R, S, seed=1), integers(K, O, seed=2)
        x, w, bias = (t.double().requires_grad_() for t in (self.x, self.w, self.bias))

        def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            y = F.conv2d(x, w, b, stride, pad)
            y = F.relu(y) if relu else y
            return F.max_pool2d(y, 2) if pool else y

        self.y = per_client(layer, x, w, bias)
        self.dy = integers(*self.y.shape, seed=3, largest=1)
        self.dx, self.dw, self.dbias = torch.autograd.grad(self.y, (x, w, bias), self.dy.double())

    def ours(self, dtype: torch.dtype) -> list[Tensor]:
        """Return output and gradients of our layer."""
        given = [t.to(dtype).requires_grad_() for t in (self.x, self.w, self.bias)]
        y = channels_first(functions.Conv2d.apply(*given, *self.options))
        assert y.dtype == dtype
        return [y.detach(), *torch.autograd.grad(y, given, self.dy.to(dtype))]


@pytest.mark.parametrize("after", ["", "relu", "pool", "relu and pool"])
@pytest.mark.parametrize("sizes", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolution_and_its_gradients_equal_torch(sizes: tuple[Any, ...], after: str) -> None:
    """With many ties, as the numbers are few: the first maximum of a window gets the gradient."""
    dtype = torch.float32 if after else torch.float16
    probe = Convolution(*sizes)
    if "pool" in after and min(probe.geometry.output) < 2:
        pytest.skip("the output is smaller than a window")
    conv = Convolution(*sizes, relu="relu" in after, pool="pool" in after)
    for actual, expected in zip(conv.ours(dtype), (conv.y, conv.dx, conv.dw, conv.dbias), strict=True):
        assert_same(actual, expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("pool", [False, True])
def test_nan_reaches_only_the_outputs_whose_window_covers_it(relu: bool, pool: bool) -> None:
    """Tiles are larger than windows; what is gathered outside of a window must not count, not even times zero."""
    for name in (
        "5x5, odd image",
        "oblong window and padding",
        "stride 2, odd image",
        "several tiles along every axis",
    ):
        conv = Convolution(*CONVOLUTIONS[name])
        x = conv.x.clone()
        x[-1, -1, -1, -1, -1] = torch.nan
        x[0, 0, 0, x.shape[3] // 2, 0] = torch.nan
        stride, pad = conv.options[:2]
        y = channels_first(functions.Conv2d.apply(x, conv.w, None, stride, pad, relu, pool))
        expected = per_client(lambda x, w, s=stride, p=pad: F.conv2d(x, w, None, s, p), x, conv.w)
        expected = F.relu(expected) if relu else expected
        expected = torch.stack([F.max_pool2d(one, 2) for one in expected]) if pool else expected
        torch.testing.assert_close(y, expected.float(), rtol=0, atol=0, equal_nan=True)


def test_convolution_reads_images_and_gradients_of_any_memory_layout() -> None:
    """Channels-last, with gaps, and one image for all clients (stride 0)."""
    conv = Convolution(*CONVOLUTIONS["oblong window and padding"])
    channels_last = conv.x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    with_gaps, shared = torch.stack([conv.x, conv.x + 1], -1)[..., 0], conv.x[:1, :1].expand_as(conv.x)
    for x in (channels_last, with_gaps, shared):
        results = []
        for given, dy in ((x, conv.dy), (x.contiguous(), conv.dy.transpose(3, 4).contiguous().transpose(3, 4))):
            w = conv.w.clone().requires_grad_()
            y = channels_first(functions.Conv2d.apply(given, w, None, *conv.options))
            results.append([y.detach(), *torch.autograd.grad(y, [w], dy)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


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
    y, argmax = pooling.pool(x, size)
    assert_same(y, expected.permute(0, 2, 3, 1))
    dy = integers(*y.shape, seed=1).to(dtype)
    (dx,) = torch.autograd.grad(expected, reference, dy.double().permute(0, 3, 1, 2))
    assert_same(pooling.pool_gradient(dy, argmax, shape, size), dx.permute(0, 2, 3, 1))


@pytest.mark.parametrize("position", range(4))
def test_pooling_returns_nan_where_a_window_has_one(position: int) -> None:
    x = integers(2, 4, 4, 3)
    x[1, 2 + position // 2, position % 2, 1] = torch.nan
    y, argmax = pooling.pool(x, 2)
    expected = F.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
    assert torch.equal(y.isnan(), expected.isnan())
    assert y.isnan().sum() == 1
    assert argmax[1, 1, 0, 1] == position


def rounded(t: Tensor) -> Tensor:
    """Round numbers of any size to factors of a product and back, one image for each."""
    made = factors.prepare_images(t.view(1, -1, 1, 1, 1), (0, 0))
    return made.values[0, :, 0, 0, 0].float() * made.inverse[0]


def test_factors_have_ten_bits_of_mantissa_as_tf32_has() -> None:
    draw = torch.Generator().manual_seed(0)
    t = torch.randn(200, generator=draw) * 10.0 ** torch.randint(-28, 28, (200,), generator=draw)
    mantissa, exponent = torch.frexp(t.double())
    expected = torch.ldexp((mantissa * 2**11).round(), exponent - 11)
    assert_same(rounded(t), expected)


def test_factors_keep_their_precision_far_below_the_largest_number_of_an_image() -> None:
    """Down to 2^-28 of it. What is smaller loses bits, but a sum in float32 with the largest would lose all of them."""
    numbers = torch.tensor([1.5 * 2.0**-e for e in range(0, 60, 4)])
    made = factors.prepare_images(numbers.view(1, 1, 1, 1, -1), (0, 0))
    back = made.values[0, 0, 0, :, 0].float() * made.inverse[0, 0]
    precise = numbers >= 2.0**-28
    assert torch.equal(back[precise], numbers[precise])
    assert float((back - numbers).abs().max()) <= 2.0**-38


def test_factors_keep_zero_infinity_and_nan() -> None:
    t = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    torch.testing.assert_close(rounded(t), t, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("exponent", [-60, -20, 20, 60])
def test_convolution_accepts_numbers_of_any_size(exponent: int) -> None:
    """Images, weights and gradients of other magnitudes than float16 has; very different examples in a batch."""
    conv = Convolution(*CONVOLUTIONS["3x3"])
    scale = torch.tensor([1.0, 2.0**-20, 2.0**12]).view(1, 3, 1, 1, 1)
    x = (conv.x * scale * 2.0**exponent).requires_grad_()
    w = (conv.w * 2.0 ** (exponent // 4)).requires_grad_()
    y = channels_first(functions.Conv2d.apply(x, w, None, *conv.options))
    exact = per_client(lambda x, w: F.conv2d(x, w, None, 1, (1, 1)), x, w)
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=0)
    dy = conv.dy * 2.0**-exponent
    ours, theirs = (torch.autograd.grad(out, [x, w], dy.to(out)) for out in (y, exact))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=float(theirs[1].abs().max()) * 1e-3)


# Group normalisation

NORMS = {
    "two groups": (2, 3, 4, 5, 6, 2),
    "one group": (1, 2, 3, 4, 4, 1),
    "one channel per group": (2, 2, 5, 3, 3, 5),
    "a group larger than a tile": (1, 1, 4, 40, 30, 1),
}


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("sizes", NORMS.values(), ids=NORMS)
def test_group_norm_and_its_gradients_equal_torch(sizes: tuple[int, ...], affine: bool, relu: bool) -> None:
    K, B, C, H, W, groups = sizes
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(K, B, C, H, W, generator=draw)]
    given += [torch.randn(K, C, generator=draw) for _ in range(2)] if affine else []
    dy = torch.randn(K, B, C, H, W, generator=draw)

    def outcome(layer: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        tensors = [t.to(dtype).requires_grad_() for t in given]
        y = layer(*tensors)
        return [y.detach(), *torch.autograd.grad(y, tensors, dy.to(dtype))]

    def theirs(x: Tensor, *affine: Tensor) -> Tensor:
        norm = map_clients(lambda x, *wb: F.group_norm(x, groups, *wb, eps=1e-3), x, *affine)
        return F.relu(norm) if relu else norm

    def ours(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        return channels_first(functions.GroupNorm.apply(x, w, b, groups, 1e-3, relu))

    for actual, expected in zip(outcome(ours, torch.float32), outcome(theirs, torch.float64), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=2e-5)


# Losses

LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda z, t, y, mask: losses.cross_entropy(z, y),
    "kl": lambda z, t, y, mask: losses.kl(z, t, 2.0),
    "not_true_kl": lambda z, t, y, mask: losses.not_true_kl(z, t, y, tau=0.5),
    "masked_mean": lambda z, t, y, mask: losses.masked_mean(z[:, 0] * 2, mask),
    "fedntd": lambda z, t, y, mask: losses.masked_mean(losses.cross_entropy(z, y) + losses.not_true_kl(z, t, y), mask),
}


@pytest.mark.parametrize("classes", [2, 10, 100])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients_equal_torch(name: str, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher's gradient too; one client has padded examples, one has nothing else."""
    K, B, draw = 3, 7, torch.Generator().manual_seed(0)
    z, teacher = (3 * torch.randn(K, B, classes, generator=draw) for _ in range(2))
    y, mask = torch.randint(classes, (K, B), generator=draw), torch.ones(K, B, dtype=torch.bool)
    mask[1, 4:], mask[2] = False, False
    calls: list[int] = []
    monkeypatch.setattr(loss_kernels.triton, "cdiv", lambda a, b: (calls.append(1), -(-a // b))[1])

    def outcome(each: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        given = [t.to(dtype).requires_grad_() for t in (z, teacher)]
        value = each(LOSSES[name], *given, y, mask)
        grads = torch.autograd.grad(value.square().sum(), given, materialize_grads=True)
        return [value.detach(), *grads]

    exact = outcome(map_clients, torch.float64)
    calls.clear()
    for actual, expected in zip(outcome(layers.vmap_with_kernels, torch.float32), exact, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-4)
    assert calls or name == "masked_mean"


def test_a_teacher_shared_by_all_clients_is_expanded() -> None:
    z, teacher = integers(3, 4, 5, seed=1), integers(4, 5, seed=2)
    ours = layers.vmap_with_kernels(lambda z: losses.kl(z, teacher), z)
    torch.testing.assert_close(ours, torch.stack([losses.kl(one, teacher) for one in z]))


# Images of a step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "augment",
    [
        None,
        Augment(crop=2),
        Augment(flip=True),
        Augment(crop=1, flip=True, cutout=3),
        Augment(crop=4, padding="reflect"),
        Augment(crop=2, flip=True, cutout=3, padding="reflect"),
    ],
    ids=str,
)
@pytest.mark.parametrize("normalise", [False, True])
def test_gathered_images_are_those_of_the_pipeline(
    augment: Augment | None, normalise: bool, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (9, 3, 6, 5), np.uint8))
    at = torch.from_numpy(rng.integers(0, 9, 40))
    mean, std = (torch.rand(3, 1, 1, dtype=dtype) + 0.1 if normalise else None for _ in range(2))
    inputs = InputPipeline(dtype, mean, std, augment)
    drawn = (
        {key: torch.from_numpy(value[0]) for key, value in augment.draw(rng, 1, 40, (6, 5)).items()}
        if augment
        else None
    )
    assert images.supported(x, inputs)
    torch.testing.assert_close(images.gather(x, at, inputs, drawn), inputs(x[at], drawn), rtol=0, atol=1e-7)


# The layers, as a model under vmap calls them


def supported(params: tree.Tree, x: Tensor) -> Tensor:
    """Three convolutions, two of them with a bias, one pooling, one dense layer."""
    x = F.max_pool2d(F.conv2d(x, params["w1"], params["b1"], padding=(2, 1)), 2)
    x = F.relu(F.conv2d(x, params["w2"], stride=2, padding=1), inplace=True)
    x = F.conv2d(x, params["w3"], params["b3"])
    return F.linear(x.flatten(1), params["w4"], params["b4"])


def unsupported(params: tree.Tree, x: Tensor) -> Tensor:
    """Groups, "same" padding, dilation, overlapping pooling: calls left to vmap; and weights that all clients share."""
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
    """The names of the functions that are called, in order."""
    names: list[str] = []

    def record(name: str) -> None:
        original = getattr(functions, name).forward
        monkeypatch.setattr(
            getattr(functions, name), "forward", staticmethod(lambda *args: (names.append(name), original(*args))[1])
        )

    for name in ("Conv2d", "MaxPool2d", "Linear", "GroupNorm"):
        record(name)
    return names


@pytest.mark.parametrize("network", [supported, unsupported])
def test_layers_under_vmap_equal_torch(network: Callable[..., Tensor], calls: list[str]) -> None:
    exact = gradients(map_clients, network, torch.float64)
    ours = gradients(layers.vmap_with_kernels, network, torch.float32)
    for name, expected in exact.items():
        assert_same(ours[name], expected)
    assert calls == (["Conv2d", "Conv2d", "Conv2d", "Linear"] if network is supported else ["Conv2d"])


def one_model(network: Callable[..., Tensor], stacked: bool) -> list[Tensor]:
    """Compute one model without vmap, or one model for the examples of several clients inside vmap."""
    shapes = {"w1": (4, 3, 3, 3), "b1": (4,), "g": (4,), "h": (4,), "w2": (6, 4, 3, 3)}
    params = {n: integers(*s, seed=i, largest=1).requires_grad_() for i, (n, s) in enumerate(shapes.items())}
    x = integers(*((2,) if stacked else ()), 3, 3, 9, 9, seed=9, largest=1)
    run = (lambda x: layers.vmap_with_kernels(lambda x: network(params, x), x)) if stacked else (
        lambda x: layers.use_kernels(lambda: network(params, x))
    )  # fmt: skip
    y = run(x)
    exact = torch.vmap(lambda x: network(params, x))(x) if stacked else network(params, x)
    return [
        y,
        exact,
        *torch.autograd.grad(y.sum(), params.values()),
        *torch.autograd.grad(exact.sum(), params.values()),
    ]


@pytest.mark.parametrize("stacked", [False, True])
def test_one_model_is_a_stack_of_one(stacked: bool, calls: list[str]) -> None:
    def network(p: tree.Tree, x: Tensor) -> Tensor:
        x = F.relu(F.group_norm(F.conv2d(x, p["w1"], p["b1"], padding=1), 2, p["g"], p["h"]))
        return F.max_pool2d(F.conv2d(x, p["w2"]), 3)

    y, exact, *grads = one_model(network, stacked)
    torch.testing.assert_close(y, exact, rtol=1e-2, atol=1e-2)
    for ours, theirs in zip(grads[:5], grads[5:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert calls == ["Conv2d", "GroupNorm", "Conv2d", "MaxPool2d"]


def test_weights_of_clients_meet_images_that_all_share(calls: list[str]) -> None:
    w, x = integers(3, 4, 2, 3, 3), integers(5, 2, 6, 6, seed=1)
    y = layers.vmap_with_kernels(lambda w: F.conv2d(x, w), w)
    assert_same(y, torch.stack([F.conv2d(x, one) for one in w]))
    assert calls == ["Conv2d"]


# Gradients of dense layers as products


def dense_gradient(loss: Callable[[Tensor, Tensor], Tensor], B: int = 5) -> tuple[Any, Tensor]:
    """Return the gradient of a dense layer's weights from our layer, and the one that torch computes."""
    w, x = integers(3, 6, 20, largest=1).requires_grad_(), integers(3, B, 20, seed=1, largest=1)
    found = []
    for each in (layers.vmap_with_kernels, map_clients):
        total = each(lambda w, x: loss(F.linear(x, w), w), w, x).sum()
        found.append(torch.autograd.grad(total, w)[0])
    return found[0], found[1]


def test_the_gradient_of_a_dense_layer_is_a_product() -> None:
    ours, exact = dense_gradient(lambda z, w: z.square().sum())
    assert isinstance(ours, Product)
    assert ours.shape == exact.shape
    for use in (lambda g: g + 0, lambda g: g.mT[:, 2:], lambda g: torch.stack([g, g]), lambda g: g.clone()):
        assert not isinstance(use(ours), Product)
        assert torch.equal(use(ours), use(exact))


def test_a_product_is_multiplied_out_where_its_weights_are_used_twice() -> None:
    for loss in (lambda z, w: z.square().sum() + w.square().sum(), lambda z, w: w.sum() + z.sum() + z.square().sum()):
        ours, exact = dense_gradient(loss)
        assert torch.equal(ours, exact)
    assert not isinstance(dense_gradient(lambda z, w: z.square().sum(), B=200)[0], Product)


def test_a_product_cannot_be_changed_in_place() -> None:
    with pytest.raises(NotImplementedError):
        dense_gradient(lambda z, w: z.square().sum())[0].add_(1)


@pytest.mark.parametrize("names", [{"a"}, {"b"}, {"a", "b", "c"}], ids=["a product", "a tensor", "both"])
def test_a_centred_product_stays_a_product(names: set[str]) -> None:
    product, exact = dense_gradient(lambda z, w: z.square().sum())
    single = Product.of(integers(3, 5, 6), integers(3, 5, 1))  # one weight for each output: nothing to centre
    tensor = integers(3, 4, 2, 3, 3)
    grads = {"a": product, "b": tensor, "c": single}
    found = GpuAccelerator(torch.device("cpu")).centred(grads, names, map_clients)
    expected = Accelerator().centred({"a": exact, "b": tensor, "c": single.dense()}, names, map_clients)
    assert isinstance(found["a"], Product)
    assert found["c"] is single
    for name in grads:
        torch.testing.assert_close(found[name] + 0, expected[name])
    assert torch.allclose(expected["a"].mean(2), torch.zeros(3, 6), atol=1e-5) == ("a" in names)


@pytest.mark.parametrize(
    ("method", "stay"),
    [(FedAvg(), True), (FedKeep(), True), (GCFed(), True), (GCFed(biases=True), False), (Scaffold(), False)],
    ids=["fedavg", "fedkeep", "gcfed", "gcfed with biases", "scaffold"],
)
def test_methods_that_only_centre_gradients_keep_the_products(
    method: FedAvg, stay: bool, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    kernel = update_kernels.product_sgd_
    monkeypatch.setattr(update_kernels, "product_sgd_", lambda *args: taken.append(len(args[0])) or kernel(*args))
    sim = problem.simulation(method, engine="stacked", dtype="float32")
    jobs, shared = [sim.job(k, 1) for k in (1, 2, 5)], method.broadcast(sim.server)
    expected = Stacked(sim.local, sim.x, sim.y, map_clients).train(shared, jobs, 0.1)
    sim.task.accelerator = GpuAccelerator(torch.device("cpu"))
    sim.task.accelerator.kernels = True
    found = Stacked(sim.local, sim.x, sim.y, layers.vmap_with_kernels).train(shared, jobs, 0.1)
    assert gap(found.params, expected.params) < 5e-3  # TF32
    moved = (found.params["classifier.weight"] - shared["params"]["classifier.weight"]).abs().amax((1, 2))
    assert (moved > 0.01).all()
    assert bool(taken) == stay


@pytest.mark.parametrize("optimizer", [SGD(), SGD(0.9), SGD(0.5, 0.25), Adam(), AdamW(weight_decay=0.25)], ids=str)
@pytest.mark.parametrize("tensor_rate", [False, True])
def test_an_optimiser_multiplies_products_out(optimizer: Any, tensor_rate: bool) -> None:
    """Several tiles along every axis, more examples than a tile has, and other weights beside it."""
    draw = torch.Generator().manual_seed(0)
    K, B, O, I = 2, 70, 66, 130
    dy, x = integers(K, B, O), integers(K, B, I, seed=1)
    params = {"a": torch.randn(K, O, I, generator=draw), "b": torch.randn(K, O, generator=draw)}
    plain = tree.map(torch.clone, params)
    state, plain_state = (map_clients(optimizer.init, one) for one in (params, plain))
    lr = torch.tensor(0.125) if tensor_rate else 0.125
    for _ in range(2):
        other = torch.randn(K, O, generator=draw)
        updates.update_(optimizer, {"a": Product.of(dy, x), "b": other}, state, params, lr)
        optimizer.update_({"a": torch.bmm(dy.mT, x), "b": other}, plain_state, plain, lr)
    for path, expected in tree.items({"params": plain, "state": plain_state}):
        found = dict(tree.items({"params": params, "state": state}))[path]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimizer", [SGD(), SGD(0.9), SGD(0.5, 0.25), Adam(), Adam(0.0, 0.5, 0.1, 0.25)], ids=str)
@pytest.mark.parametrize("small", [True, False], ids=["with a small weight", "only large ones"])
def test_large_weights_are_updated_as_torch_does(optimizer: Any, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 steps of Adam: its corrections go from the series to the exponential."""
    launched: list[str] = []
    for name in ("sgd_", "adam_"):
        kernel = getattr(update_kernels, name)
        monkeypatch.setattr(update_kernels, name, lambda *args, k=kernel, n=name: launched.append(n) or k(*args))
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (2, updates.LARGE // 2 + 1), "b": (2, 3)}
    names = ["a", "b"] if small else ["a"]
    params = {name: torch.randn(shapes[name], generator=draw) for name in names}
    plain = tree.map(torch.clone, params)
    state, plain_state = (map_clients(optimizer.init, one) for one in (params, plain))
    for _ in range(30):
        grads = {name: torch.randn(shapes[name], generator=draw) for name in names}
        updates.update_(optimizer, grads, state, params, 0.125)
        optimizer.update_(grads, plain_state, plain, 0.125)
    assert launched == ["sgd_" if isinstance(optimizer, SGD) else "adam_"] * 30
    torch.testing.assert_close(params, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, plain_state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 5, 3), (3, 1, 200), (1, 700, 16)])
def test_sum_rows_equals_torch(shape: tuple[int, ...]) -> None:
    x = integers(*shape)
    assert_same(dense.sum_rows(x), x.double().sum(1))
    assert_same(dense.sum_rows(x.transpose(0, 2).contiguous().transpose(0, 2)), x.double().sum(1))


# What a layer's output, not computed yet, must do


def deferred(use: Callable[[Tensor], Any]) -> tuple[Any, Any]:
    """Use the output of a convolution, deferred and as torch computes it."""
    w, x = integers(4, 2, 3, 3), integers(5, 2, 6, 6, seed=1)
    return layers.use_kernels(lambda: use(F.conv2d(x, w))), use(F.conv2d(x, w))


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y,
        lambda y: (y, {"a": [F.relu(y)]}),
        lambda y: y + F.relu(y),
        lambda y: F.relu(y) + y,
        lambda y: (F.relu(y, inplace=True), y)[1],
        lambda y: (y.sum(), y.relu_(), y)[2],
        lambda y: torch.cat([y, y.relu()]),
        lambda y: y.view(y.size(0), -1) * y.shape[1] + y.ndim,
        lambda y: F.relu(F.max_pool2d(y, 2)),
        lambda y: F.max_pool2d(F.relu(y), 2).flatten(1),
        lambda y: F.max_pool2d(F.max_pool2d(y, 2), 2),
        lambda y: F.max_pool2d(y, 2, stride=1),
        lambda y: F.avg_pool2d(y, 2),
        lambda y: y[0, :, 1:],
        lambda y: y.dtype == torch.float32 and y.device.type == "cpu",
        lambda y: y.view(size=(5, -1)) if y.is_contiguous() else y.reshape(5, -1),
        lambda y: y.mul_(2),
        lambda y: (F.relu(y, inplace=True), y.add_(1))[1],
    ],
)
def test_a_deferred_output_does_what_a_tensor_does(use: Callable[[Tensor], Any]) -> None:
    ours, theirs = deferred(use)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def block(p: tree.Tree, x: Tensor) -> Tensor:
    """A residual block that adds in place."""
    y = F.group_norm(F.conv2d(x, p["w"], padding=1), 2, p["g"], p["h"])
    y += x
    return F.relu(y)


def changed_after(p: tree.Tree, x: Tensor) -> Tensor:
    """A layer's input changes after the layer was called."""
    x = x * 1
    y = F.conv2d(x, p["w"], padding=1)
    x.mul_(0)
    z = F.conv2d(y + p["g"].sum(), p["w"], padding=1)
    x[:, 0] = 1
    return F.relu(z) + x + p["h"].sum()


def partly_without_gradient(p: tree.Tree, x: Tensor) -> Tensor:
    """Layers are called without gradient and used with it, and the other way round."""
    with torch.no_grad():
        fixed = F.relu(F.conv2d(x, p["w"], padding=1))
    y = F.group_norm(F.conv2d(x, p["w"], padding=1), 2, p["g"], p["h"])
    with torch.no_grad():
        scale = y.abs().sum() * 0 + 2
    return y * scale * fixed


@pytest.mark.parametrize("network", [block, changed_after, partly_without_gradient])
def test_a_layer_is_computed_as_if_at_its_call(network: Callable[..., Tensor]) -> None:
    K, B, C = 2, 3, 4

    def outcome(each: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        shapes = {"w": (C, C, 3, 3), "g": (C,), "h": (C,)}
        params = {n: integers(K, *s, seed=i).to(dtype).requires_grad_() for i, (n, s) in enumerate(shapes.items())}
        x = integers(K, B, C, 5, 5, seed=9).to(dtype).requires_grad_()
        y = each(network, params, x)
        return [
            y.detach(),
            *torch.autograd.grad((y * integers(*y.shape, seed=5).to(dtype)).sum(), [x, *params.values()]),
        ]

    for ours, exact in zip(
        outcome(layers.vmap_with_kernels, torch.float32), outcome(map_clients, torch.float64), strict=True
    ):
        size = float(exact.abs().max())
        torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-3 * size + 1e-6)


@pytest.mark.parametrize(("relu", "pool"), [(False, False), (True, True)])
@pytest.mark.parametrize("dead", ["images", "gradients", "both"])
def test_a_dead_layer_has_gradients_of_zero(relu: bool, pool: bool, dead: str) -> None:
    x, w = integers(2, 3, 4, 6, 6), integers(2, 5, 4, 3, 3, seed=1).requires_grad_()
    x = (x * 0 if dead != "gradients" else x).requires_grad_()
    y = functions.Conv2d.apply(x, w, None, 1, (1, 1), relu, pool)
    dy = torch.full_like(y, 1e-8) if dead == "images" else torch.zeros_like(y)
    dx, dw = torch.autograd.grad(y, [x, w], dy)
    assert torch.equal(dw, torch.zeros_like(dw))
    assert bool(dx.isfinite().all())


def test_nan_in_a_product_reaches_the_weights() -> None:
    for bits in (0x7FFFFFFF, 0x7FC00000):
        dy, x, w = torch.zeros(1, 2, 16), torch.ones(1, 2, 16), torch.zeros(1, 16, 16)
        dy[0, 0, 3] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        update_kernels.product_sgd_(w, None, dy, x, torch.tensor(1.0), 0.0, 0.0)
        assert bool(w[0, 3].isnan().all())


DROPPED = [(5,), (33, 64), (5, 7), (4, 3, 9), (4, 3, 5, 6), (4, 3, 1, 1), (2, 700, 3)]


@pytest.mark.filterwarnings("ignore:invalid value")  # 0 times infinity
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("shape", DROPPED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_draws_what_torchs_operations_draw(
    dtype: torch.dtype, shape: tuple[int, ...], batch: int | None
) -> None:
    keys, given = torch.tensor([0, -1, 1234567890123456789]), integers(3, *shape, largest=9).to(dtype)
    given[0].view(-1)[0] = torch.inf
    for p in (0.1, 0.5, 0.9):
        outcomes = []
        for each, drop in (
            (map_clients, counter_random.drop),
            (map_clients, layers.drop),
            (layers.vmap_with_kernels, layers.drop),
        ):
            x = given.clone().requires_grad_()
            y = each(lambda x, key, drop=drop, p=p: drop(x, key, counter_random.stream(3), p, batch), x, keys)
            gradient = torch.autograd.grad((y * integers(*y.shape, seed=1).to(dtype)).sum(), x)[0]
            outcomes.append(torch.stack([y.detach(), gradient]))
        for outcome in outcomes[1:]:
            torch.testing.assert_close(outcome, outcomes[0], rtol=0, atol=0, equal_nan=True)
        one = layers.drop(given[2], keys[2], counter_random.stream(3), p, batch)
        assert torch.equal(one, outcomes[0][0, 2])


def test_losses_take_keywords_and_temperatures_as_tensors() -> None:
    z, teacher, tau = integers(2, 3, 4), integers(2, 3, 4, seed=1), torch.tensor([1.0, 2.0])
    ours, theirs = (
        each(lambda z, t, tau: losses.kl(student=z, teacher=t, tau=tau), z, teacher, tau)
        for each in (layers.vmap_with_kernels, map_clients)
    )
    torch.testing.assert_close(ours, theirs)


def test_kernels_are_not_used_inside_other_transforms(calls: list[str]) -> None:
    w, x = integers(4, 2, 3, 3), integers(5, 2, 6, 6, seed=1)
    loss = lambda w: layers.use_kernels(lambda: F.conv2d(x, w).square().sum())  # noqa: E731
    assert torch.equal(torch.func.grad(loss)(w), torch.func.grad(lambda w: F.conv2d(x, w).square().sum())(w))
    assert not calls
