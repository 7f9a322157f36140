"""Task: the model as pure functions, the loss and the numbers of the federation."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedkeep import losses, tree
from fedkeep._util.batch_norm import batch_statistics, frozen_layers, has_batch_statistics
from fedkeep._util.criterion import Criterion, criterion_name, require_criterion
from fedkeep._util.dropout import keyed_dropout, may_drop
from fedkeep._util.functional_module import FunctionalModule
from fedkeep._util.stages import call_stage, call_with_stage, stage_names
from fedkeep._util.structure import structure_hash
from fedkeep.errors import ModelError
from fedkeep.optim import SGD, Optimizer
from fedkeep.task.base import Accelerator, Public
from fedkeep.task.checks import check_model
from fedkeep.task.example_gradients import ExampleGradients
from fedkeep.task.features import call_with_inputs, call_with_own_features, find_last_linear, has_own_features
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")


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
        base_lr: float = 0.01,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
    ) -> None:
        check_model(model)
        self.n_classes, self.n_clients, self.public = n_classes, n_clients, public
        self.optimizer, self.lr = optimizer or SGD(), lr  # of the clients; lr(round) is the learning rate of a round
        self.base_lr = base_lr  # the learning rate before decay, after the warm-up
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
        self.has_own_features = has_own_features(model)
        self.examined = False  # whether `find_features` has called the model
        self.last_linear: str | None = None  # the linear layer that makes the logits, if it has been found
        self._ignores_features = False  # whether the model's own features are wrong, and nobody has been warned yet
        self.accelerator = Accelerator()  # a runtime on a GPU sets its own
        self.gradients = ExampleGradients()

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
        if not self.has_own_features:
            return self.classifier_inputs(params, x, train, batch)
        features, logits = self._call(train, params, x, lambda module: call_with_own_features(module, x), batch)
        return features.to(self.dtype), logits.to(self.dtype)

    def classifier_inputs(
        self, params: Tree, x: Any, train: bool = False, batch: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (inputs of the linear layer that makes the logits, logits) in one pass."""
        layer = self.require_last_linear()
        h, logits = self._call(train, params, x, lambda module: call_with_inputs(module, x, layer), batch)
        return h.to(self.dtype), logits.to(self.dtype)

    def require_last_linear(self) -> str:
        """Return the name of the linear layer that makes the logits; raise if none was found."""
        if self.last_linear is None:
            name = type(self._eval).__name__
            raise ModelError(
                f"{name} does not return the output of an nn.Linear as its logits, which this method needs: return it "
                "itself, without .float(), a scale or an activation, or use another method",
                key="model",
                value=name,
            )
        return self.last_linear

    def head(self, params: Tree, features: Tensor, train: bool = False) -> Tensor:
        """Return the logits of features [B, n_features]: the classifier alone."""
        self._require_features()
        logits: Tensor = self._call(train, params, features, lambda module: self._head_of(module)(features))
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
        if not (self.has_own_features or self.last_linear is not None):
            raise ModelError(
                f"{type(self._eval).__name__} must end with a linear layer, or have two methods, features(x) and "
                "head(h), with forward(x) = head(features(x)), for a method that reads features",
                key="model.features",
            )
        if self._ignores_features:
            self._ignores_features = False
            log.warning(
                "%s has features and head, but head(features(x)) is not its output, so the inputs of its last linear "
                "layer are used",
                type(self._eval).__name__,
            )

    def _head_of(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        return cast(Any, module).head if self.has_own_features else module.get_submodule(self.last_linear or "")

    def weights_of(self, layer: str) -> list[str]:
        """Return the names of a layer's trained weights; a tied weight has the name of its first place."""
        own = {id(p) for p in self._eval.get_submodule(layer).parameters()}
        return [name for name, p in self._eval.named_parameters() if id(p) in own and name in self.init]

    def find_features(self, x: Any) -> None:
        """Find out, with examples, whether a linear layer makes the logits, and whether the model's own head does."""
        with torch.no_grad():
            self.last_linear = self._call(False, self.init, x, lambda module: find_last_linear(module, x))
            self.examined = True
            if self.has_own_features and not self._own_features_fit(x):
                self.has_own_features, self._ignores_features = False, True

    def _own_features_fit(self, x: Any) -> bool:
        """Return whether head(features(x)) is what the model returns."""
        whole, parts = self.apply(self.init, x), None
        with suppress(Exception):  # a head that takes something else than the features
            parts = self.outputs(self.init, x)[1]
        return parts is not None and whole.shape == parts.shape and torch.allclose(whole, parts, rtol=1e-3, atol=1e-4)

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
        """Return the gradient of the criterion for every example, in evaluation mode, [B, ...] each."""
        return self.gradients.of_examples(self, params, x, y)

    def squared_gradients(self, params: Tree, x: Any, y: Tensor, weight: Tensor) -> Tree:
        """Return the sum over the examples of weight * (gradient of the criterion)^2, in evaluation mode."""
        return self.gradients.squared(self, params, x, y, weight)

    @property
    def without_accelerator(self) -> Task:
        """The same task, computed by torch alone: its gradients have gradients in turn."""
        task = copy.copy(self)
        task.accelerator = Accelerator()
        return task

    @property
    def in_float64(self) -> Task:
        """The same task in float64 and evaluation mode, computed by torch alone."""
        exact = copy.copy(self)
        exact.dtype, exact.autocast, exact.accelerator = torch.float64, None, Accelerator()
        exact._eval = copy.deepcopy(self._eval).double()
        exact._call_eval = FunctionalModule(exact._eval)
        if isinstance(self.criterion, nn.Module):
            exact.criterion = copy.deepcopy(self.criterion).double()
        return exact

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
