"""Recentring of a classifier: subtracting the mean over classes, which changes no softmax and no argmax."""

from __future__ import annotations

import torch

from fedkeep import tree
from fedkeep.errors import MethodError
from fedkeep.task import Public, Task
from fedkeep.tree import Tree


def classifier(task: Task, method: str) -> list[str]:
    """Return the names of the last weight matrix with one row per class, and of its bias if it has one."""
    C, names = task.n_classes, list(task.init)
    rows = [name for name in names if task.init[name].ndim == 2 and len(task.init[name]) == C]
    if not rows:
        raise MethodError(
            f"{method}: none of the model's weights is a matrix of {C} rows, one for each class, so there is no "
            "classifier to recentre; end the model with a trainable linear layer, or set recentre=False",
            key="method.recentre",
        )
    bias = rows[-1].removesuffix("weight") + "bias"
    return [rows[-1], *([bias] if bias in names and task.init[bias].shape == (C,) else [])]


def recentred(task: Task, method: str, params: Tree) -> Tree:
    """Return the weights with the classifier's mean over classes subtracted: all logits shift by one number."""
    return {**params, **{name: params[name] - params[name].mean(0) for name in classifier(task, method)}}


def require_recentrable(task: Task, method: str, params: Tree, public: Public) -> None:
    """Raise if recentring would change the model's probabilities: then the logits come from another layer."""
    x = tree.take(public.x, slice(8))
    with torch.no_grad():
        before, after = (task.apply(w, x).softmax(-1) for w in (params, recentred(task, method, params)))
    if float((before - after).abs().max()) > (1e-4 if task.autocast is None else 1e-2):
        raise MethodError(
            f"{method}: recentring {classifier(task, method)[0]} changes the model's probabilities, so it is not the "
            "linear layer that computes the logits; end the model with one, or set recentre=False",
            key="method.recentre",
        )
