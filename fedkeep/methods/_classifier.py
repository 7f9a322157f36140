"""The classifier of a model: its last layer, with one row of weights per class."""

from __future__ import annotations

from fedkeep.errors import MethodError
from fedkeep.task import Task


def classifier(task: Task, method: str, field: str = "", otherwise: str = "", checks: bool = False) -> list[str]:
    """Return the names of the classifier's weights with one row per class: the matrix first, then its bias if any.

    It is the linear layer that makes the logits. Without one, a single matrix of this form will do if the task has not
    been examined (a server without test data) or the method checks by its outputs that it is the classifier. If there
    is none, the error is about this field of the method, if given, and advises to set it `otherwise`.
    """
    if task.last_linear is not None:
        names = task.weights_of(task.last_linear)
    else:
        names = _matrix_and_bias(task) if checks or not task.examined else []
    rows = [name for name in names if task.init[name].shape[:1] == (task.n_classes,)]
    if not any(task.init[name].ndim == 2 for name in rows):
        advice = f", or set {field}={otherwise}" if field else ""
        raise MethodError(f"{method}: {_problem(task)}{advice}", key=f"method.{field}" if field else "model")
    return sorted(rows, key=lambda name: -task.init[name].numel())


def _matrix_and_bias(task: Task) -> list[str]:
    """Return the names of the only matrix with one row per class and of its bias; none if that would be a guess."""
    matrices = _matrices(task)
    if len(matrices) != 1 or matrices[0] not in task.init:
        return []
    bias = matrices[0].removesuffix("weight") + "bias"
    return [matrices[0], *([bias] if bias in task.init else [])]


def _matrices(task: Task) -> list[str]:
    """Return the names of all matrices with one row per class, trained or not."""
    weights = {**task.init, **task.frozen}
    return [name for name, w in weights.items() if w.ndim == 2 and len(w) == task.n_classes]


def _problem(task: Task) -> str:
    """Return why the model has no classifier, and what to do."""
    matrices = _matrices(task)
    if task.last_linear is not None:
        return f"the layer {task.last_linear!r}, which makes the logits, is frozen: train it"
    if task.examined:
        return (
            "no linear layer makes the logits: return the output of an nn.Linear itself, without .float(), a scale or "
            "an activation"
        )
    if len(matrices) > 1:
        return (
            f"{len(matrices)} of the model's weights have {task.n_classes} rows ({', '.join(matrices[:3])}), and which "
            "of them makes the logits is not known: give the server test data, with which it finds out"
        )
    return (
        f"none of the model's trained weights is a matrix of {task.n_classes} rows, one for each class, so there is no "
        "classifier: end the model with a trained linear layer"
    )
