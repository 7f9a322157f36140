"""What the readers of data sets share: their options, what they hand over, and errors of one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkeep import tree
from fedkeep._util.optional import require_extra
from fedkeep._util.text import did_you_mean
from fedkeep.data.seeds import split_rng
from fedkeep.errors import DataError


class Missing(DataError):  # noqa: N818 (it is what happened, not a mistake of the caller)
    """A file or a folder that should be there is not."""


@dataclass(frozen=True)
class Options:
    """How to read a source; which options apply depends on what it is."""

    size: tuple[int, int] | None = None  # (height, width) all images are brought to; of flat pixels, their layout
    x: str | Sequence[str] | None = None  # the column, or columns, of the examples
    y: str | None = None  # the column of the classes; of CIFAR-100, "fine_label" or "coarse_label"
    ids: str | None = None  # the column that says whose an example is
    tokenizer: Callable[[list[str]], Any] | None = None  # texts to a tensor or a dict of tensors
    splits: Sequence[str] | None = None  # which splits of a Hugging Face data set train and test
    test: float | None = None  # the share to test with, where the source has no test part
    first_label: int | None = None  # what the source calls class 0
    merge_validation: bool | None = None  # train on the validation part too
    test_writers: bool | None = None  # FEMNIST: test on whole writers instead of a share of each

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Options:
        """Take options by name; an unknown one is refused with the nearest that there is."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in names:
                raise DataError(f"load has no option {name!r}: {did_you_mean(name, names)}")
        size, test = given.get("size"), given.get("test")
        if size is not None and not _is_size(size):
            raise DataError(f"size must be (height, width) in pixels, not {size!r}")
        if test is not None and (isinstance(test, bool) or not isinstance(test, int | float) or not 0 < test < 1):
            raise DataError(f"test must be a share between 0 and 1, not {test!r}")
        first = given.get("first_label")
        if first is not None and (isinstance(first, bool) or not isinstance(first, int)):
            raise DataError(f"first_label must be a whole number, not {first!r}")
        return cls(**{**given, "size": None if size is None else (int(size[0]), int(size[1]))})

    def only(self, what: str, *allowed: str) -> None:
        """Refuse options that mean nothing for what is being read."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) not in (None, False) and field.name not in allowed:
                takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
                raise DataError(f"the option {field.name} does not apply to {what}: {takes}")

    def no_share(self, name: str) -> None:
        """Refuse to split a test part off where there is one."""
        if self.test is not None or self.test_writers:
            raise DataError(f"{name} has a test part: test and test_writers are for data without one")


@dataclass(frozen=True)
class Part:
    """Training or test examples as read: `x` and `y` like those of a data set, and whose they are."""

    x: Any
    y: np.ndarray
    ids: np.ndarray | None = None

    def take(self, index: np.ndarray) -> Part:
        """Keep some of the examples."""
        return Part(tree.take(self.x, index), self.y[index], None if self.ids is None else self.ids[index])


@dataclass(frozen=True)
class Raw:
    """What a reader hands over. `n_classes` only where the source says so itself; no `test` where it has none."""

    train: Part
    test: Part | None
    name: str
    n_classes: Any = None
    mean: Any = None
    std: Any = None

    @property
    def classes(self) -> list[np.ndarray]:
        """The classes of each part."""
        return [np.asarray(part.y) for part in (self.train, self.test) if part is not None]

    @property
    def numbered(self) -> bool:
        """Whether all parts have examples, and whole numbers for classes."""
        return all(len(y) and y.dtype.kind in "iu" for y in self.classes)

    def map(self, change: Callable[[Part], Part]) -> Raw:
        """Change every part."""
        return dataclasses.replace(self, train=change(self.train), test=self.test and change(self.test))


def hold_out(raw: Raw, share: float) -> Raw:
    """Split a test part off the training examples: a share of each class, always the same examples."""
    y, rng = raw.train.y, split_rng(0, "test")
    by_class = [rng.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]
    test = np.sort(np.concatenate([members[: round(len(members) * share)] for members in by_class] or [y[:0]]))
    train = np.setdiff1d(np.arange(len(y)), test)
    return dataclasses.replace(raw, train=raw.train.take(train), test=raw.train.take(test))


def require_package(module: str, feature: str) -> Any:
    """Import a module of the extra `data`; if it is missing, raise an error with the install command."""
    return require_extra(module, "data", feature, DataError)


def _is_size(size: Any) -> bool:
    return (
        isinstance(size, tuple | list)
        and len(size) == 2
        and all(isinstance(s, int | np.integer) and not isinstance(s, bool) and s > 0 for s in size)
    )
