"""Images: decoding to bytes [n, channels, height, width], and folders with one folder of images per class."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep._util.text import list_some, one_line
from fedkeep.data.sources.common import Missing, Options, Part, Raw, require_package
from fedkeep.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm")
_GREY = ("1", "L", "LA")
_VALIDATION = ("val", "valid", "validation")


def decode(
    files: Iterable[tuple[str, Any]], n: int, size: tuple[int, int] | None, like: tuple[int, ...] | None = None
) -> np.ndarray:
    """Decode n images, each given as its name for messages and a path or an open file, one after the other.

    Grey images stay one channel while all of them are grey; one coloured image gives all of them three. `like` is the
    shape of the images they must go with.
    """
    image = require_package("PIL.Image", "reading images")
    shape = like or (1,)
    out = np.empty((n, *shape), np.uint8)
    for i, (name, file) in enumerate(files):
        pixels = _pixels(image, name, file, size, shape[0] == 3)
        shape = shape if len(shape) == 3 else (max(shape[0], len(pixels)), *pixels.shape[1:])
        if pixels.shape[1:] != shape[1:]:
            raise DataError(
                f"{name} is {_by(pixels.shape[1:])} (height x width), the images before it {_by(shape[1:])}: give "
                "size=(height, width) to bring all to one size"
            )
        if out.shape[1:] != shape:
            out = np.empty((n, *shape), np.uint8)
        if len(pixels) > shape[0]:
            shape = pixels.shape
            out = np.repeat(out, 3, axis=1)
        out[i] = pixels
    return out


def _pixels(image: Any, name: str, file: Any, size: tuple[int, int] | None, colour: bool) -> np.ndarray:
    """Decode one image, [channels, height, width]."""
    try:
        with image.open(file) as opened:
            if opened.mode.startswith(("I", "F")):
                raise DataError(f"{name} has pixels of more than 8 bits: convert it to 8 bits a channel")
            decoded = opened.convert("L" if opened.mode in _GREY and not colour else "RGB")
            if size is not None and decoded.size != size[::-1]:
                decoded = decoded.resize(size[::-1], image.Resampling.BILINEAR)
            pixels = np.asarray(decoded)
    except DataError:
        raise
    except FileNotFoundError as error:
        raise Missing(f"there is no file {name}") from error
    except Exception as error:  # a damaged image fails in the decoder of its format, each in its own way
        raise DataError(f"{name} cannot be read as an image, it may be damaged: {one_line(error)}") from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def same_channels(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give both parts three channels where one of them has colours."""
    channels = max(train.shape[1], test.shape[1])
    train, test = (np.repeat(x, channels, axis=1) if x.shape[1] < channels else x for x in (train, test))
    return train, test


def from_paths(paths: list[Path], size: tuple[int, int] | None, like: tuple[int, ...] | None = None) -> np.ndarray:
    """Decode files."""
    return decode(((str(path), path) for path in paths), len(paths), size, like)


def files(folder: Path) -> list[Path]:
    """List the images of a folder by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def has_parts(path: Path) -> bool:
    """Say whether a folder has a folder to train on."""
    return (path / "train").is_dir()


def has_classes(path: Path) -> bool:
    """Say whether a folder holds folders of images."""
    return any(files(each) for each in subfolders(path))


def subfolders(path: Path) -> list[Path]:
    """List the folders of a folder by name."""
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def folder(path: Path, options: Options, colour: bool = False) -> Raw:
    """Read train/<class>/ and test/<class>/ (or val/<class>/); classes are numbered in the order of their names."""
    options.only("a folder of images", "size", "merge_validation", "test")
    train, test, validation = _layout(path)
    names = [each.name for each in subfolders(train)]
    roots = [train]
    if options.merge_validation:
        if validation is None:
            raise Missing(f"{path} has no validation folder to merge (val, valid or validation)")
        roots.append(validation)
    elif test is None:
        test = validation
    if test is not None:
        options.no_share(path.name)
    listings = [_list(root, names, whole=root is train) for root in roots]
    paths, y = [p for listing, _ in listings for p in listing], np.concatenate([labels for _, labels in listings])
    x = from_paths(paths, options.size, (3,) if colour else None)
    if test is None:
        return Raw(Part(x, y), None, path.name, len(names))
    paths, y_test = _list(test, names, whole=False)
    x, x_test = same_channels(x, from_paths(paths, options.size, x.shape[1:]))
    return Raw(Part(x, y), Part(x_test, y_test), path.name, len(names))


def _layout(path: Path) -> tuple[Path, Path | None, Path | None]:
    """Find the folders to train on, to test with and to validate with."""
    if not has_parts(path):
        return path, None, None
    validation = next((path / name for name in _VALIDATION if (path / name).is_dir()), None)
    return path / "train", path / "test" if (path / "test").is_dir() else None, validation


def _list(root: Path, names: list[str], whole: bool) -> tuple[list[Path], np.ndarray]:
    """List the images under a folder of class folders, and their classes; `whole`: every class must have some."""
    paths: list[Path] = []
    labels: list[int] = []
    for each in subfolders(root):
        if each.name not in names:
            raise DataError(f"{each} is a class that training does not have (it has {list_some(names)})")
        found = files(each)
        if whole and not found:
            raise DataError(f"{each} is a class without images ({', '.join(s[1:] for s in SUFFIXES)})")
        paths += found
        labels += [names.index(each.name)] * len(found)
    if not paths:
        raise DataError(f"{root} holds no images: expected are {root}/<class>/*.png or jpg")
    return paths, np.array(labels, np.int64)


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
