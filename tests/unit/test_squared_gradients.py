"""Sums of squared gradients of single examples: layer by layer the same as from the gradient of every example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.problems import gap, same
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedkeep import models, tree
from fedkeep.task import Accelerator, Task

N, C = 7, 4


def make_task(model: nn.Module, **options: Any) -> Task:
    return Task(model, C, 1, **{"dtype": torch.float64, **options})


def make_examples(task: Task, shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, labels and weights; the last two examples are padding."""
    rng = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(N, *shape, generator=rng).to(task.dtype), torch.rand(N, generator=rng).to(task.dtype)
    weight[-2:] = 0
    return x, torch.randint(C, (N,), generator=rng), weight


def from_single_examples(task: Task, params: tree.Tree, x: Any, y: Tensor, weight: Tensor) -> tree.Tree:
    each = task.example_gradients(params, x, y)
    return tree.map(lambda g: torch.tensordot(weight, g**2, dims=1), each)


def is_layerwise(task: Task) -> bool:
    return all(layers is not None for layers in task.gradients.layers.values())


def check_layerwise(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Compare without and with `vmap` over clients, each on a new task: the trial must work under `vmap` too."""
    task = make_task(model)
    x, y, weight = make_examples(task, shape)
    expected = from_single_examples(task, task.init, x, y, weight)
    assert gap(expected, task.squared_gradients(task.init, x, y, weight)) < 1e-12
    assert is_layerwise(task)
    task = make_task(model)
    clients = [(tree.scale(task.init, 1 - 0.1 * k), *make_examples(task, shape, seed=k)) for k in range(3)]
    stacked = [tree.stack(parts) for parts in zip(*clients, strict=True)]
    expected = tree.stack([from_single_examples(task, *client) for client in clients])
    assert gap(expected, torch.vmap(task.squared_gradients)(*stacked)) < 1e-12
    assert is_layerwise(task)


@pytest.mark.parametrize("projection", [None, 6])
@pytest.mark.parametrize("name", [name for name in models.REGISTRY if name not in models.TEXT_MODELS])
def test_all_models_of_images_are_computed_layer_by_layer(name: str, projection: int | None) -> None:
    options = {"width": 8, "channels_per_group": 4} if name.startswith("resnet") else {}
    check_layerwise(models.build(name, (3, 16, 16), C, seed=1, projection=projection, **options), (3, 16, 16))


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def with_head(*layers: nn.Module, shape: tuple[int, ...] = (3, 9, 8)) -> nn.Module:
    """Return a model of these layers and a classifier."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        width = nn.Sequential(*layers, nn.Flatten())(torch.zeros(1, *shape)).shape[1]
        return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(width, C))


class Function(nn.Module):
    """Calls a function with weights of its own."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape, generator=rng)) for shape in shapes])
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


@pytest.mark.parametrize(
    "model",
    [
        with_head(nn.Conv2d(3, 5, 3, stride=2)),
        with_head(nn.Conv2d(3, 5, (2, 3), stride=(1, 2), padding=(1, 2), dilation=(2, 1))),
        with_head(nn.Conv2d(3, 5, 4, padding="same", dilation=(1, 2))),  # an odd number of zeros
        with_head(nn.Conv2d(3, 5, 3, padding="valid", bias=False)),
        with_head(nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect")),
        with_head(nn.Flatten(), nn.Linear(216, 6, bias=False)),
        with_head(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6, eps=0.1), nn.MaxPool2d(2)),
        with_head(nn.Flatten(), nn.Linear(216, 6), nn.GroupNorm(1, 6)),
        frozen(with_head(nn.Conv2d(3, 5, 3), nn.GroupNorm(1, 5)), "0.weight", "1.bias", "4.bias"),
        frozen(with_head(nn.Conv2d(3, 5, 3), nn.GroupNorm(1, 5)), "0.bias", "1.weight", "4.weight"),
        with_head(Function(lambda x, w: F.conv2d(padding=1, weight=w, input=x), (2, 3, 3, 3))),
        with_head(Function(lambda x, b: F.linear(x.flatten(1), torch.ones(5, 216).to(x), bias=b), (5,))),
    ],
    ids=range(12),
)  # fmt: skip
def test_options_of_the_layers(model: nn.Module) -> None:
    check_layerwise(model, (3, 9, 8))


def test_inputs_may_be_a_dict() -> None:
    task = make_task(Function(lambda x, v, w: F.linear(x["a"], v) + F.linear(x["b"], w), (C, 3), (C, 2)))
    a, y, weight = make_examples(task, (3,))
    x = {"a": a, "b": a[:, :2] ** 2}
    found = task.squared_gradients(task.init, x, y, weight)
    assert gap(from_single_examples(task, task.init, x, y, weight), found) < 1e-12
    assert is_layerwise(task)


def test_weights_that_start_at_zero_are_computed_layer_by_layer() -> None:
    """With a classifier of zeros no gradient reaches the layers before it, so nothing could be compared."""
    model = with_head(nn.Flatten(), nn.Linear(216, 6))
    nn.init.zeros_(model[-1].weight)
    check_layerwise(model, (3, 9, 8))


@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [("float32", None, 1e-5), ("float32", "bfloat16", 0.1), ("bfloat16", None, 0.3)],
)
def test_lower_precision(dtype: str, autocast: str | None, tolerance: float) -> None:
    options = {"dtype": getattr(torch, dtype), "autocast": getattr(torch, autocast) if autocast else None}
    model = models.build("cnn_fedssd", (3, 16, 16), C)
    task, exact = make_task(model, **options), make_task(model)
    x, y, weight = make_examples(task, (3, 16, 16))
    found = task.squared_gradients(task.init, x, y, weight)
    assert is_layerwise(task)
    assert {t.dtype for t in tree.leaves(found)} == {task.dtype}
    expected = from_single_examples(exact, exact.init, x.double(), y, weight.double())
    assert gap(expected, tree.to(found, torch.float64)) < tolerance


def test_rounding_and_a_weighted_criterion_do_not_disturb_the_trial() -> None:
    """In float32, rounding switches some of a deep network's ReLUs, which changes gradients by more than rounding."""
    criterion = nn.CrossEntropyLoss(torch.arange(1.0, C + 1))
    model = models.build("resnet18", (3, 16, 16), C, width=8, channels_per_group=4)
    task = make_task(model, dtype=torch.float32, criterion=criterion)
    task.squared_gradients(task.init, *make_examples(task, (3, 16, 16)))
    assert is_layerwise(task)


def test_chunks_and_random_state() -> None:
    """A convolution's patches of a few images exceed the memory for one chunk; the trial leaves torch's state alone."""
    task = make_task(with_head(nn.Conv2d(3, 16, 9, padding=4), shape=(3, 64, 64)))
    x, y, weight = make_examples(task, (3, 64, 64))
    before = torch.get_rng_state()
    found = task.squared_gradients(task.init, x, y, weight)
    assert torch.equal(before, torch.get_rng_state())
    assert gap(from_single_examples(task, task.init, x, y, weight), found) < 1e-12
    assert is_layerwise(task)


def test_the_kernels_of_an_accelerator_are_not_used() -> None:
    """They would hide the layers."""

    class Hides(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.linear:
                return args[0] @ args[1].T + args[2]
            return func(*args, **(kwargs or {}))

    class Kernels(Accelerator):
        def layers(self) -> Hides:
            return Hides()

    task = make_task(models.build("mlp", (6,), C))
    task.accelerator = Kernels()
    x, y, weight = make_examples(task, (6,))
    found = task.squared_gradients(task.init, x, y, weight)
    assert gap(from_single_examples(task, task.init, x, y, weight), found) < 1e-12
    assert is_layerwise(task)


# Models that are not computed layer by layer


class Twice(torch.autograd.Function):
    """A use of a weight that no torch function shows."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.T

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return dz @ w, dz.T @ x

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor) -> Any:
        return (x.movedim(in_dims[0], 0) if in_dims[0] is not None else x) @ w.T, 0


def tied() -> nn.Module:
    one, two = nn.Linear(6, 6), nn.Linear(6, 6)
    two.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), two, nn.Tanh(), nn.Linear(6, C))


def shared_layer() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(6, C))


@pytest.mark.parametrize(
    "model",
    [
        tied(),
        shared_layer(),
        Function(lambda x, w: F.linear(x, w) * w.norm(), (C, 6)),
        Function(lambda x, w: F.linear(x, w / w.norm()), (C, 6)),
        Function(lambda x, w: x @ w, (6, C)),
        Function(lambda x, w, scale: F.linear(x, w) * scale, (C, 6), (1,)),
        Function(lambda x, w, unused: F.linear(x, w), (C, 6), (1,)),
        Function(lambda x, w: F.linear(x.unflatten(1, (2, 3)), w).sum(1), (C, 3)),  # a sequence
        Function(lambda x, w: F.linear(x.reshape(-1, 3), w).reshape(-1, 2, C).sum(1), (C, 3)),  # a flattened one
        Function(lambda x, w: F.linear(x - x.mean(0), w).tanh(), (C, 6)),  # examples are mixed before the layer
        Function(lambda x, w, b: F.linear(x, w, b).softmax(0), (C, 6), (C,)),  # and after it
        Function(lambda x, w: F.linear(w, x).T, (C, 6)),  # the weight as an input
        Function(lambda x, w: F.linear(x[:, None], w)[:, 0] * len(x), (C, 6)),
        Function(lambda x, w: F.linear(x, w, w[:, 0]), (C, 6)),
        Function(lambda x, w: F.linear(x, w) + F.embedding(x[:, 0].long().abs() % 2, w.T[:2]), (C, 6)),
        Function(lambda x, w: F.layer_norm(x[:, :C], (C,), w), (C,)),
        Function(lambda x, w: F.conv1d(x[:, None], w).flatten(1), (1, 1, 3)),
        Function(lambda x, w: F.conv2d(x.reshape(-1, 2, 3, 1), w, groups=2).flatten(1), (4, 1, 3, 1)),
        Function(lambda x, w: F.linear(x, w) + Twice.apply(x, w.detach()) * 0 + Twice.apply(x, w), (C, 6)),
    ],
    ids=range(19),
)
def test_everything_else_is_computed_from_single_examples(model: nn.Module) -> None:
    task = make_task(model)
    x, y, weight = make_examples(task, (6,))
    expected = from_single_examples(task, task.init, x, y, weight)
    assert same(expected, task.squared_gradients(task.init, x, y, weight))
    assert not is_layerwise(task)


def test_layers_that_change_with_the_inputs_are_noticed() -> None:
    """The trial has five examples, and finds nothing to object to."""

    def function(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, v) + F.linear(x, w) if len(x) == 1 or len(x) == 5 else F.linear(x, w) + F.linear(x, v)

    task = make_task(Function(function, (C, 6), (C, 6)))
    x, y, weight = make_examples(task, (6,))
    expected = from_single_examples(task, task.init, x, y, weight)
    assert gap(expected, task.squared_gradients(task.init, x, y, weight)) < 1e-12
    assert not is_layerwise(task)
