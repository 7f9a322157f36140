"""Shared by all readers of data sets: their options, their result, and a fixed test split."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep import tree
from fedkeep._util.optional import require_extra
from fedkeep._util.text import did_you_mean, one_line
from fedkeep._util.text_form import LONGEST
from fedkeep._util.validate import require_number, require_whole
from fedkeep.data.seeds import share_of_each_class
from fedkeep.errors import DataError, FedkeepError

MAX_PIXELS = 2**26  # of one image: 8192 x 8192


class Missing(DataError):  # noqa: N818 (it is what happened, not a mistake of the caller)
    """A file or a folder does not exist."""


@dataclass(frozen=True)
class Options:
    """Options for reading a source. Which of them apply depends on the kind of source."""

    size: tuple[int, int] | None = None  # (height, width): images are resized to it, flat pixels reshaped to it
    x: str | Sequence[str] | None = None  # the column or columns of the examples
    y: str | None = None  # the column of the classes; for CIFAR-100, "fine_label" or "coarse_label"
    classes: Sequence[str] | None = None  # the names of class 0, class 1, ...; if labels are text, these are the labels
    ids: str | None = None  # the column with the owner of each example
    text: str | Sequence[str] | None = None  # the column of the texts, or several, joined by spaces
    label: str | None = None  # another name for y
    tokenizer: Any = None  # "words", a folder or a name on the hub; or maps texts to a tensor or a dict of tensors
    max_length: int | None = None  # tokens of a text; what is longer is cut
    splits: Sequence[str] | None = None  # the splits of a Hugging Face data set to train on and to test on
    test: float | None = None  # the fraction to hold out for testing, if the source has no test set
    first_label: int | None = None  # the label of class 0 in the source
    merge_validation: bool | None = None  # train on the validation set too
    test_writers: bool | None = None  # FEMNIST: test on all examples of some writers, not on some of every writer
    max_gb: float = 4  # of memory that the data may need, unpacked

    @classmethod
    def parse(cls, options: dict[str, Any], others: Iterable[str] = ()) -> Options:
        """Return checked options; an unknown name or an invalid value raises an error, which suggests `others` too."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name, value in options.items():
            if name not in names:
                valid = [*others, *names]
                raise DataError(
                    f"load has no option {name!r}: {did_you_mean(name, valid)}", key=name, value=value, valid=valid
                )
        for name, value in options.items():
            if value is not None:
                _require_kind(name, value)
        options = {name: value for name, value in options.items() if value is not None}
        if size := options.get("size"):
            options["size"] = (int(size[0]), int(size[1]))
        for name, same in (("label", "y"), ("text", "x")):
            if name in options and same in options:
                raise DataError(f"{name} and {same} name the same: give one of them", key=name, value=options[name])
        if "label" in options:
            options["y"] = options.pop("label")
        return cls(**options)

    def require_memory(self, n_bytes: float, where: object) -> None:
        """Raise if data needs more memory than `max_gb`."""
        if n_bytes > self.max_gb * 1e9:
            raise DataError(
                f"{where} needs {n_bytes / 1e9:.1f} GB of memory, but at most max_gb = {self.max_gb:g} may be used: if "
                "this is right, raise max_gb",
                key="max_gb",
                value=self.max_gb,
            )

    def reject_except(self, source: str, *allowed: str) -> None:
        """Raise an error for an option that does not apply to this kind of source."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            given = value is not None and value is not False and field.name != "max_gb"
            if given and field.name not in allowed:
                valid = f"valid: {', '.join(allowed)}" if allowed else "it has no options"
                raise DataError(
                    f"the option {field.name} does not apply to {source} ({valid})",
                    key=field.name,
                    value=value,
                    valid=allowed,
                )

    def reject_test_share(self, name: str) -> None:
        """Raise an error for `test` or `test_writers`, because the source already has a test set."""
        for option in ("test", "test_writers"):
            value = getattr(self, option)
            if value is not None and value is not False:
                raise DataError(
                    f"{name} already has a test set, so the option {option} does not apply", key=option, value=value
                )


@dataclass(frozen=True)
class Part:
    """Training or test examples as read: `x` and `y` as in a data set, and the owner of each example."""

    x: Any
    y: np.ndarray
    ids: np.ndarray | None = None

    def take(self, index: np.ndarray) -> Part:
        """Return some of the examples."""
        return Part(tree.take(self.x, index), self.y[index], None if self.ids is None else self.ids[index])


@dataclass(frozen=True)
class Raw:
    """The result of a reader.

    `n_classes` and `class_names` are None unless the source declares them, and `test` if it has no test set.
    """

    train: Part
    test: Part | None
    name: str
    n_classes: Any = None
    mean: Any = None
    std: Any = None
    class_names: Sequence[str] | None = None
    feature_names: Sequence[str] | None = None  # of the columns of a table

    @property
    def labels(self) -> list[np.ndarray]:
        """The labels of each part."""
        return [np.asarray(part.y) for part in (self.train, self.test) if part is not None]

    @property
    def has_whole_labels(self) -> bool:
        """Whether every part has examples, and whole numbers as labels."""
        return all(len(y) and y.dtype.kind in "iu" for y in self.labels)

    def map(self, change: Callable[[Part], Part]) -> Raw:
        """Return the result with every part changed."""
        return dataclasses.replace(self, train=change(self.train), test=self.test and change(self.test))


def hold_out(raw: Raw, share: float) -> Raw:
    """Return the data with a fraction of each class moved to the test set; always the same examples."""
    test, train = share_of_each_class(raw.train.y, share)
    # labels that are fractions are refused later, as such
    if len(train) and not len(test) and np.asarray(raw.train.y).dtype.kind != "f":
        sizes = np.unique(raw.train.y, return_counts=True)[1]
        most, enough = int(sizes.max()), math.floor(5 / sizes.max() + 1) / 10
        advice = f"give test={enough:g} or more, or a pair (train, test)" if most > 1 else "are these classes?"
        raise DataError(
            f"{raw.name} has {len(sizes)} different labels and at most {most} example{'s' * (most > 1)} of each, too "
            f"few to hold out {share:g} of them for testing: {advice}",
            key="y",
            value=len(sizes),
        )
    return dataclasses.replace(raw, train=raw.train.take(train), test=raw.train.take(test))


def require_package(module: str, feature: str) -> Any:
    """Import a module of the extra `data`; if it is missing, raise an error with the install command."""
    return require_extra(module, "data", feature, DataError)


def to_path(value: str | Path, key: str) -> Path:
    """Return a path with `~` expanded; raise if it is none, or its user is unknown."""
    if not isinstance(value, str | Path) or not str(value):
        raise DataError(f"{key} must be a path, not {value!r}", key=key, value=value)
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise DataError(f"{key} = {str(value)!r}: {one_line(error)}", key=key, value=str(value)) from error


@contextmanager
def errors_named(name: str | Path) -> Iterator[None]:
    """Convert errors of the file system, of memory and of other libraries to a DataError that names the source."""
    try:
        yield
    except DataError:
        raise
    except (OSError, EOFError, MemoryError, RecursionError, ArithmeticError, ValueError, RuntimeError) as error:
        if isinstance(error, FedkeepError):
            raise
        reason = "it does not fit into memory" if isinstance(error, MemoryError) else one_line(error)
        raise DataError(f"{one_line(ValueError(name))} cannot be loaded: {reason}", key=str(name)) from error


def path_inside(folder: Path, name: str, where: str) -> Path:
    """Return the path of a file that a data file names; raise if it leaves the folder. Links are followed."""
    path, inside = os.path.abspath(folder / name), os.path.abspath(folder)
    if "\0" in name or os.path.commonpath([path, inside]) != inside or path == inside:
        raise DataError(f"{where}: {name!r} is not a file in {folder}", key=where, value=name)
    return folder / name


def _require_kind(name: str, value: Any) -> None:
    """Raise unless the value of an option is of its kind."""
    expected = {
        "size": (_is_size, f"(height, width) in pixels, at most {MAX_PIXELS:,} of them"),
        "x": (_is_names, "a column or a list of columns"),
        "y": (_is_name, "a column"),
        "text": (_is_names, "a column or a list of columns"),
        "label": (_is_name, "a column"),
        "classes": (
            lambda given: _is_names(given) and not isinstance(given, str) and 2 <= len(set(given)) == len(given),
            "a list of two or more different labels",
        ),
        "ids": (_is_name, "a column"),
        "tokenizer": (
            lambda given: callable(given) or (isinstance(given, str | Path) and str(given) != ""),
            '"words", the folder or the name of a model, or a function from a list of str to a tensor or a dict of '
            "tensors",
        ),
        "splits": (_is_names, "the name of a split, or two names"),
        "merge_validation": (lambda given: isinstance(given, bool), "True or False"),
        "test_writers": (lambda given: isinstance(given, bool), "True or False"),
    }
    if name == "test":
        require_number(name, value, above=0, below=1, error=DataError)
    elif name == "max_length":
        require_whole(name, value, low=1, high=LONGEST, error=DataError)
    elif name == "max_gb":
        require_number(name, value, above=0, error=DataError)
    elif name == "first_label":
        require_whole(name, value, low=-(2**31), high=2**31, error=DataError)
    elif not expected[name][0](value):
        raise DataError(f"{name} must be {expected[name][1]}, not {value!r}", key=name, value=value)


def _is_size(size: Any) -> bool:
    return (
        isinstance(size, tuple | list)
        and len(size) == 2
        and all(isinstance(s, int | np.integer) and not isinstance(s, bool) and s > 0 for s in size)
        and int(size[0]) * int(size[1]) <= MAX_PIXELS
    )


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_names(value: Any) -> bool:
    several = isinstance(value, tuple | list) and len(value) > 0 and all(isinstance(one, str) for one in value)
    return isinstance(value, str) or several
