"""The classifier of a model: its last layer, with one row of weights per class."""

from __future__ import annotations

from fedkeep.errors import MethodError
from fedkeep.task import Task


def classifier(task: Task, method: str, field: str = "", otherwise: str = "") -> list[str]:
    """Return the names of the classifier's weight matrix, one row per class, and of its bias if it has one.

    It is the linear layer that makes the logits or, where that is not known, the last matrix of this form. If there is
    none, the error is about this field of the method, if given, and advises to set it `otherwise`.
    """
    C, names = task.n_classes, list(task.init)
    rows = [name for name in names if task.init[name].ndim == 2 and len(task.init[name]) == C]
    made_by = f"{task.last_linear}.weight"
    if made_by in rows:
        rows = [made_by]
    if not rows:
        raise MethodError(
            f"{method}: none of the model's weights is a matrix of {C} rows, one for each class, so there is no "
            "classifier; end the model with a trainable linear layer"
            + (f", or set {field}={otherwise}" if field else ""),
            key=f"method.{field}" if field else "model",
        )
    bias = rows[-1].removesuffix("weight") + "bias"
    return [rows[-1], *([bias] if bias in names and task.init[bias].shape == (C,) else [])]
