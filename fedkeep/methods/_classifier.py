"""The classifier of a model: its last layer, with one row of weights per class."""

from __future__ import annotations

from fedkeep.errors import MethodError
from fedkeep.task import Task


def classifier(task: Task, method: str, field: str = "", otherwise: str = "") -> list[str]:
    """Return the names of the classifier's weight matrix, one row per class, and of its bias if it has one.

    It is the linear layer that makes the logits or, where that is not known, the only matrix of this form. If there is
    none, the error is about this field of the method, if given, and advises to set it `otherwise`.
    """
    C, layer = task.n_classes, task.last_linear
    names = list(task.init) if layer is None else task.weights_of(layer)
    matrices = [name for name in names if task.init[name].ndim == 2 and len(task.init[name]) == C]
    if not matrices or (layer is None and len(matrices) > 1):
        advice = f", or set {field}={otherwise}" if field else ""
        key = f"method.{field}" if field else "model"
        raise MethodError(f"{method}: {_problem(matrices, layer, C)}{advice}", key=key)
    weight = matrices[-1]
    biases = [name for name in names if task.init[name].shape == (C,)]
    if layer is None:
        biases = [name for name in biases if name == weight.removesuffix("weight") + "bias"]
    return [weight, *biases]


def _problem(matrices: list[str], layer: str | None, n_classes: int) -> str:
    """Return what is wrong with a model without one classifier, and what to do."""
    if matrices:
        return (
            f"{len(matrices)} of the model's weights have {n_classes} rows ({', '.join(matrices[:3])}), and which of "
            "them makes the logits is not known; end the model with a linear layer, whose output it returns unchanged "
            "(in a federation, the server needs test data to find it)"
        )
    if layer is not None:
        return f"the layer {layer!r}, which makes the logits, is not trained"
    return (
        f"none of the model's weights is a matrix of {n_classes} rows, one for each class, so there is no classifier; "
        "end the model with a trainable linear layer"
    )
