"""Tests of a user's model, class by class: with a model and test data, or with a function of the user's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import losses, tree
from fedkeep._util.structure import layer_names, structure_hash
from fedkeep._util.text import one_line
from fedkeep.data.texts import Texts
from fedkeep.engine.device import resolve_device
from fedkeep.engine.scores import Scorer
from fedkeep.errors import DataError, FedkeepError, ModelError
from fedkeep.flower.examples import read_test_data
from fedkeep.runs.files import fingerprint
from fedkeep.runs.history import Record
from fedkeep.runs.packed import as_table

Weights = Mapping[str, Tensor]


class ClassTest(Protocol):
    """What tests a model after every round."""

    def run(self, weights: Weights, arrays: Any) -> Record:
        """Return `confusion` [true, predicted] and, if it is known, `test_loss`.

        `weights` are the model's tensors by name, `arrays` the same as the app has them.
        """
        ...

    def about(self) -> dict[str, Any]:
        """Return what identifies model and test data: the tables `model` and `data`, and hashes in `made_by`."""
        ...


class ModelTest:
    """Tests a torch model on test examples, in evaluation mode."""

    def __init__(self, model: Any, test_data: Any, device: str = "cpu") -> None:
        self.device = resolve_device(device)
        self.model = _build(model).to(self.device).eval()
        self.own = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        self.data = read_test_data(test_data)
        self.x, self.y = tree.to(self.data.x, self.device), self.data.y.to(self.device)
        self.n_classes = self._try()

    def run(self, weights: Weights, arrays: Any = None) -> Record:
        """Return the scores of the model with these weights; `test_loss` is the mean cross-entropy."""
        self._load(weights)
        logits = torch.empty((len(self.y), self.n_classes), device=self.device)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for at in self._batches():
                logits[at] = z = self._logits(at)
                loss += losses.cross_entropy(z, self.y[at]).sum()
        scorer = Scorer(self.y, self.n_classes)
        record = scorer.read(scorer.start(logits, loss), round=0)
        mean_loss = record.pop("test_loss")
        return {**record, **_finite(mean_loss)}

    def about(self) -> dict[str, Any]:
        """Return what identifies model and test data."""
        made_by = {
            "structure": structure_hash(self.model),
            "layers": layer_names(self.model),
            "test": fingerprint(self.x, self.y),
            "device": self.device.type,
        }
        return {"model": {"class": type(self.model).__name__}, "data": {"source": self.data.name}, "made_by": made_by}

    def _batches(self) -> Iterator[Tensor | slice]:
        """Yield the positions of the examples, some at a time."""
        size = self.data.batch
        if isinstance(self.x, Texts):
            yield from self.x.batches(min(size, self.x.at_a_time))
            return
        for start in range(0, len(self.y), size):
            yield slice(start, start + size)

    def _logits(self, at: Tensor | slice) -> Tensor:
        x = tree.take(self.x, at)
        logits = self.model(self.data.inputs(x) if self.data.inputs else tree.map(self._as_input, x))
        found: Tensor = getattr(logits, "logits", logits)  # of a model of Hugging Face
        return found

    def _as_input(self, x: Tensor) -> Tensor:
        first = next((p for p in self.model.parameters() if p.is_floating_point()), None)
        return x.to(first.dtype) if x.is_floating_point() and first is not None else x

    def _load(self, weights: Weights) -> None:
        """Load weights into the model; raise if they are not the model's. Frozen ones that are not sent stay."""
        weights = self._named(weights)
        unknown, missing = sorted(weights.keys() - self.own.keys()), sorted(self.trained - weights.keys())
        if unknown or missing:
            name = (unknown or missing)[0]
            problem = "have" if unknown else "lack"
            verb = "does not have" if unknown else "has"
            raise ModelError(f"the app's arrays {problem} {name}, which the model {verb}", key="model", value=name)
        for name, value in weights.items():
            if value.shape != self.own[name].shape:
                theirs, own = tuple(value.shape), tuple(self.own[name].shape)
                message = f"{name} has the shape {theirs} in the app's arrays, but {own} in the model"
                raise ModelError(message, key="model", value=name)
        self.model.load_state_dict({**self.own, **weights})

    def _named(self, weights: Weights) -> Weights:
        """Return weights by the model's names; a list of arrays has the numbers of its entries as names."""
        if list(weights) != [str(k) for k in range(len(weights))]:
            return weights
        trained = [name for name in self.own if name in self.trained]
        names = next((names for names in (list(self.own), trained) if len(names) == len(weights)), None)
        if names is None:
            counts = f"{len(weights)} arrays, but the model {len(self.own)}"
            raise ModelError(f"the app has {counts}, {len(trained)} of them trained", key="model", value=len(weights))
        return dict(zip(names, weights.values(), strict=True))

    @torch.no_grad()
    def _try(self) -> int:
        """Return how many classes the model has; raise if it fails on the test data or these have other classes."""
        number = min(2, len(self.y))
        try:
            logits = self._logits(slice(0, number))
        except Exception as error:
            message = f"the model fails on the test data: {one_line(error)}"
            raise ModelError(message, key="model", value=type(error).__name__) from error
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != number or logits.shape[1] < 2:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ModelError(
                f"the model returns {shape} for {number} examples; logits of shape ({number}, classes) are needed, or "
                "pass confusion, a function of your own",
                key="model",
                value=shape,
            )
        classes, highest = int(logits.shape[1]), int(self.y.max())
        if highest >= classes or self.data.n_classes not in (None, classes):
            found = f"a label {highest}" if highest >= classes else f"{self.data.n_classes} classes"
            message = f"the test data has {found}, but the model has {classes} classes, 0 to {classes - 1}"
            raise DataError(message, key="test_data", value=highest)
        return classes


class FunctionTest:
    """Tests a model with a function of the user's own, from the app's arrays to a confusion matrix."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.n_classes: int | None = None

    def run(self, weights: Weights, arrays: Any) -> Record:
        """Return `confusion` and, if the function returns a pair, `test_loss`; nothing if it returns None."""
        if (result := self.function(arrays)) is None:
            return {}
        confusion, loss = result if isinstance(result, tuple) else (result, None)
        confusion = confusion.detach().cpu() if isinstance(confusion, Tensor) else confusion
        matrix: np.ndarray = np.asarray(confusion)
        if matrix.ndim != 2 or matrix.shape != (self.n_classes or len(matrix),) * 2 or matrix.dtype.kind not in "iuf":
            square = "as many rows as columns" if self.n_classes is None else f"{self.n_classes} rows and columns"
            shape = tuple(matrix.shape)
            raise FedkeepError(
                f"confusion must return a matrix [true class, predicted class] of counts with {square}, not {shape}",
                key="confusion",
                value=shape,
            )
        whole = bool(np.isfinite(matrix).all() and (matrix == np.round(matrix)).all())
        if not whole or matrix.min(initial=0) < 0 or not matrix.sum() > 0:
            raise FedkeepError("confusion must return whole numbers of at least 0, not all of them 0", key="confusion")
        self.n_classes, matrix = len(matrix), matrix.astype(np.int64)
        return {"confusion": as_table(matrix), **_finite(loss)}

    def about(self) -> dict[str, Any]:
        """Return what identifies the function."""
        code = structure_hash(self.function)
        return {"model": {"class": "the app's"}, "data": {"source": "the app's"}, "made_by": {"test": code}}


def _finite(loss: Any) -> Record:
    """Return the test loss as part of a record; nothing if it is unknown, NaN or infinite."""
    return {} if loss is None or not math.isfinite(loss) else {"test_loss": float(loss)}


def _build(model: Any) -> nn.Module:
    """Return a module of the user's, or what a class or function returns; a copy, so that the user's stays as it is."""
    built = model if isinstance(model, nn.Module) or not callable(model) else model()
    if not isinstance(built, nn.Module):
        kind = type(built).__name__
        message = f"model must be a torch.nn.Module, or a class or function that returns one, not {kind}"
        raise ModelError(message, key="model", value=kind)
    return copy.deepcopy(built)
