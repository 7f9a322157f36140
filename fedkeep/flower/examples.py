"""Examples in the forms that Flower apps have them: arrays, torch data sets and DataLoaders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from fedkeep.data.augment import InputPipeline
from fedkeep.data.convert import require_lengths, to_inputs
from fedkeep.data.dataset import Dataset
from fedkeep.data.labels import to_labels
from fedkeep.data.sources.choice import USUAL_Y
from fedkeep.errors import DataError

BATCH = 256  # test examples at a time, unless a DataLoader has another number


@dataclass(frozen=True)
class TestData:
    """Test examples and their labels."""

    name: str
    x: Any
    y: Tensor
    n_classes: int | None = None  # where known
    inputs: InputPipeline | None = None  # None: the model takes the examples as they are
    batch: int = BATCH


def read_examples(data: Any, key: str, collate: Callable[[Any], Any] = default_collate) -> tuple[Any, Any]:
    """Return all examples of a torch data set as (x, y); an example is a pair, or a dict with a label.

    `key` is the argument that the data set was given as. `collate` makes one batch of all examples.
    """
    batch = collate([data[k] for k in range(len(data))])
    if not isinstance(batch, dict):
        x, y = batch
        return x, y
    label = next((name for name in USUAL_Y if name in batch), None)
    if label is None:
        raise DataError(
            f"an example has the keys {', '.join(map(str, batch))}, but no {', '.join(USUAL_Y)}",
            key=key,
            value=list(batch),
            valid=USUAL_Y,
        )
    rest = {name: value for name, value in batch.items() if name != label and isinstance(value, Tensor)}
    return (rest if len(rest) > 1 else next(iter(rest.values()))), batch[label]


def read_test_data(data: Any) -> TestData:
    """Return test data that is given as (x, y), a DataLoader, a data set of torch or fedkeep, or a function of none."""
    if callable(data) and not hasattr(data, "__getitem__") and not hasattr(data, "dataset"):
        data = data()
    if isinstance(data, Dataset):
        inputs = InputPipeline(mean=data.mean, std=data.std)
        return TestData(data.name, data.x_test, data.y_test, data.n_classes, inputs)
    name, batch = "arrays", BATCH
    if not isinstance(data, tuple | list):
        source, batch = getattr(data, "dataset", data), getattr(data, "batch_size", None) or BATCH
        name, collate = type(source).__name__, getattr(data, "collate_fn", None) or default_collate
        try:
            data = read_examples(source, "test_data", collate)
        except DataError:
            raise
        except Exception as error:
            raise _unusable(source) from error
    try:
        x, y = data
    except (TypeError, ValueError):
        raise _unusable(data) from None
    x, y = to_inputs(x, "x_test"), to_labels(y, "y_test")
    require_lengths(x, y, "test")
    return TestData(name, x, y, batch=batch)


def _unusable(data: Any) -> DataError:
    kind = type(data).__name__
    valid = "(x, y), a torch DataLoader or data set of such pairs, or a fedkeep.data.Dataset"
    return DataError(f"test_data must be {valid}, not {kind}", key="test_data", value=kind)
