"""The task: the model as pure functions, the loss and the federation's numbers. Nothing about how it is run."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedkeep import losses, tree
from fedkeep._util import counter_random, layerwise
from fedkeep._util.batch_norm import batch_statistics, check_batch_norm, frozen_layers, has_batch_statistics
from fedkeep._util.criterion import Criterion, criterion_name, require_criterion
from fedkeep._util.dropout import keyed_dropout, may_drop
from fedkeep._util.functional_module import FunctionalModule
from fedkeep._util.private_apis import is_batched
from fedkeep._util.rng import seeded
from fedkeep._util.stages import call_stage, call_with_stage, stage_names
from fedkeep._util.structure import structure_hash
from fedkeep._util.text import format_layer
from fedkeep.errors import ModelError
from fedkeep.optim import SGD, Optimizer
from fedkeep.tree import Tree


@dataclass(frozen=True, repr=False)
class Public:
    """The public set, the server's own examples: a training part and a validation part."""

    x: Any
    y: Tensor
    x_val: Any
    y_val: Tensor

    def __repr__(self) -> str:
        return f"<Public: {len(self.y)} examples for training, {len(self.y_val)} for validation>"


_GRADIENTS_AT_ONCE = 10  # gradients of single examples in memory at a time: each is as large as the model


class Accelerator:
    """What a runtime adds to make work on its device shorter, without changing results. This one adds nothing."""

    queues = False  # whether operations only enter a queue, so that the device idles whenever the host reads a result

    def call(self, model: Callable[[], Any]) -> Any:
        """Call a model; its layers may be computed by other kernels."""
        return model()

    def drop(self, x: Tensor, key: Tensor, stream: int, p: float, batch: int | None) -> Tensor:
        """Return x after dropout, with the draws of `counter_random.kept`."""
        return counter_random.drop(x, key, stream, p, batch)

    def as_tensors(self, grads: Tree) -> Tree:
        """Return gradients as plain tensors; kernels may have left some as products."""
        return grads

    def update_(self, optimizer: Optimizer, grads: Tree, state: Tree, params: Tree, lr: float | Tensor) -> None:
        """Update weights and the optimiser's state in place."""
        optimizer.update_(grads, state, params, lr)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats a step, which reads and writes the same tensors in place at every call.

        The step may be called only once or twice and what it computed be replayed from then on, so nothing else may
        change with its calls.
        """
        return step


class Task:
    """A model as pure functions of its weights, the loss, and the numbers of the federation.

    The user's module is copied, never changed. `init` holds the parameters that require a gradient; frozen parameters
    and buffers are constants. `mixes_examples`: with BatchNorm by the statistics of the batch, an example's logits
    depend on the other examples of its batch. `may_drop`: the model may call dropout in training, so a local step has a
    key for its draws.
    """

    def __init__(
        self,
        model: nn.Module,
        n_classes: int,
        n_clients: int,
        public: Public | None = None,
        criterion: Criterion = losses.cross_entropy,
        *,
        optimizer: Optimizer | None = None,
        lr: Callable[[int], float] = lambda round: 0.01,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
    ) -> None:
        check_model(model)
        self.n_classes, self.n_clients, self.public = n_classes, n_clients, public
        self.optimizer, self.lr = optimizer or SGD(), lr  # of the clients; lr(round) is the learning rate of a round
        self.seed = seed  # of the run, for what a method draws in `init_server`
        self.device, self.dtype, self.autocast = torch.device(device), dtype, autocast
        self.criterion = require_criterion(criterion, n_classes, self.device, dtype)
        self._eval = copy.deepcopy(model).to(device=self.device, dtype=dtype).eval()
        frozen = {id(p): p for p in self._eval.parameters() if not p.requires_grad}  # one copy serves both modules
        self.train_module = copy.deepcopy(self._eval, frozen).train()
        for name in frozen_layers(model):
            self.train_module.get_submodule(name).eval()
        self.mixes_examples, self.may_drop = has_batch_statistics(model), may_drop(model)
        self._call_eval, self._call_train = FunctionalModule(self._eval), FunctionalModule(self.train_module)
        self.init: Tree = {name: p.detach().clone() for name, p in self._eval.named_parameters() if p.requires_grad}
        if not self.init:
            raise ModelError(
                "the model has no parameter that requires a gradient, so there is nothing to train", key="model"
            )
        self.has_features = hasattr(model, "features") and hasattr(model, "head")
        self.accelerator = Accelerator()  # a runtime on a GPU sets its own
        self._maps_examples = True  # until vmap over examples has failed
        self._layers: dict[Any, list[layerwise.Layer] | None] = {}  # for squared gradients, by the form of an example

    @property
    def frozen(self) -> Tree:
        """The weights that are not trained: constants, which are neither sent nor stored."""
        return {name: p.detach() for name, p in self._eval.named_parameters() if name not in self.init}

    @property
    def n_weights(self) -> int:
        """The number of trained weights."""
        return sum(w.numel() for w in tree.leaves(self.init))

    @property
    def modules(self) -> tuple[nn.Module, nn.Module]:
        """The copies of the user's module in training mode and in evaluation mode."""
        return self.train_module, self._eval

    def apply(self, params: Tree, x: Any, train: bool = False, batch: int | None = None) -> Tensor:
        """Return the logits [B, C]. `train=True` (dropout on) belongs in `loss` alone.

        If other examples follow those of the batch, `batch` is how many of x are the batch's, padding included: the
        dropout of the others must not depend on how much padding there is.
        """
        logits = self._call(train, params, x, lambda module: module(x), batch)
        return logits.to(self.dtype) if isinstance(logits, Tensor) else logits

    def outputs(self, params: Tree, x: Any, train: bool = False, batch: int | None = None) -> tuple[Tensor, Tensor]:
        """Return (features before the classifier, logits) in one pass."""
        self._require_features()

        def both(module: Any) -> tuple[Tensor, Tensor]:
            features = module.features(x)
            return features, module.head(features)

        features, logits = self._call(train, params, x, both, batch)
        return features.to(self.dtype), logits.to(self.dtype)

    def head(self, params: Tree, features: Tensor, train: bool = False) -> Tensor:
        """Return the logits of features [B, n_features]: the classifier alone."""
        self._require_features()
        logits: Tensor = self._call(train, params, features, lambda module: cast(Any, module).head(features))
        return logits.to(self.dtype)

    @functools.cached_property
    def n_features(self) -> int:
        """The number of features that the head takes, found by calling it."""
        self._require_features()
        weights = [*self._eval.parameters(), *self._eval.buffers()]
        for width in dict.fromkeys(w.shape[1] for w in reversed(weights) if w.ndim == 2):  # the classifier comes last
            with torch.no_grad(), suppress(Exception):
                features = torch.zeros(1, width, dtype=self.dtype, device=self.device)
                if self.head(self.init, features).shape == (1, self.n_classes):
                    return int(width)
        raise ModelError(
            f"the head of {type(self._eval).__name__} takes no features of the shape [examples, features], which a "
            "method that makes features needs",
            key="model.head",
        )

    def _require_features(self) -> None:
        if not self.has_features:
            raise ModelError(
                f"{type(self._eval).__name__} needs two methods, features(x) and head(h), with forward(x) = "
                "head(features(x)), for a method that reads features",
                key="model.features",
            )

    def stages(self, params: Tree, x: Any, train: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return (feature maps before the model's last stage, those after it, logits) in one pass."""
        before, after, logits = self._call(train, params, x, lambda module: call_with_stage(module, x))
        return before.to(self.dtype), after.to(self.dtype), logits.to(self.dtype)

    def last_stage(self, weights: Tree, maps: Tensor, train: bool = False) -> Tensor:
        """Return the output of the model's last stage alone, with these weights, which may be slices of its own."""
        after: Tensor = self._call(train, weights, maps, lambda module: call_stage(module, maps))
        return after.to(self.dtype)

    @property
    def last_stage_weights(self) -> list[str]:
        """The names of the weights in the model's last stage."""
        inside = tuple(f"{name}." for name in stage_names(self.train_module))
        return [name for name in self.init if name.startswith(inside)]

    def example_gradients(self, params: Tree, x: Any, y: Tensor) -> Tree:
        """Return the gradient of the criterion for every example, in evaluation mode, [B, ...] each.

        They are computed by `vmap` over the examples; for a model that it does not support, one after another.
        """

        def single(w: Tree, x: Any, y: Tensor) -> Tensor:
            return self.criterion(self.apply(w, tree.map(lambda t: t[None], x)), y[None]).sum()

        gradient = torch.func.grad(single)
        if self._maps_examples:
            try:
                return torch.func.vmap(gradient, in_dims=(None, 0, 0))(params, x, y)  # type: ignore[no-any-return]
            except torch.OutOfMemoryError:
                raise
            except Exception:
                if is_batched(y):  # inside another vmap, which may be the reason
                    raise
                self._maps_examples = False
        with torch.backends.cudnn.flags(enabled=False):  # it has no gradient of an RNN in evaluation mode
            return tree.stack([gradient(params, tree.take(x, i), y[i]) for i in range(len(y))])

    @property
    def without_accelerator(self) -> Task:
        """The same task, computed by torch alone: its gradients have gradients in turn."""
        task = copy.copy(self)
        task.accelerator = Accelerator()
        return task

    def squared_gradients(self, params: Tree, x: Any, y: Tensor, weight: Tensor) -> Tree:
        """Return the sum over the examples of weight * (gradient of the criterion)^2, in evaluation mode.

        They are computed layer by layer; for a model that this does not support, from the gradient of every example.
        """
        form = layerwise.example_form(x)
        if form not in self._layers:
            self._layers[form] = self._find_layers(x)
        layers = self._layers[form]
        if layers is not None:
            chunk = layerwise.chunk_size(layers, self.device, self.dtype)
            try:
                return self._sum_over(chunk, functools.partial(self._layerwise_squares, layers), params, x, y, weight)
            except layerwise.NotLayerwiseError:
                self._layers[form] = None
        return self._sum_over(_GRADIENTS_AT_ONCE, self._squares, params, x, y, weight)

    def _find_layers(self, x: Any) -> list[layerwise.Layer] | None:
        """Return the layers for inputs of this form; None if their sums are not those of single examples.

        This is tried out with random inputs and weights, in float64: rounding must not switch a ReLU on or off.
        """
        try:
            exact = self._in_float64()
            params, inputs, y, weight = layerwise.random_trial(self.init, x, self.n_classes)
            with seeded(0, self.device):
                layers = layerwise.find_layers(lambda w: exact._losses(w, inputs, y), params, len(y))
                squares = exact._layerwise_squares(layers, params, inputs, y, weight)
                return layers if layerwise.agree(squares, exact._squares(params, inputs, y, weight)) else None
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return None

    def _in_float64(self) -> Task:
        """Return a copy of the task whose model in evaluation mode computes in float64, without an accelerator."""
        exact = copy.copy(self)
        exact.dtype, exact.autocast, exact.accelerator = torch.float64, None, Accelerator()
        exact._eval = copy.deepcopy(self._eval).double()
        exact._call_eval = FunctionalModule(exact._eval)
        if isinstance(self.criterion, nn.Module):
            exact.criterion = copy.deepcopy(self.criterion).double()
        return exact

    def _layerwise_squares(
        self, layers: list[layerwise.Layer], params: Tree, x: Any, y: Tensor, weight: Tensor
    ) -> Tree:
        return layerwise.squared_gradients(lambda w: self._losses(w, x, y), params, layers, weight)

    def _squares(self, params: Tree, x: Any, y: Tensor, weight: Tensor) -> Tree:
        each = self.example_gradients(params, x, y)
        return tree.map(lambda g: torch.tensordot(weight, g**2, dims=1), each)

    def _sum_over(self, chunk: int, squares: Callable[..., Tree], params: Tree, *examples: Any) -> Tree:
        """Return the sum of `squares(params, x, y, weight)` over chunks of the examples."""
        total: Tree = {}
        for start in range(0, len(examples[-1]), chunk):
            part = (tree.take(one, slice(start, start + chunk)) for one in examples)
            sums = squares(params, *part)
            total = tree.add(total, sums) if total else sums
        return total or tree.zeros_like(params)

    def _losses(self, params: Tree, x: Any, y: Tensor) -> Tensor:
        """Return the criterion of every example, by the module's own layers: no accelerator replaces them."""
        task = self.without_accelerator
        return task.criterion(task.apply(params, x), y)

    def module(self, params: Tree) -> nn.Module:
        """Return a copy of the user's module with these weights, on the CPU, in evaluation mode."""
        missing = sorted(self.init.keys() - params.keys())
        if missing:
            raise ModelError(
                f"the weights are not those of this model: {', '.join(missing[:3])} is missing",
                key="params",
                value=missing,
            )
        model = copy.deepcopy(self._eval).cpu()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in params:
                    p.copy_(params[name])
        return model

    def _call(
        self, train: bool, params: Tree, x: Any, use: Callable[[nn.Module], Any], batch: int | None = None
    ) -> Any:
        # no cache of cast weights: inside a CUDA graph it would outlive its memory
        wanted = self.autocast is not None
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=wanted, cache_enabled=False):
            module = self._call_train if train else self._call_eval
            return self.accelerator.call(lambda: self._with_own_layers(train, x, batch, lambda: module(params, use)))

    def _with_own_layers(self, train: bool, x: Any, batch: int | None, call: Callable[[], Any]) -> Any:
        """Call a model with BatchNorm and dropout replaced, where it has them."""
        n = len(tree.leaves(x)[0])
        statistics = batch_statistics(n) if self.mixes_examples else nullcontext()
        dropout = keyed_dropout(n, batch, self.accelerator.drop) if train and self.may_drop else nullcontext()
        with statistics, dropout:
            return call()


def check_model(model: nn.Module) -> None:
    """Raise if the model's training cannot be a pure function of its weights."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the model must be a torch.nn.Module, not {type(model).__name__}", key="model", value=type(model).__name__
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule | nn.DataParallel):
            raise ModelError(
                f"{format_layer(name)} is a {type(module).__name__}, whose parameters cannot be replaced; pass the "
                "original nn.Module instead",
                key=name or "model",
                value=type(module).__name__,
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            check_batch_norm(name, module)
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            message = f"the weight {name} is not initialised yet: run one batch through the lazy model first"
            raise ModelError(message, key=name)


def check_forward(task: Task, x: Any) -> None:
    """Run two examples through the model; raise if it does not return logits, or changes its input or buffers."""
    before = {name: b.clone() for name, b in task.train_module.named_buffers()}
    original = tree.map(torch.clone, x)
    try:
        with torch.no_grad(), seeded(0, task.device):
            logits = task.apply(task.init, x, train=True)
    except Exception as error:
        raise ModelError(f"the model fails on the data (inputs {_shape(x)}): {error}", key="model") from error
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"the model returns a {type(logits).__name__}; it must return the logits only, as one tensor",
            key="model",
            value=type(logits).__name__,
        )
    if any(not torch.equal(a, b) for a, b in zip(tree.leaves(original), tree.leaves(x), strict=True)):
        raise ModelError("the model changes its own input, and with it the data: work on a copy", key="model")
    if task.n_classes == 2 and tuple(logits.shape) in ((2,), (2, 1)):
        raise ModelError(
            "the model returns one logit per example, but two classes need two, for a softmax: wrap it as "
            "fedkeep.models.two_logits(model), which has the same probabilities, and use the default criterion",
            key="model",
            value=tuple(logits.shape),
        )
    if logits.ndim != 2 or logits.shape[1] != task.n_classes:
        raise ModelError(
            f"the model returns {tuple(logits.shape)} for two examples; logits of shape (2, {task.n_classes}) "
            f"are needed, one for each of the data's {task.n_classes} classes",
            key="model",
            value=tuple(logits.shape),
        )
    for name, b in task.train_module.named_buffers():
        if name not in before or not torch.equal(b, before[name]):
            raise ModelError(
                f"the buffer {name} changes in training, which must be a pure function of the weights: freeze it or "
                "make it a parameter",
                key=name,
            )
    if task.has_features:
        with torch.no_grad():
            whole, parts = task.apply(task.init, x), task.outputs(task.init, x)[1]
        task.has_features = whole.shape == parts.shape and torch.allclose(whole, parts, rtol=1e-3, atol=1e-4)


def _shape(x: Any) -> Any:
    return {k: tuple(v.shape) for k, v in x.items()} if isinstance(x, dict) else tuple(x.shape)


def describe_criterion(criterion: Criterion) -> str:
    """Return the criterion's name and, except for the default, a hash of what it computes.

    >>> describe_criterion(losses.cross_entropy)
    'cross_entropy'
    >>> describe_criterion(nn.CrossEntropyLoss(label_smoothing=0.1)).partition("#")[0]
    'CrossEntropyLoss()'
    """
    if criterion is losses.cross_entropy:
        return "cross_entropy"
    tensors = dict(criterion.state_dict()) if isinstance(criterion, nn.Module) else {}  # such as class weights
    return f"{criterion_name(criterion)}#{structure_hash((criterion, tensors))}"
