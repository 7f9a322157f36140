"""Generated data of the size and shape of a named data set: random pixels or words, from which nothing is learned.

With it, a run shows the time and memory that it needs before the data set has been downloaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkeep._util.text import did_you_mean
from fedkeep._util.validate import require_whole
from fedkeep.data.sources import femnist, named, text_columns, text_sets
from fedkeep.data.sources.common import Options, Part, Raw
from fedkeep.errors import DataError

PREFIX = "generated:"


@dataclass(frozen=True)
class Form:
    """The numbers of a data set: the shape of an image, examples, and owners with the spread of their sizes.

    Texts have `words` words in the mean instead of an image.
    """

    image: tuple[int, ...]
    train: int
    test: int = 0  # 0: the reader splits the test set off
    validation: int = 0  # that `merge_validation` adds to the training set
    owners: int = 0
    spread: float = 0.0  # standard deviation of an owner's number of examples
    options: tuple[str, ...] = ()
    words: int = 0


FORMS = {
    "mnist": Form((1, 28, 28), 60_000, 10_000),
    "cifar10": Form((3, 32, 32), 50_000, 10_000),
    "cifar100": Form((3, 32, 32), 50_000, 10_000),
    "cinic10": Form((3, 32, 32), 90_000, 90_000, validation=90_000, options=("merge_validation",)),
    "tiny_imagenet": Form((3, 64, 64), 100_000, 10_000),
    # Caldas et al., LEAF, table 1
    "femnist": Form((1, 28, 28), 805_263, owners=3_550, spread=88.94, options=("test", "test_writers")),
    "sst5": Form((), 8_544, 2_210, options=text_sets.OPTIONS, words=19),
    "ag_news": Form((), 120_000, 7_600, options=text_sets.OPTIONS, words=38),
}


def read(text: str, options: Options) -> Raw:
    """Return generated data: `text` is the name of a data set and, after a colon, a smaller number of examples."""
    written, colon, number = text.partition(":")
    name = named.canonical_name(written)
    if name not in FORMS:
        raise DataError(
            f"there is no generated data set {written!r}: {did_you_mean(written, FORMS)}",
            key="source",
            value=f"{PREFIX}{text}",
            valid=list(FORMS),
        )
    form, known = FORMS[name], named.NAMED[name]
    options.reject_except(f"{PREFIX}{name}", *form.options)
    all_examples = form.train + (form.validation if options.merge_validation else 0)
    n_train = _number(number, known.n_classes, all_examples) if colon else all_examples
    n_test = max(known.n_classes, form.test * n_train // all_examples) if form.test else 0
    options.require_memory((n_train + n_test) * (math.prod(form.image) + 8 * form.words), f"{PREFIX}{name}")
    rng = np.random.default_rng(0)
    n_owners = max(1, form.owners * n_train // all_examples) if form.owners else 0
    train = _part(rng, form, options, n_train, known.n_classes, n_owners)
    test = _part(rng, form, options, n_test, known.n_classes) if form.test else None
    raw = Raw(train, test, f"{PREFIX}{text}", known.n_classes, known.mean, known.std, known.class_names)
    return raw if test is not None else femnist.with_test(raw, options)


def _number(text: str, low: int, high: int) -> int:
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text
    return require_whole("source", value, low=low, high=high, error=DataError, label="the number of examples")


def _part(rng: np.random.Generator, form: Form, options: Options, n: int, n_classes: int, n_owners: int = 0) -> Part:
    """Return n random images or texts, classes of equal size and, with owners, the owner of each example."""
    x = _texts(rng, form, options, n) if form.words else _images(rng, form, n)
    y = rng.permutation(np.arange(n) % n_classes)
    return Part(x, y, _owners(rng, n, n_owners, form.spread) if n_owners else None)


def _images(rng: np.random.Generator, form: Form, n: int) -> np.ndarray:
    n_bytes = n * math.prod(form.image)
    words = rng.integers(0, 2**64, -(-n_bytes // 8), dtype=np.uint64)  # several times as fast as rng.bytes
    return words.view(np.uint8)[:n_bytes].reshape(n, *form.image)


def _texts(rng: np.random.Generator, form: Form, options: Options, n: int) -> Any:
    """Return n texts of numbers, whose lengths have a Poisson distribution."""
    lengths = np.maximum(rng.poisson(form.words, n), 1)
    numbers = rng.integers(0, 5000, int(lengths.sum()))
    texts = [" ".join(map(str, part)) for part in np.split(numbers, np.cumsum(lengths)[:-1])]
    return text_columns.tokenise(PREFIX, "text", texts, options)


def _owners(rng: np.random.Generator, n: int, n_owners: int, spread: float) -> np.ndarray:
    """Return the owner of each of n examples; sizes are normally distributed, and an owner has at least one."""
    sizes = np.maximum(rng.normal(n / n_owners, spread, n_owners), 1)
    bounds = np.round(np.cumsum(sizes) * (n / sizes.sum())).astype(np.int64)
    return np.searchsorted(bounds, np.arange(n), side="right")
