"""Data sets by name: where their files are expected, as distributed, and the command that gets them."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeep.data.sources import arrays, cifar, femnist, idx, images
from fedkeep.data.sources.common import Missing, Options, Part, Raw
from fedkeep.errors import DataError


@dataclass(frozen=True)
class Named:
    """One data set: its reader, its classes, its usual normalisation, and how to get it into the folder {0}."""

    read: Callable[[Path, Options], Raw]
    n_classes: int
    get: str
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    inside: str = "."  # the folder that unpacking makes


def tiny_imagenet(path: Path, options: Options) -> Raw:
    """Read train/<class>/images/ to train on, and val/images/, whose classes are in a table, to test with."""
    options.only("tiny_imagenet", "size")
    if not (path / "train").is_dir():
        raise Missing(f"there is no folder {path / 'train'}")
    folders = images.subfolders(path / "train")
    listings = [images.files(each / "images") if (each / "images").is_dir() else [] for each in folders]
    for each, listing in zip(folders, listings, strict=True):
        if not listing:
            raise Missing(f"{each / 'images'} holds no images")
    classes = {each.name: c for c, each in enumerate(folders)}
    paths, labels = _annotations(path / "val", classes)
    x = images.from_paths([p for listing in listings for p in listing], options.size, (3,))
    y = np.repeat(np.arange(len(folders)), [len(listing) for listing in listings])
    return Raw(Part(x, y), Part(images.from_paths(paths, options.size, x.shape[1:]), labels), path.name, len(folders))


def _annotations(folder: Path, classes: dict[str, int]) -> tuple[list[Path], np.ndarray]:
    """Read which file of val/images is of which class: file, class and a box on each line."""
    table = folder / "val_annotations.txt"
    if not table.is_file():
        raise Missing(f"there is no file {table}")
    paths, labels = [], []
    for number, line in enumerate(table.read_text(errors="replace").splitlines(), 1):
        file, _, rest = line.partition("\t")
        name = rest.partition("\t")[0]
        if name not in classes:
            raise DataError(f"{table}, line {number}: {name!r} is no class that training has")
        paths.append(folder / "images" / file)
        labels.append(classes[name])
    return paths, np.array(labels, np.int64)


def _cinic(path: Path, options: Options) -> Raw:
    for part in ("train", "valid", "test"):
        if not (path / part).is_dir():
            raise Missing(f"there is no folder {path / part}")
    options.only("cinic10", "merge_validation", "size")
    return images.folder(path, options, colour=True)


_TORONTO = "https://www.cs.toronto.edu/~kriz"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"

NAMED = {
    "mnist": Named(
        idx.folder,
        10,
        "mkdir -p {0} && for f in train-images-idx3 train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do "
        f"curl -fL {_MNIST}/$f-ubyte.gz -o {{0}}/$f-ubyte.gz; done",
        (0.1307,),
        (0.3081,),
    ),
    "cifar10": Named(
        lambda path, options: cifar.folder(path, options, cifar.TEN),
        10,
        f"mkdir -p {{0}} && curl -fL {_TORONTO}/cifar-10-binary.tar.gz | tar xz -C {{0}}",
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        cifar.TEN.inside,
    ),
    "cifar100": Named(
        lambda path, options: cifar.folder(path, options, cifar.HUNDRED),
        100,
        f"mkdir -p {{0}} && curl -fL {_TORONTO}/cifar-100-binary.tar.gz | tar xz -C {{0}}",
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
        cifar.HUNDRED.inside,
    ),
    "cinic10": Named(
        _cinic,
        10,
        "mkdir -p {0} && curl -fL https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz | "
        "tar xz -C {0}",
        (0.47889522, 0.47227842, 0.43047404),
        (0.24205776, 0.23828046, 0.25874835),
    ),
    "tiny_imagenet": Named(
        tiny_imagenet,
        200,
        "mkdir -p {0} && curl -fL http://cs231n.stanford.edu/tiny-imagenet-200.zip -o {0}/tiny-imagenet-200.zip && "
        "unzip -q {0}/tiny-imagenet-200.zip -d {0}",
        (0.4802, 0.4481, 0.3975),
        (0.2770, 0.2691, 0.2821),
        "tiny-imagenet-200",
    ),
    "femnist": Named(
        femnist.folder,
        femnist.N_CLASSES,
        "hf download flwrlabs/femnist --repo-type dataset --local-dir {0}",
    ),
}
NAMES = ("digits", *NAMED)


def canonical(name: str) -> str | None:
    """Give the name a data set is registered under: case, dashes and underscores are forgiven.

    >>> canonical("CIFAR-10"), canonical("TinyImageNet"), canonical("imagenet")
    ('cifar10', 'tiny_imagenet', None)
    """

    def bare(text: str) -> str:
        return re.sub(r"[-_ ]", "", text.lower())

    return next((known for known in NAMES if bare(known) == bare(name)), None)


def data_root(root: str | Path | None) -> Path:
    """Give the folder of the named data sets: `root`, else $FEDKEEP_DATA, else ~/.cache/fedkeep."""
    return Path(root or os.environ.get("FEDKEEP_DATA") or "~/.cache/fedkeep").expanduser()


def missing(source: object, root: str | Path | None = None) -> str | None:
    """Say where a registered data set belongs and what gets it, if its folder is not there, or empty."""
    name = canonical(source) if isinstance(source, str) else None
    home = data_root(root) / (name or "")
    if name not in NAMED or (home.is_dir() and any(home.iterdir())):
        return None
    there = "is empty" if home.is_dir() else "is not there"
    return f"{name} is expected in {home}, which {there}; {_gets(name, home)}"


def _gets(name: str, home: Path) -> str:
    return f"this gets it: {NAMED[name].get.format(shlex.quote(str(home)))}"


def load(name: str, root: str | Path | None, options: Options) -> Raw:
    """Read a registered data set from its folder; when files are missing, say where they belong and what gets them."""
    if name == "digits":
        return arrays.digits(options)
    if absent := missing(name, root):
        raise Missing(absent)
    known, home = NAMED[name], data_root(root) / name
    try:
        raw = known.read(home / known.inside if (home / known.inside).is_dir() else home, options)
    except Missing as error:
        raise Missing(f"{name} is incomplete: {error}; {_gets(name, home)}") from error
    if raw.n_classes not in (None, known.n_classes) and options.y != "coarse_label":
        raise DataError(f"{name} has {known.n_classes} classes, but {home} holds {raw.n_classes}")
    return dataclasses.replace(
        raw, name=name, n_classes=raw.n_classes or known.n_classes, mean=known.mean, std=known.std
    )
