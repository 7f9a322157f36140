"""Images: decoding to bytes [n, channels, height, width], and folders with one subfolder per class."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep._util.text import list_some, one_line
from fedkeep.data.sources.common import MAX_PIXELS, Missing, Options, Part, Raw, require_package
from fedkeep.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm")
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM")  # no others are tried, whatever a file contains
_GREY = ("1", "L", "LA")
_VALIDATION = ("val", "valid", "validation")


def decode(
    files: Iterable[tuple[str, Any]], n: int, options: Options, like: tuple[int, ...] | None = None
) -> np.ndarray:
    """Return n decoded images. Each file is a pair: a name for messages, and a path or an open file.

    If all images are grey, they have one channel; otherwise all have three. `like` is the shape that the images must
    have, except that grey images may become coloured.
    """
    image = require_package("PIL.Image", "reading images")
    with warnings.catch_warnings():
        warnings.simplefilter("error", image.DecompressionBombWarning)
        return _decode(image, files, n, options, like)


def _decode(
    image: Any, files: Iterable[tuple[str, Any]], n: int, options: Options, like: tuple[int, ...] | None
) -> np.ndarray:
    shape = like or (1,)
    out = np.empty((n, *shape), np.uint8)
    for i, (name, file) in enumerate(files):
        pixels = _pixels(image, name, file, options.size, shape[0] == 3)
        shape = shape if len(shape) == 3 else (max(shape[0], len(pixels)), *pixels.shape[1:])
        if pixels.shape[1:] != shape[1:]:
            raise DataError(
                f"{name} is {_format_shape(pixels.shape[1:])} (height x width), but the images before it are "
                f"{_format_shape(shape[1:])}: resize all with size=(height, width)",
                key="size",
                value=pixels.shape[1:],
            )
        if out.shape[1:] != shape:
            options.require_memory(n * math.prod(shape), f"{name} and {n - 1} images like it")
            out = np.empty((n, *shape), np.uint8)
        if len(pixels) > shape[0]:
            options.require_memory(n * math.prod(pixels.shape), f"{name} and {n - 1} images like it")
            shape = pixels.shape
            out = np.repeat(out, 3, axis=1)
        out[i] = pixels
    return out


def _pixels(image: Any, name: str, file: Any, size: tuple[int, int] | None, colour: bool) -> np.ndarray:
    """Return one decoded image, [channels, height, width]."""
    try:
        if isinstance(file, Path) and file.exists() and not file.is_file():
            raise DataError(f"{name} is not a file", key=name)
        with image.open(file, formats=_FORMATS) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise _too_large(name)
            if opened.mode.startswith(("I", "F")):
                raise DataError(
                    f"{name} has more than 8 bits per channel: convert it to 8 bits", key=name, value=opened.mode
                )
            return to_pixels(opened, size, colour)
    except DataError:
        raise
    except FileNotFoundError as error:
        raise Missing(f"there is no file {name}", key=name) from error
    except (image.DecompressionBombWarning, image.DecompressionBombError) as error:
        raise _too_large(name) from error
    except image.UnidentifiedImageError as error:
        raise DataError(
            f"{name} is not an image of a known format, or is damaged (valid: {', '.join(_FORMATS)})",
            key=name,
            valid=_FORMATS,
        ) from error
    except Exception as error:  # a damaged image fails in the decoder of its format
        raise DataError(f"{name} cannot be read as an image, it may be damaged: {one_line(error)}", key=name) from error


def to_pixels(opened: Any, size: tuple[int, int] | None, colour: bool = False) -> np.ndarray:
    """Return an image of PIL as bytes [channels, height, width]: grey ones have one channel, unless with `colour`."""
    decoded = opened.convert("L" if opened.mode in _GREY and not colour else "RGB")
    if size is not None and decoded.size != size[::-1]:
        image = require_package("PIL.Image", "reading images")
        decoded = decoded.resize(size[::-1], image.Resampling.BILINEAR)
    pixels = np.asarray(decoded)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _too_large(name: str) -> DataError:
    return DataError(f"{name} has more than {MAX_PIXELS:,} pixels: make it smaller", key=name, valid=[MAX_PIXELS])


def same_channels(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both parts with the same number of channels: three if one of them has colours."""
    channels = max(train.shape[1], test.shape[1])
    train, test = (np.repeat(x, channels, axis=1) if x.shape[1] < channels else x for x in (train, test))
    return train, test


def from_paths(paths: list[Path], options: Options, like: tuple[int, ...] | None = None) -> np.ndarray:
    """Return decoded image files."""
    return decode(((str(path), path) for path in paths), len(paths), options, like)


def list_images(folder: Path) -> list[Path]:
    """Return the image files of a folder, sorted by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def has_train_folder(path: Path) -> bool:
    """Return whether a folder has a subfolder named train."""
    return (path / "train").is_dir()


def has_class_folders(path: Path) -> bool:
    """Return whether a folder has subfolders with images."""
    return any(list_images(folder) for folder in subfolders(path))


def subfolders(path: Path) -> list[Path]:
    """Return the subfolders of a folder, sorted by name."""
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def read_folder(path: Path, options: Options, colour: bool = False) -> Raw:
    """Read train/<class>/ and test/<class>/ (or val/<class>/); classes are numbered in the order of their names."""
    options.reject_except("a folder of images", "size", "merge_validation", "test")
    train, test, validation = _part_folders(path)
    names = [folder.name for folder in subfolders(train)]
    roots = [train]
    if options.merge_validation:
        if validation is None:
            raise Missing(
                f"merge_validation needs a validation folder, which {path} does not have (valid: "
                f"{', '.join(_VALIDATION)})",
                key="merge_validation",
                value=True,
                valid=_VALIDATION,
            )
        roots.append(validation)
    elif test is None:
        test = validation
    if test is not None:
        options.reject_test_share(path.name)
    listings = [_list_classes(root, names, require_all=root is train) for root in roots]
    paths, y = [p for listing, _ in listings for p in listing], np.concatenate([labels for _, labels in listings])
    x = from_paths(paths, options, (3,) if colour else None)
    if test is None:
        return Raw(Part(x, y), None, path.name, len(names), class_names=names)
    paths, y_test = _list_classes(test, names, require_all=False)
    x, x_test = same_channels(x, from_paths(paths, options, x.shape[1:]))
    return Raw(Part(x, y), Part(x_test, y_test), path.name, len(names), class_names=names)


def _part_folders(path: Path) -> tuple[Path, Path | None, Path | None]:
    """Return the folders of the training, test and validation sets."""
    if not has_train_folder(path):
        return path, None, None
    validation = next((path / name for name in _VALIDATION if (path / name).is_dir()), None)
    return path / "train", path / "test" if (path / "test").is_dir() else None, validation


def _list_classes(root: Path, names: list[str], require_all: bool) -> tuple[list[Path], np.ndarray]:
    """Return the images in the class folders of a folder, and their classes.

    With `require_all`, a class without images raises an error.
    """
    paths: list[Path] = []
    labels: list[int] = []
    for folder in subfolders(root):
        if folder.name not in names:
            raise DataError(
                f"{folder} is a class that the training data does not have (it has {list_some(names)})",
                key=str(folder),
                value=folder.name,
                valid=names,
            )
        images = list_images(folder)
        if require_all and not images:
            raise DataError(f"{folder} contains no images ({', '.join(SUFFIXES)})", key=str(folder), valid=SUFFIXES)
        paths += images
        labels += [names.index(folder.name)] * len(images)
    if not paths:
        raise DataError(
            f"{root} contains no images: expected {root}/<class>/*.png, or another of {', '.join(SUFFIXES)}",
            key=str(root),
            valid=SUFFIXES,
        )
    return paths, np.array(labels, np.int64)


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
