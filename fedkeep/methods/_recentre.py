"""Recentring of a classifier: subtracting the mean over classes, which changes no softmax and no argmax."""

from __future__ import annotations

import torch

from fedkeep import tree
from fedkeep.errors import MethodError
from fedkeep.methods._classifier import classifier
from fedkeep.task import Public, Task
from fedkeep.tree import Tree


def recentred(task: Task, method: str, params: Tree) -> Tree:
    """Return the weights with the classifier's mean over classes subtracted: all logits shift by one number."""
    return {**params, **{name: params[name] - params[name].mean(0) for name in _classifier(task, method)}}


def require_recentrable(task: Task, method: str, params: Tree, public: Public) -> None:
    """Raise if recentring would change the model's probabilities: then the logits come from another layer."""
    x = tree.take(public.x, slice(8))
    with torch.no_grad():
        before, after = (task.apply(w, x).softmax(-1) for w in (params, recentred(task, method, params)))
    if float((before - after).abs().max()) > (1e-4 if task.autocast is None else 1e-2):
        raise MethodError(
            f"{method}: recentring {_classifier(task, method)[0]} changes the model's probabilities, so it is not the "
            "linear layer that computes the logits; end the model with one, or set recentre=False",
            key="method.recentre",
        )


def _classifier(task: Task, method: str) -> list[str]:
    return classifier(task, method, "recentre", "False", checks=True)
