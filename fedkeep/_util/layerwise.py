"""Sums of squared gradients of single examples, layer by layer, without one gradient per example in memory.

Where every trained weight is used once, in a layer that treats its examples one by one, an example's gradient with
respect to a weight follows from the layer's input and from the gradient with respect to the layer's output. One
backward pass computes the latter for all examples: a zero tensor is added to every layer's output, and the loss is
differentiated with respect to these zeros. It works under `vmap`.

Legend: B examples in a batch, a a layer's input, dz the gradient with respect to its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

Weights = dict[str, Tensor]
Losses = Callable[[Weights], Tensor]  # the criterion of every example as a function of the weights, [B]

# the arguments of the layers' functions, by position
_ARGUMENTS = {
    F.linear: ("input", "weight", "bias"),
    F.conv2d: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
}


class NotLayerwiseError(Exception):
    """The model uses a trained weight in a way that is not supported here."""


@dataclass(frozen=True)
class Layer:
    """One use of one or two trained weights."""

    function: Callable[..., Tensor]
    weight: str | None  # names; None: there is none, or it is not trained
    bias: str | None
    options: dict[str, Any]  # of the function: stride, number of groups, ...
    kernel: tuple[int, ...]  # height and width of a convolution's kernel
    shape: tuple[int, ...]  # of an example's output
    n_intermediate: int  # numbers per example that `_squares` has in memory


def find_layers(losses: Losses, params: Weights, n: int) -> list[Layer]:
    """Return the layers in the order of their use; raise NotLayerwiseError if one of them is not supported.

    The losses are of n examples. That examples are not mixed is not checked.
    """
    finder = _Finder(params, n)
    with torch.no_grad(), finder:
        losses(params)
    names = [name for layer in finder.layers for name in (layer.weight, layer.bias) if name is not None]
    if sorted(names) != sorted(params):
        raise NotLayerwiseError("a weight is used twice or not at all")
    return finder.layers


def squared_gradients(losses: Losses, params: Weights, layers: Sequence[Layer], weight: Tensor) -> dict[str, Tensor]:
    """Return the sum over the examples of weight * (gradient of the example's loss)^2, for every trained weight."""
    n = len(weight)
    zeros = [torch.zeros(n, *layer.shape, dtype=weight.dtype, device=weight.device) for layer in layers]

    def total(zeros: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with _Adder(params, layers, zeros) as adder:
            value = losses(params).sum()
        return value, adder.inputs

    gradients, inputs = torch.func.grad(total, has_aux=True)(zeros)
    sums: dict[str, Tensor] = {}
    with torch.no_grad():
        for layer, a, dz in zip(layers, inputs, gradients, strict=True):
            dtype = params[layer.weight or layer.bias or ""].dtype
            sums.update(_squares(layer, a.to(dtype), dz.to(dtype), weight))
    return {name: sums[name].reshape(w.shape) for name, w in params.items()}


def _squares(layer: Layer, a: Tensor, dz: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Return the weighted sums of squares for the weights of one layer."""
    sums: dict[str, Tensor] = {}
    if layer.bias is not None:
        sums[layer.bias] = weight @ dz.flatten(2).sum(2).square() if dz.ndim > 2 else weight @ dz.square()
    if layer.weight is None:
        return sums
    if layer.function is F.linear:  # an example's gradient is the outer product of dz and a
        sums[layer.weight] = (weight[:, None] * dz.square()).T @ a.square()
    elif layer.function is F.conv2d:
        gradient = dz.flatten(2) @ _patches(a, layer).transpose(1, 2)
        sums[layer.weight] = weight @ gradient.flatten(1).square()
    else:
        normal = F.group_norm(a, layer.options["num_groups"], eps=layer.options.get("eps", 1e-5))
        gradient = dz * normal
        sums[layer.weight] = weight @ (gradient.flatten(2).sum(2) if a.ndim > 2 else gradient).square()
    return sums


def _patches(a: Tensor, layer: Layer) -> Tensor:
    """Return the patches of the images that a convolution multiplies by its kernel, [B, channels * kernel, places]."""
    (h, w), (stride_h, stride_w) = layer.kernel, _pair(layer.options.get("stride", 1))
    step_h, step_w = _pair(layer.options.get("dilation", 1))
    reach_h, reach_w = step_h * (h - 1), step_w * (w - 1)
    padding = layer.options.get("padding", 0)
    if padding == "same":  # torch pads an odd number on the right
        sides = [reach_w // 2, reach_w - reach_w // 2, reach_h // 2, reach_h - reach_h // 2]
    else:
        pad_h, pad_w = _pair(0 if padding == "valid" else padding)
        sides = [pad_w, pad_w, pad_h, pad_h]
    windows = F.pad(a, sides).unfold(2, reach_h + 1, stride_h).unfold(3, reach_w + 1, stride_w)
    windows = windows[..., ::step_h, ::step_w]  # [B, channels, rows, columns, h, w]
    return windows.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)


def _pair(value: Any) -> tuple[int, int]:
    first, *others = value if isinstance(value, Sequence) else (value,)
    return int(first), int(others[0] if others else first)


class _LayerMode(TorchFunctionMode):
    """Calls `on_layer` instead of a function of `_ARGUMENTS` that uses a trained weight, and forbids all other uses."""

    def __init__(self, params: Weights) -> None:
        super().__init__()
        self.names = {id(w): name for name, w in params.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = self._trained_weights((args, kwargs))
        if used and func in _ARGUMENTS:
            given = {**dict(zip(_ARGUMENTS[func], args, strict=False)), **kwargs}
            if sorted(used) == sorted(
                id(given.get(key)) for key in ("weight", "bias") if id(given.get(key)) in self.names
            ):
                return self.on_layer(func, given)
        result = func(*args, **kwargs)
        if used and any(isinstance(t, Tensor) for t in tree_leaves(result)):  # its shape or dtype may be read
            raise NotLayerwiseError(f"a weight is used in {getattr(func, '__name__', func)}")
        return result

    def _trained_weights(self, arguments: Any) -> list[int]:
        """Return the ids of the trained weights among nested arguments; faster than torch's `tree_leaves`."""
        if isinstance(arguments, dict):
            arguments = arguments.values()
        elif not isinstance(arguments, tuple | list):
            return [id(arguments)] if id(arguments) in self.names else []
        return [one for argument in arguments for one in self._trained_weights(argument)]

    def on_layer(self, function: Any, given: dict[str, Any]) -> Tensor:
        """Return what the function returns."""
        raise NotImplementedError


class _Finder(_LayerMode):
    """Notes the layers that are called."""

    def __init__(self, params: Weights, n: int) -> None:
        super().__init__(params)
        self.n = n
        self.layers: list[Layer] = []

    def on_layer(self, function: Any, given: dict[str, Any]) -> Tensor:
        a, weight, bias = given["input"], given.get("weight"), given.get("bias")
        output: Tensor = function(**given)
        rank = {F.linear: 2, F.conv2d: 4}.get(function, a.ndim)
        if a.ndim != rank or output.ndim < 2 or len(a) != self.n or given.get("groups", 1) != 1:
            raise NotLayerwiseError(f"{function.__name__} of an input {tuple(a.shape)} of {self.n} examples")
        kernel = tuple(weight.shape[2:]) if function is F.conv2d and weight is not None else ()
        n_intermediate = output[0].numel() + a[0].numel()
        if kernel and weight is not None:
            n_intermediate += weight.numel() + weight[0].numel() * output[0, 0].numel()
        names = (self.names.get(id(weight)), self.names.get(id(bias)))
        options = {key: value for key, value in given.items() if key not in ("input", "weight", "bias")}
        self.layers.append(Layer(function, *names, options, kernel, tuple(output.shape[1:]), n_intermediate))
        return output


class _Adder(_LayerMode):
    """Adds zeros to the outputs of the layers, and notes their inputs."""

    def __init__(self, params: Weights, layers: Sequence[Layer], zeros: Sequence[Tensor]) -> None:
        super().__init__(params)
        self.layers, self.zeros = layers, zeros
        self.inputs: list[Tensor] = []

    def on_layer(self, function: Any, given: dict[str, Any]) -> Tensor:
        place = len(self.inputs)
        output: Tensor = function(**given)
        if place == len(self.layers) or self.zeros[place].shape != output.shape:
            raise NotLayerwiseError("the model's layers differ from call to call")
        layer, names = self.layers[place], [self.names.get(id(given.get(key))) for key in ("weight", "bias")]
        if [layer.function, layer.weight, layer.bias] != [function, *names]:
            raise NotLayerwiseError("the model's layers differ from call to call")
        self.inputs.append(given["input"].detach())
        return output + self.zeros[place].to(output.dtype)


# A trial, in which the layers' sums are compared with those of single examples


def example_form(x: Any) -> tuple[Any, ...]:
    """Return shape and dtype of an example."""
    leaves, form = tree_flatten(x)
    return (str(form), *((tuple(t.shape[1:]), t.dtype) for t in leaves))


def random_trial(init: Weights, x: Any, n_classes: int) -> tuple[Weights, Any, Tensor, Tensor]:
    """Return weights near the initial ones (which may be 0), inputs of this form, labels, and the examples' weights."""
    n, rng = 5, np.random.default_rng(0)
    device = next(iter(init.values())).device

    def normal(shape: Sequence[int], scale: float = 1.0) -> Tensor:
        return torch.from_numpy(rng.normal(scale=scale, size=shape)).to(device)

    def random(t: Tensor) -> Tensor:
        shape = (n, *t.shape[1:])
        if t.is_floating_point():
            return normal(shape)
        return torch.from_numpy(rng.integers(2, size=shape)).to(device, t.dtype)

    params = {name: w.double() + normal(w.shape, 0.05) for name, w in init.items()}
    weight = torch.arange(1, n + 1, device=device).double()
    return params, tree_map(random, x), torch.arange(n, device=device) % n_classes, weight


def agree(squares: Weights, expected: Weights) -> bool:
    """Return whether two sums of squares agree up to the rounding of float64; sums of 0 prove nothing."""
    differences = [(squares[name] - s).abs().max() / s.abs().max() for name, s in expected.items()]  # 0 / 0 is NaN
    return bool((torch.stack(differences) < 1e-10).all())


def chunk_size(layers: Sequence[Layer], device: torch.device, dtype: torch.dtype) -> int:
    """Return how many examples of a client to compute at a time: 16 MiB of intermediate results, on a GPU 64."""
    per_example = max(layer.n_intermediate for layer in layers) * dtype.itemsize
    return int(max(1, (1 << 24 if device.type == "cpu" else 1 << 26) // per_example))
