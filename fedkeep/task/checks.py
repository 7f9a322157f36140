"""Checks of a user's model: whether its training is a pure function of its weights, and what it returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedkeep import tree
from fedkeep._util.batch_norm import check_batch_norm
from fedkeep._util.rng import seeded
from fedkeep._util.text import format_layer
from fedkeep.errors import ModelError

if TYPE_CHECKING:
    from fedkeep.task.task import Task


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
        hint = "; a model gets the whole dict: let forward(x) call the network with **x" if isinstance(x, dict) else ""
        raise ModelError(f"the model fails on the data (inputs {_shape(x)}): {error}{hint}", key="model") from error
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"the model returns a {type(logits).__name__}; it must return the logits only, as one tensor (of a Hugging "
            "Face model, its .logits)",
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
    task.find_features(x)


def _shape(x: Any) -> Any:
    return {k: tuple(v.shape) for k, v in x.items()} if isinstance(x, dict) else tuple(x.shape)
