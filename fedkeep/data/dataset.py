"""Data sets: training examples for the clients, test examples, and the server's public set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.text_form import TextForm
from fedkeep._util.validate import require_number, require_whole
from fedkeep.data.convert import (
    cat_inputs,
    is_one_of,
    require_lengths,
    require_n_classes,
    to_class_names,
    to_ids,
    to_inputs,
    to_normalisation,
)
from fedkeep.data.display import dataset_html, describe_dataset
from fedkeep.data.labels import number_labels
from fedkeep.data.normalise import STANDARD, feature_sums, mean_and_std
from fedkeep.data.public_options import check_public_options, is_number_per_class
from fedkeep.data.seeds import share_of_each_class, split_rng
from fedkeep.data.texts import Texts
from fedkeep.errors import DataError
from fedkeep.task import Public

# of options that are numbers, so that an experiment can be checked before its data is loaded
BOUNDS: dict[str, dict[str, Any]] = {
    "held_out": {"above": 0, "below": 1},
    "public_alpha": {"low": 1e-6, "high": 1e30},
    "validation": {"low": 0, "below": 1},
}


@dataclass(frozen=True, repr=False)
class Dataset:
    """Examples `x` (a tensor, a dict of tensors, or texts) and labels `y` (0, 1, ...) for training and testing.

    Images are stored as bytes and converted when a batch is used. An owner is the writer, hospital or device that an
    example comes from.
    """

    x_train: Any
    y_train: Tensor
    x_test: Any
    y_test: Tensor
    n_classes: int
    mean: Tensor | None = None  # per channel, of values in [0, 1]; broadcasts against one example
    std: Tensor | None = None
    public: Public | None = None
    name: str = "arrays"
    ids: np.ndarray | None = None  # [n] the owner of each training example
    test_ids: np.ndarray | None = None  # [m] the owner of each test example, where known
    class_names: tuple[str, ...] | None = None  # of class 0, 1, ..., where known
    feature_names: tuple[str, ...] | None = None  # of the columns of a table
    normalise: str | None = None  # "standard": mean and std are those of the training examples

    def __repr__(self) -> str:
        return f"<Dataset {describe_dataset(self)}>"

    def _repr_html_(self) -> str:
        return dataset_html(self)

    @property
    def image(self) -> tuple[int, int] | None:
        """Height and width, if the examples are images [channels, height, width]."""
        shape = self.input_shape
        return (shape[1], shape[2]) if isinstance(shape, tuple) and len(shape) == 3 else None

    @property
    def input_shape(self) -> tuple[int, ...] | TextForm:
        """The shape of one example; () for dicts, and the form of texts."""
        if isinstance(self.x_train, Texts):
            return self.x_train.form
        return () if isinstance(self.x_train, dict) else tuple(self.x_train.shape[1:])

    def with_held_out_test(self, share: float) -> Dataset:
        """Return the data set with a fraction of each class's training examples in place of the test set.

        They are always the same examples, so that hyperparameters can be chosen on them and not on the test set.
        """
        require_number("held_out", share, **BOUNDS["held_out"], error=DataError)
        held_out, rest = share_of_each_class(self.y_train.numpy(), share)
        if not len(held_out) or not len(rest):
            raise DataError(
                f"held_out = {share}: of {len(self.y_train)} training examples, {len(held_out)} would be held out",
                key="held_out",
                value=share,
            )
        test = self._train_on(held_out)
        return replace(self._train_on(rest), x_test=test.x_train, y_test=test.y_train, test_ids=test.ids)

    def standardised(self) -> Dataset:
        """Return the data set with the mean and the standard deviation of its training examples as mean and std.

        There is one of each per feature; for images, per channel. A feature that is constant becomes 0.
        """
        standard = mean_and_std([feature_sums(self.x_train)])
        public = self.public
        if public is not None:
            public = replace(public, x=_to_float(public.x), x_val=_to_float(public.x_val))
        data = replace(self, x_train=_to_float(self.x_train), x_test=_to_float(self.x_test), public=public)
        mean, std = to_normalisation(*standard, data.x_train)
        return replace(data, mean=mean, std=std, normalise=STANDARD)

    def drop_small_owners(self, at_least: int) -> Dataset:
        """Return the data set without owners that have fewer than `at_least` examples (50 in Flashback).

        Training and test examples are counted together.
        """
        require_whole("min_per_id", at_least, low=1, error=DataError)
        ids = self._require_ids("min_per_id")
        all_ids = ids if self.test_ids is None else np.concatenate([ids, self.test_ids])
        owners, sizes = np.unique(all_ids, return_counts=True)
        small = owners[sizes < at_least]
        if is_one_of(ids, small).all():
            raise DataError(
                f"min_per_id = {at_least}: no owner in the training data has that many examples (the most is "
                f"{sizes.max()})",
                key="min_per_id",
                value=at_least,
            )
        return self._without_owners(small)

    def with_public(
        self,
        public: float | int,
        validation: float = 0.25,
        seed: int = 0,
        *,
        by_id: bool = False,
        alpha: float | None = None,
    ) -> Dataset:
        """Return the data set with some training examples moved to the server's public set.

        `public` is a fraction of the training examples (0 < public < 1), or a whole number of examples per class. With
        `by_id` it is a number of owners: all their examples move, those of the test set too. With `alpha`, the classes
        of a fraction are unbalanced: their proportions are drawn from Dirichlet(alpha).

        The fraction `validation` of the public set is held out for validation (of each class, if `public` is a number
        per class). At least one example (per class) remains for training.
        """
        if self.public is not None:
            raise DataError("this data set already has a public set", key="public", value=public)
        require_number("validation", validation, **BOUNDS["validation"], error=DataError)
        if alpha is not None:
            require_number("public_alpha", alpha, **BOUNDS["public_alpha"], error=DataError)
        check_public_options({"public_ids" if by_id else "public": public, "public_alpha": alpha})
        rng = split_rng(seed, "public")
        if by_id:
            return self._with_public_owners(public, validation, rng)
        y, n = self.y_train.numpy(), len(self.y_train)
        if is_number_per_class(public):
            drawn = np.stack([_draw_of_class(rng, y, c, int(public)) for c in range(self.n_classes)])
            n_val = min(math.ceil(validation * public - 1e-9), int(public) - 1)
            val, train = drawn[:, :n_val].reshape(-1), drawn[:, n_val:].reshape(-1)
        else:
            number = max(1, round(public * n))
            drawn = rng.permutation(n)[:number] if alpha is None else _draw_unbalanced(rng, y, number, alpha)
            val, train = _split_validation(drawn, validation)
        if len(val) + len(train) >= n:
            raise DataError(
                f"public = {public} takes all {n} training examples: none are left for clients",
                key="public",
                value=public,
            )
        val, train = np.sort(val), np.sort(train)
        rest = np.setdiff1d(np.arange(n), np.concatenate([val, train]))
        return replace(self._train_on(rest), public=_make_public(self.x_train, self.y_train, train, val))

    def only_public(self) -> Dataset:
        """Return the data set with the training part of the public set as its only training examples.

        One client with these examples is a model trained on the public set alone, a baseline for methods that use it.
        """
        if self.public is None:
            raise DataError("public_only needs a public set: public=0.1, or public_ids", key="public_only", value=True)
        return replace(self, x_train=self.public.x, y_train=self.public.y, ids=None)

    def _with_public_owners(self, number: float | int, validation: float, rng: np.random.Generator) -> Dataset:
        owners = np.unique(self._require_ids("public_ids"))
        number = require_whole("public_ids", number, low=1, error=DataError)
        if number >= len(owners):
            raise DataError(
                f"public_ids = {number}, but the data set has {len(owners)} owners: none would be left as clients",
                key="public_ids",
                value=number,
            )
        chosen = rng.permutation(owners)[:number]
        x, y = self._examples_of(chosen)
        val, train = _split_validation(rng.permutation(len(y)), validation)
        return replace(self._without_owners(chosen), public=_make_public(x, y, np.sort(train), np.sort(val)))

    def _examples_of(self, owners: np.ndarray) -> tuple[Any, Tensor]:
        """Return all training and test examples of some owners."""
        index = torch.from_numpy(np.flatnonzero(is_one_of(self._require_ids("public_ids"), owners)))
        x, y = tree.take(self.x_train, index), self.y_train[index]
        if self.test_ids is None:
            return x, y
        test_index = torch.from_numpy(np.flatnonzero(is_one_of(self.test_ids, owners)))
        return cat_inputs([x, tree.take(self.x_test, test_index)]), torch.cat([y, self.y_test[test_index]])

    def _without_owners(self, owners: np.ndarray) -> Dataset:
        """Return the data set without some owners' training examples, and test examples where owners are known."""
        data = self._train_on(np.flatnonzero(~is_one_of(self._require_ids("ids"), owners)))
        if self.test_ids is None:
            return data
        index = np.flatnonzero(~is_one_of(self.test_ids, owners))
        if not len(index):
            raise DataError(
                f"{self.name}: no test example belongs to an owner that is left", key="test_ids", value=self.name
            )
        x = tree.take(self.x_test, torch.from_numpy(index))
        return replace(data, x_test=x, y_test=self.y_test[index], test_ids=self.test_ids[index])

    def _require_ids(self, option: str) -> np.ndarray:
        if self.ids is None:
            raise DataError(
                f"{option} needs the owner of each example, which the data set {self.name} does not have (see the "
                "option ids)",
                key=option,
                value=self.name,
            )
        return self.ids

    def _train_on(self, index: np.ndarray) -> Dataset:
        return replace(
            self,
            x_train=tree.take(self.x_train, torch.from_numpy(index)),
            y_train=self.y_train[index],
            ids=None if self.ids is None else self.ids[index],
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
    class_names: Sequence[str] | None = None,
    name: str = "arrays",
) -> Dataset:
    """Return a data set made of numpy arrays or tensors.

    `x` is one array, or a dict of arrays for models that take a dict. Images are [n, channels, height, width]. `ids`
    names the owner of each training example, for `partition.by_id`; `test_ids` the owner of each test example.
    Labels are whole numbers from 0, texts or booleans. Texts are numbered in sorted order, or in that of `class_names`,
    which are shown instead of class 0, 1, ...

    Lengths, shapes and labels are checked; numbers must be finite.
    """
    xs = {"train": to_inputs(x_train, "x_train"), "test": to_inputs(x_test, "x_test")}
    y_train, y_test, class_names = number_labels(y_train, y_test, class_names)
    ys = {"train": y_train, "test": y_test}
    for part in ("train", "test"):
        require_lengths(xs[part], ys[part], part)
    shapes = {part: [(path, tuple(leaf.shape[1:])) for path, leaf in tree.items(xs[part])] for part in xs}
    if shapes["train"] != shapes["test"]:
        raise DataError(
            f"x_test must have the shape of x_train, {shapes['train']}, not {shapes['test']}",
            key="x_test",
            value=shapes["test"],
        )
    names = to_class_names(class_names, n_classes)
    n_classes = require_n_classes(len(names) if names else n_classes, int(max(ys["train"].max(), ys["test"].max())))
    mean, std = to_normalisation(mean, std, xs["train"])
    owners, test_owners = to_ids("ids", ids, ys["train"]), to_ids("test_ids", test_ids, ys["test"])
    data = Dataset(xs["train"], ys["train"], xs["test"], ys["test"], n_classes, mean, std, name=name)
    return replace(data, ids=owners, test_ids=test_owners, class_names=names)


def _to_float(x: Tensor) -> Tensor:
    """Return whole numbers as floats; bytes are scaled and converted when a batch is used."""
    return x if x.is_floating_point() or x.dtype == torch.uint8 else x.float()


def _split_validation(index: np.ndarray, validation: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `validation` fraction of shuffled examples, and the rest: at least one."""
    n_val = min(round(validation * len(index)), len(index) - 1)
    return index[:n_val], index[n_val:]


def _make_public(x: Any, y: Tensor, train: np.ndarray, val: np.ndarray) -> Public:
    train_index, val_index = torch.from_numpy(train), torch.from_numpy(val)
    return Public(tree.take(x, train_index), y[train_index], tree.take(x, val_index), y[val_index])


def _draw_of_class(rng: np.random.Generator, y: np.ndarray, c: int, number: int) -> np.ndarray:
    members = np.flatnonzero(y == c)
    if len(members) < number:
        raise DataError(
            f"public = {number} per class, but class {c} has {len(members)} training examples",
            key="public",
            value=number,
        )
    return rng.choice(members, number, replace=False)


def _draw_unbalanced(rng: np.random.Generator, y: np.ndarray, number: int, alpha: float) -> np.ndarray:
    """Draw some examples, in random order; the proportions of their classes are drawn from Dirichlet(alpha).

    A class that has too few examples for its proportion gives all it has, and the others fill up.
    """
    classes, inverse, sizes = np.unique(y, return_inverse=True, return_counts=True)
    weight = np.maximum(rng.dirichlet(np.full(len(classes), alpha)), 1e-300)[inverse] / sizes[inverse]
    # the smallest of exponential random numbers divided by weights are a draw with these weights, without replacement
    return rng.permutation(np.argsort(np.log(rng.exponential(size=len(y))) - np.log(weight))[:number])
