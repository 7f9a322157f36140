"""A data set: training examples that go to clients, test examples, and what the server holds for itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.data.seeds import split_rng
from fedkeep.errors import DataError
from fedkeep.task import Public


@dataclass(frozen=True)
class Dataset:
    """Examples `x` (a tensor, or a dict of tensors) and classes `y` from 0 on; images stay bytes until used."""

    x_train: Any
    y_train: Tensor
    x_test: Any
    y_test: Tensor
    n_classes: int
    mean: Tensor | None = None  # per channel, of values in [0, 1], broadcast against one example
    std: Tensor | None = None
    public: Public | None = None
    name: str = "arrays"
    ids: np.ndarray | None = None  # [n] whose each training example is: a writer, a hospital
    test_ids: np.ndarray | None = None  # [m] whose each test example is, where that is known

    @property
    def image(self) -> tuple[int, int] | None:
        """Height and width, where the examples are images [channels, height, width]."""
        shape = self.input_shape
        return (shape[1], shape[2]) if len(shape) == 3 else None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example; () for dicts."""
        return () if isinstance(self.x_train, dict) else tuple(self.x_train.shape[1:])

    def drop_small_owners(self, at_least: int) -> Dataset:
        """Leave out owners who have fewer examples than that, training and test taken together (50 in Flashback)."""
        if isinstance(at_least, bool) or not isinstance(at_least, int | np.integer) or at_least < 1:
            raise DataError(f"min_per_id must be a whole number of at least 1, not {at_least!r}")
        ids = self._owners("min_per_id")
        everyone = ids if self.test_ids is None else np.concatenate([ids, self.test_ids])
        owners, sizes = np.unique(everyone, return_counts=True)
        few = owners[sizes < at_least]
        if np.isin(ids, few).all():
            raise DataError(f"min_per_id = {at_least}: nobody has that many examples")
        return self._without(few)

    def with_public(
        self, public: float | int, validation: float = 0.25, seed: int = 0, *, by_id: bool = False
    ) -> Dataset:
        """Move examples from training to the server, before any split.

        A share (0 < public < 1) is drawn at random; a whole number is a count per class, or `by_id` the number of
        owners (writers, hospitals) all of whose examples move, those of the test too. Of what is drawn the share
        `validation` (of each class, where it is a count per class) is held back to validate with, the rest is to train
        on or to look at; at least one example (of each class) is.
        """
        if self.public is not None:
            raise DataError("this data set has a public part already")
        if not 0 <= validation < 1:
            raise DataError(f"validation must be a share in [0, 1), not {validation}")
        if by_id:
            return self._with_public_owners(public, validation, split_rng(seed, "public"))
        rng, y, n = split_rng(seed, "public"), self.y_train.numpy(), len(self.y_train)
        whole = isinstance(public, int | np.integer) and not isinstance(public, bool) and public >= 1
        if whole:
            drawn = np.stack([_per_class(rng, y, c, int(public)) for c in range(self.n_classes)])
            held = min(math.ceil(validation * public - 1e-9), int(public) - 1)
            val, train = drawn[:, :held].reshape(-1), drawn[:, held:].reshape(-1)
        elif isinstance(public, float) and 0 < public < 1:
            val, train = _split_validation(rng.permutation(n)[: max(1, round(public * n))], validation)
        else:
            raise DataError(f"public must be a share between 0 and 1 or a count per class from 1 on, not {public!r}")
        if len(val) + len(train) >= n:
            raise DataError(f"public = {public} takes all {n} training examples: none are left for clients")
        val, train = np.sort(val), np.sort(train)
        kept = np.setdiff1d(np.arange(n), np.concatenate([val, train]))
        return replace(self._train_on(kept), public=_public(self.x_train, self.y_train, train, val))

    def _with_public_owners(self, number: float | int, validation: float, rng: np.random.Generator) -> Dataset:
        owners = np.unique(self._owners("public_ids"))
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
            raise DataError(f"public_ids must be a whole number of at least 1, not {number!r}")
        if number >= len(owners):
            raise DataError(f"public_ids = {number}, but there are {len(owners)}: none would be left as clients")
        theirs = rng.permutation(owners)[: int(number)]
        x, y = self._examples_of(theirs)
        val, train = _split_validation(rng.permutation(len(y)), validation)
        return replace(self._without(theirs), public=_public(x, y, np.sort(train), np.sort(val)))

    def _examples_of(self, owners: np.ndarray) -> tuple[Any, Tensor]:
        """Return all examples of some owners, of training and test."""
        at = torch.from_numpy(np.flatnonzero(np.isin(self._owners("public_ids"), owners)))
        x, y = tree.take(self.x_train, at), self.y_train[at]
        if self.test_ids is None:
            return x, y
        tested = torch.from_numpy(np.flatnonzero(np.isin(self.test_ids, owners)))
        return tree.cat([x, tree.take(self.x_test, tested)]), torch.cat([y, self.y_test[tested]])

    def _without(self, owners: np.ndarray) -> Dataset:
        """Leave out the examples of some owners; of the test too, where it says whose they are."""
        kept = self._train_on(np.flatnonzero(~np.isin(self._owners("ids"), owners)))
        if self.test_ids is None:
            return kept
        at = np.flatnonzero(~np.isin(self.test_ids, owners))
        if not len(at):
            raise DataError(f"{self.name}: no test example is of an owner that is left")
        x = tree.take(self.x_test, torch.from_numpy(at))
        return replace(kept, x_test=x, y_test=self.y_test[at], test_ids=self.test_ids[at])

    def _owners(self, option: str) -> np.ndarray:
        if self.ids is None:
            raise DataError(f"{option}: the data set {self.name} does not say whose its examples are")
        return self.ids

    def _train_on(self, kept: np.ndarray) -> Dataset:
        return replace(
            self,
            x_train=tree.take(self.x_train, torch.from_numpy(kept)),
            y_train=self.y_train[kept],
            ids=None if self.ids is None else self.ids[kept],
        )


def from_arrays(
    x_train: Any,
    y_train: Any,
    x_test: Any,
    y_test: Any,
    *,
    n_classes: int | None = None,
    mean: Any = None,
    std: Any = None,
    ids: Any = None,
    test_ids: Any = None,
    name: str = "arrays",
) -> Dataset:
    """Make a data set of numpy arrays or tensors, checked: lengths, labels, finite numbers.

    `x` is one array, or a dict of arrays for models that take one. Images are [n, channels, height, width].
    `ids` says whose each training example is, for `partition.by_id`, `test_ids` whose each test example is.
    """
    xs = {"train": _inputs(x_train, "x_train"), "test": _inputs(x_test, "x_test")}
    ys = {"train": _labels(y_train, "y_train"), "test": _labels(y_test, "y_test")}
    for part in ("train", "test"):
        if not len(ys[part]):
            raise DataError(f"y_{part} is empty: there is nothing to {'train on' if part == 'train' else 'test with'}")
        for path, leaf in tree.items(xs[part]):
            if len(leaf) != len(ys[part]):
                raise DataError(
                    f"x_{part}{path and f'[{path!r}]'} has {len(leaf)} examples, y_{part} has {len(ys[part])}"
                )
    shapes = {part: [(path, tuple(leaf.shape[1:])) for path, leaf in tree.items(xs[part])] for part in xs}
    if shapes["train"] != shapes["test"]:
        raise DataError(f"training and test examples differ in shape: {shapes['train']} against {shapes['test']}")
    seen = int(max(ys["train"].max(), ys["test"].max())) + 1
    if n_classes is None:
        n_classes = seen
    elif isinstance(n_classes, bool) or not isinstance(n_classes, int | np.integer) or n_classes < 2:
        raise DataError(f"n_classes must be a whole number of at least 2, not {n_classes!r}")
    if seen > n_classes:
        raise DataError(f"there is a label {seen - 1}, but n_classes = {n_classes} allows 0 to {n_classes - 1}")
    if n_classes < 2:
        raise DataError("all labels are 0: at least two classes are needed")
    if (mean is None) != (std is None):
        raise DataError(f"{'mean' if std is None else 'std'} is given alone: normalising needs mean and std")
    mean, std = (_channel(value, what, xs["train"]) for value, what in ((mean, "mean"), (std, "std")))
    if std is not None and not bool((std > 0).all()):
        raise DataError(f"std must be above 0, not {std.flatten().tolist()}")
    owners, tested = (None if given is None else np.asarray(given).reshape(-1) for given in (ids, test_ids))
    for what, given, part in (("ids", owners, "train"), ("test_ids", tested, "test")):
        if given is not None and len(given) != len(ys[part]):
            raise DataError(f"{what} has {len(given)} entries, y_{part} has {len(ys[part])}")
    made = Dataset(xs["train"], ys["train"], xs["test"], ys["test"], int(n_classes), mean, std, name=name)
    return replace(made, ids=owners, test_ids=tested)


def _inputs(x: Any, what: str) -> Any:
    if isinstance(x, dict):
        if not x:
            raise DataError(f"{what} is an empty dict")
        return {key: _inputs(value, f"{what}[{key!r}]") for key, value in x.items()}
    value = x if isinstance(x, Tensor) else _tensor(x, what)
    if not value.ndim:
        raise DataError(f"{what} is a single number, not an array of examples")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        bad = int((~torch.isfinite(value)).nonzero()[0, 0])
        raise DataError(f"{what} holds numbers that are not finite, first in example {bad}")
    return value.detach().cpu()


def _tensor(x: Any, what: str) -> Tensor:
    try:
        array = np.asarray(x)
    except ValueError as error:  # lists of unequal length
        raise DataError(f"{what} is not an array: {error}") from error
    if array.dtype.kind not in "buif" or array.dtype.itemsize > 8:
        raise DataError(f"{what} must hold numbers, not {array.dtype}")
    native = array.dtype.newbyteorder("=")
    return torch.from_numpy(np.require(array, dtype=native, requirements=["C", "W"]))


def _labels(y: Any, what: str) -> Tensor:
    value = y.detach().cpu() if isinstance(y, Tensor) else _tensor(y, what)
    value = value.reshape(-1)
    if value.is_floating_point() or value.dtype == torch.bool:
        raise DataError(f"{what} must hold whole numbers from 0 on, one class each, not {value.dtype}")
    value = value.long()
    if len(value) and int(value.min()) < 0:
        raise DataError(f"{what} holds the label {int(value.min())}; classes count from 0")
    return value


def _channel(value: Any, what: str, x: Any) -> Tensor | None:
    """Give a mean or a std the shape that broadcasts against one example; one number per channel for images."""
    if value is None:
        return None
    if isinstance(x, dict):
        raise DataError(f"{what} is for examples that are one array, not a dict")
    shape = x.shape[1:]
    given: Tensor = _inputs(np.atleast_1d(value), what).double()
    fitted = given.reshape(-1, 1, 1) if given.ndim == 1 and len(shape) == 3 else given
    try:
        fitted.expand(shape)
    except RuntimeError:
        raise DataError(f"{what} of shape {tuple(given.shape)} does not fit examples of {tuple(shape)}") from None
    return fitted


def _split_validation(chosen: np.ndarray, validation: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide shuffled examples into a share to validate with and the rest, at least one."""
    held = min(round(validation * len(chosen)), len(chosen) - 1)
    return chosen[:held], chosen[held:]


def _public(x: Any, y: Tensor, train: np.ndarray, val: np.ndarray) -> Public:
    one, other = torch.from_numpy(train), torch.from_numpy(val)
    return Public(tree.take(x, one), y[one], tree.take(x, other), y[other])


def _per_class(rng: np.random.Generator, y: np.ndarray, c: int, count: int) -> np.ndarray:
    members = np.flatnonzero(y == c)
    if len(members) < count:
        raise DataError(f"public = {count} a class, but class {c} has {len(members)} training examples")
    return rng.choice(members, count, replace=False)
