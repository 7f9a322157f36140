"""Data sets by name: the folder of their files, and the command that downloads them."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeep.data.sources import arrays, cifar, femnist, idx, images, text_sets, wards
from fedkeep.data.sources.common import Missing, Options, Part, Raw, path_inside, to_path
from fedkeep.errors import DataError


@dataclass(frozen=True)
class Named:
    """A data set with a name: its reader, its number of classes and its usual normalisation."""

    read: Callable[[Path, Options], Raw]
    n_classes: int
    download: str  # the shell command that downloads it into the folder {0}
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    subfolder: str = "."  # the folder that unpacking creates
    class_names: tuple[str, ...] | None = None


def read_tiny_imagenet(path: Path, options: Options) -> Raw:
    """Read train/<class>/images/ as training set and val/images/, whose classes are in a text file, as test set."""
    options.reject_except("tiny_imagenet", "size")
    if not (path / "train").is_dir():
        raise Missing(f"there is no folder {path / 'train'}", key=str(path / "train"))
    folders = images.subfolders(path / "train")
    listings = [images.list_images(f / "images") if (f / "images").is_dir() else [] for f in folders]
    for folder, listing in zip(folders, listings, strict=True):
        if not listing:
            raise Missing(f"{folder / 'images'} contains no images", key=str(folder / "images"))
    classes = {folder.name: c for c, folder in enumerate(folders)}
    paths, labels = _read_annotations(path / "val", classes)
    x = images.from_paths([p for listing in listings for p in listing], options, (3,))
    y = np.repeat(np.arange(len(folders)), [len(listing) for listing in listings])
    test = Part(images.from_paths(paths, options, x.shape[1:]), labels)
    return Raw(Part(x, y), test, path.name, len(folders), class_names=_read_words(path / "words.txt", list(classes)))


def _read_words(path: Path, ids: list[str]) -> list[str]:
    """Return a word for each WordNet id, from lines of an id and its words; the ids, if words are not different."""
    if not path.is_file():
        return ids
    lines = (line.partition("\t") for line in path.read_text(errors="replace").splitlines())
    words = {wnid: text.partition(",")[0].strip() for wnid, _, text in lines}
    names = [words.get(wnid) or wnid for wnid in ids]
    return names if len(set(names)) == len(names) else ids


def _read_annotations(folder: Path, classes: dict[str, int]) -> tuple[list[Path], np.ndarray]:
    """Return the files of val/images and their classes. Each line has a file, a class and a bounding box."""
    table = folder / "val_annotations.txt"
    if not table.is_file():
        raise Missing(f"there is no file {table}", key=str(table))
    paths, labels = [], []
    for number, line in enumerate(table.read_text(errors="replace").splitlines(), 1):
        file, _, rest = line.partition("\t")
        name = rest.partition("\t")[0]
        if name not in classes:
            raise DataError(
                f"{table}, line {number}: {name!r} is not a class of the training data", key=str(table), value=name
            )
        paths.append(path_inside(folder / "images", file, f"{table}, line {number}"))
        labels.append(classes[name])
    return paths, np.array(labels, np.int64)


def _read_cinic10(path: Path, options: Options) -> Raw:
    for part in ("train", "valid", "test"):
        if not (path / part).is_dir():
            raise Missing(f"there is no folder {path / part}", key=str(path / part))
    options.reject_except("cinic10", "merge_validation", "size")
    return images.read_folder(path, options, colour=True)


_TORONTO = "https://www.cs.toronto.edu/~kriz"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"

NAMED = {
    "mnist": Named(
        idx.read_folder,
        10,
        "mkdir -p {0} && for f in train-images-idx3 train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do "
        f"curl -fL {_MNIST}/$f-ubyte.gz -o {{0}}/$f-ubyte.gz; done",
        (0.1307,),
        (0.3081,),
    ),
    "cifar10": Named(
        lambda path, options: cifar.read_folder(path, options, cifar.TEN),
        10,
        f"mkdir -p {{0}} && curl -fL {_TORONTO}/cifar-10-binary.tar.gz | tar xz -C {{0}}",
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        cifar.TEN.subfolder,
        cifar.TEN_CLASSES,
    ),
    "cifar100": Named(
        lambda path, options: cifar.read_folder(path, options, cifar.HUNDRED),
        100,
        f"mkdir -p {{0}} && curl -fL {_TORONTO}/cifar-100-binary.tar.gz | tar xz -C {{0}}",
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
        cifar.HUNDRED.subfolder,
    ),
    "cinic10": Named(
        _read_cinic10,
        10,
        "mkdir -p {0} && curl -fL https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz | "
        "tar xz -C {0}",
        (0.47889522, 0.47227842, 0.43047404),
        (0.24205776, 0.23828046, 0.25874835),
    ),
    "tiny_imagenet": Named(
        read_tiny_imagenet,
        200,
        "mkdir -p {0} && curl -fL http://cs231n.stanford.edu/tiny-imagenet-200.zip -o {0}/tiny-imagenet-200.zip && "
        "unzip -q {0}/tiny-imagenet-200.zip -d {0}",
        (0.4802, 0.4481, 0.3975),
        (0.2770, 0.2691, 0.2821),
        "tiny-imagenet-200",
    ),
    "femnist": Named(
        femnist.read_folder,
        len(femnist.CLASS_NAMES),
        "hf download flwrlabs/femnist --repo-type dataset --local-dir {0}",
        class_names=femnist.CLASS_NAMES,
    ),
    "sst5": Named(
        text_sets.read_sst5,
        5,
        "hf download SetFit/sst5 --repo-type dataset --local-dir {0}",
        class_names=text_sets.SST5_CLASSES,
    ),
    "ag_news": Named(
        text_sets.read_ag_news,
        4,
        "hf download fancyzhx/ag_news --repo-type dataset --local-dir {0}",
        class_names=text_sets.AG_NEWS_CLASSES,
    ),
}
READY = {"digits": arrays.read_digits, "squares": arrays.read_squares, "wards": wards.read_wards}  # without files
NAMES = (*READY, *NAMED)


def canonical_name(name: str) -> str | None:
    """Return the registered name of a data set, or None; case, dashes and underscores do not matter.

    >>> canonical_name("CIFAR-10"), canonical_name("TinyImageNet"), canonical_name("imagenet")
    ('cifar10', 'tiny_imagenet', None)
    """

    def simplify(text: str) -> str:
        return re.sub(r"[-_ ]", "", text.lower())

    return next((known for known in NAMES if simplify(known) == simplify(name)), None)


def data_root(root: str | Path | None) -> Path:
    """Return the folder of the named data sets: `root`, else $FEDKEEP_DATA, else ~/.cache/fedkeep."""
    if root is None:
        return to_path(os.environ.get("FEDKEEP_DATA") or "~/.cache/fedkeep", "FEDKEEP_DATA")
    return to_path(root, "root")


def how_to_get(source: object, root: str | Path | None = None) -> str | None:
    """Return where a named data set is expected and the command that downloads it; None unless it is missing."""
    name = canonical_name(source) if isinstance(source, str) else None
    folder = data_root(root) / (name or "")
    if name not in NAMED or (folder.is_dir() and any(folder.iterdir())):
        return None
    state = "is empty" if folder.is_dir() else "does not exist"
    return f"{name} is expected in {folder}, which {state}; {_download_hint(name, folder)}"


def read(name: str, root: str | Path | None, options: Options) -> Raw:
    """Read a named data set from its folder. If files are missing, the error has the command that downloads them."""
    if name in READY:
        return READY[name](options)
    folder = data_root(root) / name
    if hint := how_to_get(name, root):
        raise Missing(hint, key=str(folder))
    known = NAMED[name]
    try:
        raw = known.read(folder / known.subfolder if (folder / known.subfolder).is_dir() else folder, options)
    except Missing as error:
        raise error.converted(
            Missing,
            f"{name} is incomplete: {error}; {_download_hint(name, folder)}",
        ) from error
    if raw.n_classes not in (None, known.n_classes) and options.y != "coarse_label":
        raise DataError(
            f"{name} has {known.n_classes} classes, but {folder} has {raw.n_classes}",
            key=str(folder),
            value=raw.n_classes,
            valid=[known.n_classes],
        )
    n_classes = raw.n_classes or known.n_classes
    names = known.class_names if n_classes == known.n_classes else None
    return dataclasses.replace(
        raw, name=name, n_classes=n_classes, mean=known.mean, std=known.std, class_names=names or raw.class_names
    )


def _download_hint(name: str, folder: Path) -> str:
    return f"download it with: {NAMED[name].download.format(shlex.quote(str(folder)))}"
