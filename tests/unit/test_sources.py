"""Sources of data sets: every format is read from files written here, and every error names its cause."""

from __future__ import annotations

import builtins
import dataclasses
import gzip
import importlib.util
import io
import json
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.errors import ANY, raises

from fedkeep.data import from_arrays, load, partition
from fedkeep.data.sources import choice, named
from fedkeep.data.sources.common import Options
from fedkeep.errors import DataError

pa = pytest.importorskip("pyarrow", reason="needs the extra data")
Image = pytest.importorskip("PIL.Image", reason="needs the extra data")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra data")

RNG = np.random.default_rng(0)


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def rejects(
    source: Any, key: Any, value: Any = ANY, valid: Iterable[Any] = (), mentions: Iterable[str] = (), **options: Any
) -> str:
    """Expect that loading raises an error with this key and value; return its message."""
    key = str(key) if isinstance(key, Path) else key
    with raises(DataError, key, value, valid, mentions) as caught:
        load(source, **options)
    return str(caught.value)


def equal(tensor: torch.Tensor, array: np.ndarray) -> bool:
    return tensor.dtype == torch.uint8 and np.array_equal(tensor.numpy(), array)


# arguments


def test_the_class_of_a_point_is_its_quadrant() -> None:
    data = load("squares")
    assert (len(data.y_train) + len(data.y_test), data.n_classes) == (1000, 4)
    assert float(data.x_train.abs().max()) < 4
    right, upper = (data.x_train > 0).unbind(1)
    assert data.y_train.tolist() == (right.long() + 2 * upper.long()).tolist()


@pytest.mark.parametrize("name", ["digits", "Digits", "DIGITS"])
def test_the_case_of_a_name_does_not_matter(name) -> None:
    assert load(name).name == "digits"


@pytest.mark.parametrize("name", ["CIFAR-10", "cifar_10", "cifar10"])
def test_dashes_and_underscores_of_a_name_do_not_matter(name, tmp_path: Path) -> None:
    rejects(name, tmp_path / "cifar10", root=tmp_path)


def test_invalid_sources_raise(tmp_path: Path) -> None:
    rejects("mnits", "source", "mnits", valid=named.NAMES, mentions=["mnist?"])
    rejects("some/where", "some/where")
    rejects(tmp_path / "none", tmp_path / "none")
    rejects(Path("digits"), "digits")
    rejects(tmp_path / "none.parquet", tmp_path / "none.parquet")
    rejects(np.zeros(3), "source", "ndarray", mentions=["from_arrays"])
    rejects(("a.csv",), "source", ["a.csv"])
    rejects(("a.csv", "b.csv", "c.csv"), "source", ["a.csv", "b.csv", "c.csv"])
    rejects({"train": "a.csv", "tset": "b.csv"}, "source", ["train", "tset"], valid=["train", "test"])
    rejects((np.zeros(3), np.zeros(3)), "source", mentions=["from_arrays"])
    rejects(([], "b.csv"), "source", [])
    rejects(tmp_path, tmp_path, mentions=["IDX", "CIFAR", "<class>", "train*.parquet"])
    (tmp_path / "batch.bin").touch()
    rejects(tmp_path / "batch.bin", tmp_path / "batch.bin", ".bin", valid=[".npz", ".parquet", ".csv"])
    rejects(tmp_path / "a.pkl", tmp_path / "a.pkl", ".pkl", valid=[".npz"])


def test_unknown_and_inapplicable_options_raise() -> None:
    rejects("digits", "sise", (8, 8), valid=["size"], mentions=["size?"], sise=(8, 8))
    rejects("digits", "size", (8, 8), mentions=["digits"], size=(8, 8))
    assert load("digits", size=None, merge_validation=False).image == (8, 8)


@pytest.mark.parametrize(
    ("option", "value"), [("size", 8), ("size", (0, 8)), ("test", 1.0), ("test", True), ("first_label", "a")]
)
def test_invalid_values_of_options_raise(option, value) -> None:
    rejects("digits", option, value, **{option: value})


def test_a_number_of_classes_that_is_not_that_of_the_data_raises(tmp_path: Path) -> None:
    assert load("digits", n_classes=10).n_classes == 10
    rejects("digits", "n_classes", 9, valid=[10], mentions=["digits"], n_classes=9)
    write_idx(tmp_path, *quick_images())
    assert load(tmp_path, n_classes=3).n_classes == 3
    for wrong in (2, 7):
        rejects(tmp_path, "n_classes", wrong, valid=[3], n_classes=wrong)


def test_ids_stay_with_their_examples() -> None:
    ids = [f"w{i // 4}" for i in range(12)]
    data = from_arrays(np.arange(12)[:, None], np.arange(12) % 3, np.zeros((3, 1), int), range(3), ids=ids)
    split = data.with_public(1)
    assert len(split.ids) == 9
    assert all(f"w{int(x) // 4}" == owner for x, owner in zip(split.x_train, split.ids, strict=True))
    assert [len(k) for k in partition.by_id(data.ids)] == [4, 4, 4]
    with raises(DataError, "ids", 3, mentions=["12"]):
        from_arrays(np.zeros((12, 1)), np.arange(12) % 3, np.zeros((3, 1)), range(3), ids=ids[:3])


# IDX


def quick_images() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return pixels(6, 4, 5), np.arange(6) % 3, pixels(3, 4, 5), np.arange(3)


def idx_bytes(array: np.ndarray, code: int = 0x08) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.tobytes()


def write_idx(
    folder: Path,
    x: np.ndarray,
    y: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
    packed: bool = False,
    prefix: str = "",
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    for name, array in zip(names, (x, y, x_test, y_test), strict=True):
        data = idx_bytes(array.astype(np.uint8))
        path = folder / f"{prefix}{name}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(data, 1) if packed else data)


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read_compressed_or_not(tmp_path: Path, packed) -> None:
    arrays = quick_images()
    write_idx(tmp_path / "set", *arrays, packed=packed)
    data = load(tmp_path / "set")
    assert equal(data.x_train, arrays[0][:, None])
    assert equal(data.x_test, arrays[2][:, None])
    assert (data.y_train.tolist(), data.y_test.tolist()) == (arrays[1].tolist(), arrays[3].tolist())
    assert (data.name, data.n_classes, data.image, data.mean) == ("set", 3, (4, 5), None)


def test_the_content_of_an_idx_file_not_its_name_decides_whether_it_is_decompressed(tmp_path: Path) -> None:
    arrays = quick_images()
    write_idx(tmp_path, *arrays)
    path = tmp_path / "train-images-idx3-ubyte"
    path.with_name(path.name + ".gz").write_bytes(b"left over")
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert equal(load(tmp_path).x_train, arrays[0][:, None])


@pytest.mark.parametrize(("code", "dtype"), [(0x09, "i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")])
def test_idx_numbers_of_every_type_are_read(tmp_path: Path, code, dtype) -> None:
    write_idx(tmp_path, *quick_images())
    x = np.arange(120).astype(dtype).reshape(6, 4, 5)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx_bytes(x, code))
    assert np.array_equal(load(tmp_path).x_train.numpy(), x[:, None])


def test_idx_labels_from_1_need_first_label(tmp_path: Path) -> None:
    x, y, x_test, y_test = quick_images()
    write_idx(tmp_path, x, y + 1, x_test, y_test + 1, prefix="emnist-letters-")
    rejects(tmp_path, "first_label", None, valid=[1], mentions=["first_label=1"])
    data = load(tmp_path, first_label=1)
    assert (data.n_classes, data.y_train.tolist()) == (3, y.tolist())
    assert load(tmp_path, n_classes=4).n_classes == 4


@pytest.mark.parametrize(
    ("change", "value", "mentions"),
    [
        (lambda data: data[:-3], 117, ["6x4x5", "120"]),
        (lambda data: data + b"\0", 121, ["6x4x5", "120"]),
        (lambda data: b"", None, []),
        (lambda data: data[:9], None, []),
        (lambda data: b"\0\0\x07" + data[3:], None, []),
        (lambda data: b"PK" + data[2:], None, []),
        (lambda data: gzip.compress(data)[:-12], None, []),
        (lambda data: gzip.compress(data)[:9] + b"\xff" * 30, None, []),
        (lambda data: idx_bytes(pixels(6)), 1, []),  # axes
        (lambda data: idx_bytes(pixels(5, 4, 5)), 5, ["train-labels-idx1-ubyte", "6"]),
    ],
)
def test_damaged_idx_files_raise(
    tmp_path: Path, change: Callable[[bytes], bytes], value: Any, mentions: list[str]
) -> None:
    write_idx(tmp_path, *quick_images())
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    rejects(tmp_path, path, value, mentions=[str(path), *mentions])


def test_idx_images_of_different_shapes_raise(tmp_path: Path) -> None:
    x, y, x_test, y_test = quick_images()
    write_idx(tmp_path, x, y, x_test[:, :, :4], y_test)
    rejects(tmp_path, "x_test", [("", (1, 4, 4))], mentions=["(1, 4, 5)"])


def test_idx_folders_that_are_not_one_complete_set_raise(tmp_path: Path) -> None:
    write_idx(tmp_path, *quick_images())
    (tmp_path / "t10k-labels-idx1-ubyte").rename(tmp_path / "other")
    rejects(tmp_path, tmp_path, valid=["t10k-labels-idx1-ubyte", "t10k-labels-idx1-ubyte.gz"], mentions=["t10k-images"])
    (tmp_path / "other").rename(tmp_path / "test-labels-idx1-ubyte")
    load(tmp_path)
    (tmp_path / "test-labels-idx1-ubyte").write_bytes(idx_bytes(pixels(3, 1)))
    rejects(tmp_path, tmp_path / "test-labels-idx1-ubyte", 2)
    write_idx(tmp_path, *quick_images(), prefix="more-")
    rejects(tmp_path, tmp_path, ["more-train-images-idx3-ubyte", "train-images-idx3-ubyte"])


def test_empty_idx_files_raise(tmp_path: Path) -> None:
    x, y, x_test, y_test = quick_images()
    write_idx(tmp_path, x[:0], y[:0], x_test, y_test)
    rejects(tmp_path, "y_train", 0)


# CIFAR


def write_cifar10(folder: Path, x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    batches = [*zip(np.array_split(x, 5), np.array_split(y, 5), strict=True), (x_test, y_test)]
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for name, (images, labels) in zip(names, batches, strict=True):
        records = np.concatenate([labels[:, None].astype(np.uint8), images.reshape(len(images), -1)], 1)
        (folder / name).write_bytes(records.tobytes())


def write_cifar100(folder: Path, x: np.ndarray, coarse: np.ndarray, fine: np.ndarray, x_test: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, images in (("train.bin", x), ("test.bin", x_test)):
        n = len(images)
        labels = np.stack([coarse[:n], fine[:n]], 1).astype(np.uint8)
        (folder / name).write_bytes(np.concatenate([labels, images.reshape(n, -1)], 1).tobytes())


def cifar_arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return pixels(12, 3, 32, 32), np.arange(12) % 10, pixels(4, 3, 32, 32), np.array([9, 0, 3, 3])


@pytest.mark.parametrize("inside", ["cifar10/cifar-10-batches-bin", "cifar10"])
def test_cifar10_is_read_by_name_and_by_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside) -> None:
    arrays = cifar_arrays()
    write_cifar10(tmp_path / inside, *arrays)
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path))
    for data in (load("cifar10"), load(tmp_path / "cifar10"), load(tmp_path / inside)):
        assert equal(data.x_train, arrays[0])
        assert equal(data.x_test, arrays[2])
        assert (data.y_train.tolist(), data.y_test.tolist()) == (arrays[1].tolist(), arrays[3].tolist())
        assert data.n_classes == 10
    assert load("cifar10").mean.flatten().tolist() == [0.4914, 0.4822, 0.4465]
    assert load("cifar10").std.flatten().tolist() == [0.2470, 0.2435, 0.2616]
    assert load("cifar10", mean=0.5, std=[0.1, 0.2, 0.3]).std.flatten().tolist() == [0.1, 0.2, 0.3]
    assert load(tmp_path / "cifar10").mean is None
    assert len(load("cifar10", public=0.25).public.y) == 2


def test_cifar100_has_fine_and_coarse_labels(tmp_path: Path) -> None:
    x, fine, coarse = pixels(5, 3, 32, 32), np.array([99, 3, 50, 7, 0]), np.array([19, 0, 4, 7, 1])
    write_cifar100(tmp_path / "cifar100" / "cifar-100-binary", x, coarse, fine, x[:2])
    data = load("cifar-100", root=tmp_path)
    assert equal(data.x_train, x)
    assert (data.n_classes, data.y_train.tolist(), data.y_test.tolist()) == (100, fine.tolist(), [99, 3])
    data = load("cifar100", root=str(tmp_path), y="coarse_label")
    assert (data.n_classes, data.y_train.tolist()) == (20, coarse.tolist())
    assert data.mean.flatten().tolist() == [0.5071, 0.4865, 0.4409]
    rejects("cifar100", "y", "label", valid=["coarse_label", "fine_label"], root=tmp_path, y="label")


def test_damaged_cifar_files_raise(tmp_path: Path) -> None:
    arrays = cifar_arrays()
    write_cifar10(tmp_path, *arrays)
    path = tmp_path / "data_batch_2.bin"
    whole = path.read_bytes()
    for content in (whole[:-1], b"", whole[:100]):
        path.write_bytes(content)
        rejects(tmp_path, path, len(content), mentions=[str(path), "3073"])
    path.write_bytes(whole[:3073] + b"\x0b" + whole[3074:])
    rejects(tmp_path, path, 11, mentions=[str(path), "record 1", "0 to 9"])
    path.unlink()
    rejects(tmp_path, tmp_path, valid=["data_batch_2.bin"], mentions=["data_batch_2.bin"])


def test_pickled_cifar_raises_and_runs_no_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    folder = tmp_path / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    (folder / "data_batch_1").write_bytes(pickle.dumps(Trap()))
    for source in (folder, folder.parent, "cifar10"):
        rejects(source, ANY, valid=["cifar-10-binary.tar.gz"], mentions=["cifar-10-binary.tar.gz"], root=tmp_path)
    (tmp_path / "cifar-100-python").mkdir()
    rejects(tmp_path / "cifar-100-python", tmp_path / "cifar-100-python", valid=["cifar-100-binary.tar.gz"])
    assert not (tmp_path / "sprung").exists()


# folders of images


def save(path: Path, image: np.ndarray) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return image


def image_folder(
    root: Path,
    shape: tuple[int, ...] = (4, 5, 3),
    suffix: str = "png",
    parts: Iterable[str] = ("train", "test"),
    classes: Iterable[str] = ("cat", "ant"),
) -> dict[str, np.ndarray]:
    """Write two images of each class in each part, and return them in the order in which they must be read."""
    made = {}
    for part in parts:
        for name in sorted(classes):
            for i in (2, 1):
                made[part, name, i] = save(root / part / name / f"{i}.{suffix}", pixels(*shape))
    return {part: np.stack([made[key] for key in sorted(made) if key[0] == part]) for part in parts}


def test_colour_images_by_class_folder(tmp_path: Path) -> None:
    made = image_folder(tmp_path)
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".cache").mkdir()
    data = load(tmp_path)
    assert equal(data.x_train, made["train"].transpose(0, 3, 1, 2))
    assert equal(data.x_test, made["test"].transpose(0, 3, 1, 2))
    assert (data.y_train.tolist(), data.n_classes, data.image) == ([0, 0, 1, 1], 2, (4, 5))  # ant before cat


def test_grey_images_have_one_channel_unless_one_has_colours(tmp_path: Path) -> None:
    made = image_folder(tmp_path, (4, 4))
    assert equal(load(tmp_path).x_train, made["train"][:, None])
    coloured = save(tmp_path / "test" / "cat" / "2.png", pixels(4, 4, 3))
    data = load(tmp_path)
    assert equal(data.x_train, np.repeat(made["train"][:, None], 3, 1))
    assert equal(data.x_test[3], coloured.transpose(2, 0, 1))
    save(tmp_path / "train" / "cat" / "1.png", pixels(4, 4, 3))
    data = load(tmp_path)
    assert data.x_train.shape == (4, 3, 4, 4)
    assert equal(data.x_train[0], np.repeat(made["train"][0][None], 3, 0))
    assert equal(data.x_test[0], np.repeat(made["test"][0][None], 3, 0))


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3)])
def test_jpeg_is_read_as_it_decodes(tmp_path: Path, shape) -> None:
    image_folder(tmp_path, shape, "JPG")
    data = load(tmp_path)
    with Image.open(tmp_path / "train" / "ant" / "1.JPG") as opened:
        decoded = np.asarray(opened)
    assert equal(data.x_train[0], decoded[None] if decoded.ndim == 2 else decoded.transpose(2, 0, 1))


def test_images_with_transparency_or_a_palette_have_three_channels(tmp_path: Path) -> None:
    image_folder(tmp_path, (4, 4, 4))
    assert load(tmp_path).input_shape == (3, 4, 4)
    flat = Image.new("P", (4, 4), 1)
    flat.putpalette([0, 0, 0, 10, 20, 30])
    flat.save(tmp_path / "train" / "ant" / "1.png")
    assert load(tmp_path).x_train[0, :, 0, 0].tolist() == [10, 20, 30]


def test_images_of_different_sizes_need_the_option_size(tmp_path: Path) -> None:
    image_folder(tmp_path)
    save(tmp_path / "train" / "cat" / "1.png", pixels(8, 6, 3))
    rejects(tmp_path, "size", (8, 6), mentions=["cat/1.png", "8x6", "4x5"])
    data = load(tmp_path, size=[2, 3])
    assert data.image == (2, 3)
    image_folder(tmp_path / "other", parts=("train",))
    image_folder(tmp_path / "other", (3, 3), parts=("test",))
    rejects(tmp_path / "other", "size", (3, 3), mentions=["test/ant/1.png", "3x3", "4x5"])
    assert load(tmp_path / "other", size=(4, 5)).input_shape == (3, 4, 5)


def test_a_validation_folder_is_the_test_set_or_is_merged_with_training(tmp_path: Path) -> None:
    made = image_folder(tmp_path / "two", parts=("train", "val"))
    assert equal(load(tmp_path / "two").x_test, made["val"].transpose(0, 3, 1, 2))
    made = image_folder(tmp_path / "three", parts=("train", "valid", "test"))
    assert len(load(tmp_path / "three").y_train) == 4
    data = load(tmp_path / "three", merge_validation=True)
    assert equal(data.x_train, np.concatenate([made["train"], made["valid"]]).transpose(0, 3, 1, 2))
    assert equal(data.x_test, made["test"].transpose(0, 3, 1, 2))
    rejects(tmp_path / "two", "test", mentions=["two", "test="], merge_validation=True)
    image_folder(tmp_path / "none")
    rejects(tmp_path / "none", "merge_validation", True, valid=["val", "valid", "validation"], merge_validation=True)


def test_a_folder_without_a_test_set_is_split_only_on_request(tmp_path: Path) -> None:
    image_folder(tmp_path, parts=("train",))
    rejects(tmp_path, "test", mentions=["test=0.2"])
    data = load(tmp_path, test=0.5)
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([0, 1], [0, 1])
    assert torch.equal(load(tmp_path / "train", test=0.5, seed=3).x_test, data.x_test)
    image_folder(tmp_path)
    rejects(tmp_path, "test", 0.5, test=0.5)


def test_invalid_image_folders_raise(tmp_path: Path) -> None:
    image_folder(tmp_path)
    (tmp_path / "test" / "bee").mkdir()
    rejects(tmp_path, tmp_path / "test" / "bee", "bee", valid=["ant", "cat"], mentions=["ant, cat"])
    (tmp_path / "train" / "bee").mkdir()
    rejects(tmp_path, tmp_path / "train" / "bee", valid=[".png", ".jpg"])
    save(tmp_path / "train" / "bee" / "1.png", pixels(4, 5, 3))
    assert load(tmp_path, n_classes=3).n_classes == 3
    rejects(tmp_path, "n_classes", 2, valid=[3], n_classes=2)
    (tmp_path / "empty" / "train").mkdir(parents=True)
    rejects(tmp_path / "empty", tmp_path / "empty" / "train", mentions=["train/<class>/*.png"])


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_damaged_images_raise(tmp_path: Path, suffix) -> None:
    image_folder(tmp_path, (30, 30, 3), suffix)
    path = tmp_path / "train" / "cat" / f"1.{suffix}"
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"GIF89a nonsense"):
        path.write_bytes(content)
        rejects(tmp_path, path, mentions=[str(path)])


def test_images_with_16_bits_raise(tmp_path: Path) -> None:
    image_folder(tmp_path, (4, 4))
    Image.fromarray(np.full((4, 4), 60000, np.uint16)).save(tmp_path / "train" / "ant" / "1.png")
    rejects(tmp_path, tmp_path / "train" / "ant" / "1.png", "I;16", mentions=["8 bits"])


# tables


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "png")
    return buffer.getvalue()


def struct_table(images: np.ndarray, labels: list[int], column: str = "image") -> Any:
    rows = [{"bytes": png(image), "path": None} for image in images]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    return pa.table({column: pa.array(rows, kind), "label": labels})


@pytest.mark.parametrize(("column", "shape"), [("image", (5, 6)), ("img", (5, 6, 3))])
def test_parquet_with_image_structs(tmp_path: Path, column, shape) -> None:
    x, x_test = pixels(6, *shape), pixels(3, *shape)
    parquet.write_table(struct_table(x, [0, 1, 2, 0, 1, 2], column), tmp_path / "a.parquet")
    parquet.write_table(struct_table(x_test, [2, 1, 0], column), tmp_path / "b.parquet")
    for source in (
        (tmp_path / "a.parquet", tmp_path / "b.parquet"),
        {"train": str(tmp_path / "a.parquet"), "test": [tmp_path / "b.parquet"]},
    ):
        data = load(source)
        assert equal(data.x_train, x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2))
        assert equal(data.x_test, x_test[:, None] if x.ndim == 3 else x_test.transpose(0, 3, 1, 2))
        assert (data.y_train.tolist(), data.y_test.tolist(), data.name) == ([0, 1, 2, 0, 1, 2], [2, 1, 0], "a")


def test_shards_in_a_folder_are_joined(tmp_path: Path) -> None:
    x = pixels(6, 4, 4)
    (tmp_path / "data").mkdir()
    parquet.write_table(struct_table(x[:4], [0, 1, 0, 1]), tmp_path / "data" / "train-00000-of-00002.parquet")
    parquet.write_table(struct_table(x[4:], [0, 1]), tmp_path / "data" / "train-00001-of-00002.parquet")
    parquet.write_table(struct_table(x[:2], [0, 1]), tmp_path / "data" / "validation-00000-of-00001.parquet")
    data = load(tmp_path)
    assert equal(data.x_train, x[:, None])
    assert len(data.y_test) == 2
    parquet.write_table(pa.table({"img": [1.0], "label": [0]}), tmp_path / "data" / "train-00001-of-00002.parquet")
    first = tmp_path / "data" / "train-00000-of-00002.parquet"
    rejects(tmp_path, first)


def test_tables_that_are_not_shards_are_not_joined(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("f,label\n1,0\n2,1\n")
    (tmp_path / "test.csv").write_text("f,label\n1,0\n")
    assert len(load(tmp_path).y_train) == 2
    (tmp_path / "train_more.csv").write_text("f,label\n1,0\n2,1\n")
    rejects(tmp_path, tmp_path, ["train.csv", "train_more.csv"], mentions=["load((train, test))"])
    parquet.write_table(pa.table({"f": [1.0, 2.0, 3.0], "label": [0, 1, 0]}), tmp_path / "train.parquet")
    assert len(load(tmp_path).y_train) == 3
    (tmp_path / "test.csv").unlink()
    rejects(tmp_path, "test", None)


def test_images_in_a_table_may_be_paths_or_bytes(tmp_path: Path) -> None:
    x = pixels(4, 4, 4)
    rows = [{"bytes": None, "path": f"{i}.png"} for i in range(4)]
    for i in range(4):
        save(tmp_path / f"{i}.png", x[i])
    parquet.write_table(pa.table({"image": rows, "label": [0, 1, 0, 1]}), tmp_path / "a.parquet")
    as_bytes = pa.table({"image": [png(image) for image in x], "label": [0, 1, 0, 1]})
    parquet.write_table(as_bytes, tmp_path / "b.parquet")
    data = load((tmp_path / "a.parquet", tmp_path / "b.parquet"))
    assert equal(data.x_train, x[:, None])
    assert equal(data.x_test, x[:, None])
    (tmp_path / "b.parquet").rename(tmp_path / "test.parquet")
    (tmp_path / "a.parquet").rename(tmp_path / "train.parquet")
    save(tmp_path / "more" / "4.png", x[0])  # a folder of images next to the tables is not a class
    assert equal(load(tmp_path).x_train, x[:, None])
    (tmp_path / "test.parquet").rename(tmp_path / "b.parquet")
    (tmp_path / "train.parquet").rename(tmp_path / "a.parquet")
    (tmp_path / "3.png").unlink()
    rejects((tmp_path / "a.parquet", tmp_path / "b.parquet"), tmp_path / "3.png")
    table = pa.table({"image": [{"bytes": None, "path": None}], "label": [0]}, struct_table(x, [0] * 4).schema)
    parquet.write_table(table, tmp_path / "a.parquet")
    rejects(tmp_path / "a.parquet", tmp_path / "a.parquet", "image", mentions=["row 0"])
    parquet.write_table(pa.table({"image": [b"nonsense"], "label": [0]}), tmp_path / "a.parquet")
    rejects(tmp_path / "a.parquet", f"{tmp_path / 'a.parquet'}, row 0")


def test_a_single_table_is_always_split_in_the_same_way(tmp_path: Path) -> None:
    parquet.write_table(struct_table(pixels(20, 4, 4), [0, 1] * 10), tmp_path / "a.parquet")
    data = load(tmp_path / "a.parquet", seed=1)
    assert (len(data.y_train), data.y_test.bincount().tolist()) == (16, [2, 2])
    assert torch.equal(load(tmp_path / "a.parquet", seed=2).x_test, data.x_test)
    assert len(load(tmp_path / "a.parquet", test=0.5).y_test) == 10


def test_csv_of_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,width,height,label\n1,0.5,2,0\n2,1.5,3,1\n3,2.5,4,1\n")
    with gzip.open(tmp_path / "b.csv.gz", "wt") as file:
        file.write("id,width,height,label\n7,9,8,1\n")
    data = load((tmp_path / "a.csv", tmp_path / "b.csv.gz"))
    assert data.x_train.tolist() == [[0.5, 2], [1.5, 3], [2.5, 4]]
    assert data.x_train.dtype == torch.float32
    assert (data.x_test.tolist(), data.y_test.tolist()) == ([[9, 8]], [1])
    data = load((tmp_path / "a.csv", tmp_path / "b.csv.gz"), x=["height"], y="label", ids="id")
    assert (data.x_train.tolist(), data.ids.tolist()) == ([[2], [3], [4]], [1, 2, 3])


def test_csv_of_pixels_becomes_images(tmp_path: Path) -> None:
    x = pixels(4, 9)
    header = ",".join(["label", *(f"pixel{i}" for i in range(9))])
    rows = "\n".join(",".join(map(str, [i % 2, *x[i]])) for i in range(4))
    (tmp_path / "a.csv").write_text(f"{header}\n{rows}\n")
    pair = (tmp_path / "a.csv", tmp_path / "a.csv")
    assert equal(load(pair).x_train, x.reshape(4, 1, 3, 3))
    assert load(pair, size=(1, 3)).input_shape == (3, 1, 3)
    rejects(pair, "size", (2, 2), mentions=["9 pixels"], size=(2, 2))
    (tmp_path / "b.csv").write_text("label,1x1,1x2\n0,1,2\n1,3,4\n")
    rejects(tmp_path / "b.csv", "size", None, mentions=["2 pixels"])


def test_text_labels_are_numbered_in_alphabetical_order(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("f,label\n1,dog\n2,ant\n3,cat\n")
    (tmp_path / "b.csv").write_text("f,label\n1,cat\n")
    data = load((tmp_path / "a.csv", tmp_path / "b.csv"))
    assert (data.y_train.tolist(), data.y_test.tolist(), data.n_classes) == ([2, 0, 1], [1], 3)
    (tmp_path / "b.csv").write_text("f,label\n1,cat\n2,cow\n")
    pair = (tmp_path / "a.csv", tmp_path / "b.csv")
    rejects(pair, tmp_path / "b.csv", "cow", valid=["ant", "cat", "dog"], mentions=["line 3"])
    coded = pa.table({"f": [1.0, 2.0], "label": pa.array(["b", "a"]).dictionary_encode()})
    parquet.write_table(coded, tmp_path / "c.parquet")
    assert load((tmp_path / "c.parquet", tmp_path / "c.parquet")).y_train.tolist() == [1, 0]


def test_lists_of_numbers_become_arrays(tmp_path: Path) -> None:
    x = pixels(4, 2, 3, 3)

    def made(values: list[Any], kind: Any = None, **options: Any) -> Any:
        path = tmp_path / "a.parquet"
        parquet.write_table(pa.table({"x": pa.array(values, kind), "label": [0, 1, 0, 1]}), path)
        return load((path, path), **options).x_train

    assert equal(made(x.tolist()), x.transpose(0, 3, 1, 2))  # channels last, as images are stored
    assert equal(made(x.transpose(0, 3, 1, 2).tolist()), x.transpose(0, 3, 1, 2))
    assert equal(made(x[..., 0].tolist()), x[:, None, :, :, 0])
    flat = x.reshape(4, 18)
    assert made(flat.tolist()).tolist() == flat.tolist()
    assert made((flat / 2).tolist(), pa.list_(pa.float64(), 18)).dtype == torch.float32
    assert equal(made(flat.tolist(), size=(3, 2)), flat.reshape(4, 3, 3, 2))
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"x": [[1], [1, 2]], "label": [0, 1]}), path)
    rejects(path, "x", "x", mentions=["1, 2"])
    parquet.write_table(pa.table({"x": [["a"], ["b"]], "label": [0, 1]}), path)
    rejects(path, "x", "x", mentions=["list<"])


def test_several_columns_of_lists_become_a_dict(tmp_path: Path) -> None:
    table = pa.table({"input_ids": [[1, 2], [3, 4]], "mask": [[1, 1], [1, 0]], "label": [0, 1]})
    parquet.write_table(table, tmp_path / "a.parquet")
    data = load((tmp_path / "a.parquet", tmp_path / "a.parquet"), x=["input_ids", "mask"])
    assert {key: value.tolist() for key, value in data.x_train.items()} == {
        "input_ids": [[1, 2], [3, 4]],
        "mask": [[1, 1], [1, 0]],
    }


def test_a_function_can_be_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,label\n"one, two",0\n"three\nlines",1\n')
    pair = (tmp_path / "a.csv", tmp_path / "a.csv")
    data = load(pair, tokenizer=lambda texts: torch.tensor([[len(text)] for text in texts]))
    assert data.x_train.tolist() == [[8], [11]]
    data = load(pair, tokenizer=lambda texts: {"n": torch.tensor([len(t) for t in texts]), "m": [[1], [2]]})
    assert {key: value.tolist() for key, value in data.x_train.items()} == {"m": [[1], [2]], "n": [8, 11]}
    (tmp_path / "b.csv").write_text("text,label\n" + "word,0\nword,1\n" * 5)
    alone = load(tmp_path / "b.csv", tokenizer=lambda texts: {"n": torch.arange(10)})
    assert (len(alone.x_train["n"]), len(alone.x_test["n"])) == (8, 2)
    rejects(pair, "tokenizer", "list", tokenizer=lambda texts: texts)


@pytest.mark.parametrize(
    ("text", "options", "key", "value", "valid"),
    [
        ("", {}, "a.csv", None, []),
        ("f,label\n", {}, "a.csv", None, []),
        ("f,label\n1,0\n2\n", {}, "a.csv", None, []),
        ("f,g\n1,0\n", {}, "y", None, ["f", "g"]),
        ("f_id,g_id,label\n1,2,0\n", {}, "x", None, ["f_id", "g_id", "label"]),
        ("label\n1\n", {}, "x", None, ["label"]),
        ("f,label\n1,0\n", {"y": "labels"}, "y", "labels", ["f", "label"]),
        ("f,label\n1,0\n", {"x": "g"}, "x", "g", ["f", "label"]),
        ("f,label\n1,0\n", {"ids": "w"}, "ids", "w", ["f", "label"]),
        ("f,f,label\n1,2,0\n", {}, "x", "f", []),
        ("f,label\n1,0\n,1\n", {}, "f", 1, []),  # the first row with an empty cell
        ("f,label\n1,0\n2,\n", {}, "label", 1, []),
        ("f,label\n1,0.5\n2,1.5\n", {}, "y_train", 0.5, []),
        ("f,label\n1,2020-01-01\n2,2020-01-01\n", {}, "y", "label", []),
        ("f,label\n1,-1\n2,1\n", {}, "y_train", -1, []),
        ("f,label\n1,0\n2,3\n", {"n_classes": 3}, "n_classes", 3, [4]),
        ("f,label\n1,0\ninf,1\n", {}, "x_train", 1, []),  # the first example that is not finite
        ("f,label\n1,0\n2,0\n", {}, "y_train", 0, []),  # a single class
        ("f,label\n1,0\n", {"splits": ("a", "b")}, "splits", ("a", "b"), ["x", "y", "ids", "test"]),
    ],
)
def test_invalid_tables_raise(
    tmp_path: Path, text: str, options: dict[str, Any], key: str, value: Any, valid: list[Any]
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    rejects((path, path), str(path) if key == "a.csv" else key, value, valid, **options)


def test_the_message_of_an_invalid_csv_file_has_the_reason_of_the_parser(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for text, reason in (("", "Empty CSV"), ("f,label\n1,0\n2\n", "Expected 2 columns, got 1")):
        path.write_text(text)
        rejects(path, path, mentions=[reason])


def test_files_whose_content_does_not_match_their_name_raise(tmp_path: Path) -> None:
    table = struct_table(pixels(4, 4, 4), [0, 1, 0, 1])
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path)
    whole = path.read_bytes()
    for content in (b"", b"nonsense", whole[: len(whole) // 2]):
        path.write_bytes(content)
        rejects(path, path, mentions=[str(path)])
    rejects((path, tmp_path / "b.parquet"), path)
    path.write_bytes(whole)
    rejects((path, tmp_path / "b.parquet"), tmp_path / "b.parquet")
    rejects((path, tmp_path), tmp_path)
    (tmp_path / "c.txt").touch()
    rejects((path, tmp_path / "c.txt"), tmp_path / "c.txt", ".txt", valid=[".parquet", ".csv"])
    (tmp_path / "d.csv").write_bytes(b"f\x81\xff,label\n1,0\n2,1\n")
    rejects(tmp_path / "d.csv", tmp_path / "d.csv", mentions=["UTF-8", "windows-1252"])
    table_of_text = pa.table({"f": [1, 2], "label": ["xyz", "uvw"]})
    parquet.write_table(table_of_text, path, use_dictionary=False, compression="none")
    path.write_bytes(path.read_bytes().replace(b"xyz", b"x\xffz"))
    rejects(path, path, mentions=["UTF"])
    path.write_bytes(whole)
    parquet.write_table(table.drop_columns(["label"]), tmp_path / "b.parquet")
    rejects((path, tmp_path / "b.parquet"), "y", "label", valid=["image"], mentions=[str(tmp_path / "b.parquet")])


# Hugging Face


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    module = pytest.importorskip("datasets", reason="needs the extra data")
    monkeypatch.setattr(module.config, "HF_HUB_OFFLINE", True)  # in case it was imported before
    return module


def hub_split(datasets: Any, n: int, labels: list[int] | None = None) -> tuple[np.ndarray, Any]:
    images = pixels(n, 6, 6, 3)
    features = datasets.Features(
        {"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["a", "b", "c", "d"])}
    )
    classes = list(np.arange(n) % 3) if labels is None else labels
    return images, datasets.Dataset.from_dict({"img": list(images), "fine_label": classes}, features=features)


def test_a_hugging_face_parquet_file_declares_its_classes(tmp_path: Path, datasets) -> None:
    """Four classes are declared; three occur in the data."""
    images, split = hub_split(datasets, 6)
    split.to_parquet(tmp_path / "a.parquet")
    pair = (tmp_path / "a.parquet", tmp_path / "a.parquet")
    data = load(pair, n_classes=4)
    assert equal(data.x_train, images.transpose(0, 3, 1, 2))
    assert (data.n_classes, data.y_train.tolist()) == (4, [0, 1, 2, 0, 1, 2])
    rejects(pair, "n_classes", 3, valid=[4], n_classes=3)


def test_arrays_of_hugging_face_are_read_as_images(tmp_path: Path, datasets) -> None:
    x = pixels(3, 4, 4)
    features = datasets.Features({"image": datasets.Array2D((4, 4), "uint8"), "label": datasets.Value("int64")})
    made = datasets.Dataset.from_dict({"image": list(x), "label": [0, 1, 2]}, features=features)
    made.to_parquet(tmp_path / "a.parquet")
    assert equal(load((tmp_path / "a.parquet", tmp_path / "a.parquet")).x_train, x[:, None])


def test_a_hugging_face_data_set_by_name(datasets, monkeypatch: pytest.MonkeyPatch) -> None:
    (images, train), (_, test) = hub_split(datasets, 9), hub_split(datasets, 3)
    calls = []

    def load_dataset(*name: str) -> Any:
        calls.append(name)
        if len(name) == 1 and name[0] not in ("birds", "owner/birds"):
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name[0]}' doesn't exist on the Hub")
        return datasets.DatasetDict(train=train, unsupervised=test, validation=test)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load("hf:birds", n_classes=4)
    assert equal(data.x_train, images.transpose(0, 3, 1, 2))
    assert (data.y_test.tolist(), data.name) == ([0, 1, 2], "hf:birds")
    load("hf:owner/birds")
    load("hf:group/config")
    load("hf:owner/birds/config")
    assert calls == [
        ("birds",),
        ("owner/birds",),
        ("group/config",),
        ("group", "config"),
        ("owner/birds", "config"),
    ]
    assert equal(load("hf:birds", splits=("validation", "train")).x_test, images.transpose(0, 3, 1, 2))
    splits = ["train", "unsupervised", "validation"]
    rejects("hf:birds", "splits", ("train", "tset"), valid=splits, splits=("train", "tset"))
    rejects("hf:a/b/c/d", "source", "hf:a/b/c/d", mentions=["hf:OWNER/NAME"])
    rejects("hf:", "source", "hf:", mentions=["hf:NAME"])
    rejects("hf:none", "source", "hf:none", mentions=["doesn't exist on the Hub"])


def test_the_splits_of_a_hugging_face_data_set(datasets, monkeypatch: pytest.MonkeyPatch) -> None:
    train, bare = hub_split(datasets, 9)[1], hub_split(datasets, 3, [-1, -1, -1])[1]
    found = {"train": train, "test": bare, "validation": train}
    monkeypatch.setattr(datasets, "load_dataset", lambda *name: datasets.DatasetDict(found))
    rejects("hf:x", "splits", "test", valid=["train", "test", "validation"], mentions=["-1", "splits=('train', ...)"])
    assert len(load("hf:x", splits=("train", "validation")).y_test) == 9
    found = {"train": train.filter(lambda row: row["fine_label"] != 1)}  # stored as an index over the table
    rejects("hf:x", "test", None, mentions=["hf:x"])
    assert load("hf:x", test=0.34).y_test.bincount().tolist() == [1, 0, 1]
    found = {"all": train}
    rejects("hf:x", "splits", None, valid=["all"], mentions=["splits="])
    monkeypatch.setattr(datasets, "load_dataset", lambda *name: train)
    assert len(load("hf:x", splits="train", test=0.34).y_test) == 3


def test_a_hugging_face_data_set_that_cannot_be_loaded_raises_one_line(
    datasets, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejects("hf:fedkeep-none/none", "source", "hf:fedkeep-none/none")

    def no_config(*name: str) -> None:
        raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['a', 'b']")

    monkeypatch.setattr(datasets, "load_dataset", no_config)
    rejects("hf:x", "source", "hf:x", mentions=["/CONFIG", "['a', 'b']"])

    def broken(*name: str) -> None:
        raise RuntimeError("x" * 1000)

    monkeypatch.setattr(datasets, "load_dataset", broken)
    assert len(rejects("hf:x", "source", "hf:x", mentions=["xxx"])) < 300


@pytest.mark.parametrize(
    ("module", "source", "package"),
    [("datasets", "hf:x", "datasets"), ("pyarrow", "a.parquet", "pyarrow"), ("PIL", "images", "pillow")],
)
def test_a_missing_package_raises_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module, source, package
) -> None:
    image_folder(tmp_path / "images")
    (tmp_path / "a.parquet").touch()
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == module:
            raise ImportError(f"no {name}")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    where = source if source.startswith("hf:") else tmp_path / source
    assert f"'{package}>=" in rejects(where, package).partition("pip install ")[2]


# data sets by name


@pytest.mark.parametrize("name", named.NAMED)
def test_a_missing_named_data_set_raises_with_its_folder_and_the_download_command(name, tmp_path: Path) -> None:
    root = tmp_path / "my data"
    command = named.NAMED[name].download.format(f"'{root / name}'")  # quoted, so that it can be pasted into a shell
    assert "https://" in command or "http://cs231n" in command or "hf download" in command
    missing = rejects(name, root / name, mentions=[name, str(root / name), command], root=root)
    assert missing == named.how_to_get(name, root)
    (root / name).mkdir(parents=True)
    empty = rejects(name, root / name, mentions=[name, command], root=root)
    assert empty == named.how_to_get(name, root) != missing
    (root / name / "half a file").touch()
    assert named.how_to_get(name, root) is None
    rejects(name, ANY, mentions=[name, command], root=root)


def test_the_folder_of_named_data_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert named.data_root(None) == tmp_path / ".cache" / "fedkeep"
    assert named.data_root("~/sets") == tmp_path / "sets"
    monkeypatch.setenv("FEDKEEP_DATA", "/elsewhere")
    assert named.data_root(None) == Path("/elsewhere")
    assert named.data_root("/here") == Path("/here")


def test_mnist_by_name(tmp_path: Path) -> None:
    arrays = quick_images()
    write_idx(tmp_path / "mnist", *arrays, packed=True)
    data = load("MNIST", root=tmp_path)
    assert equal(data.x_train, arrays[0][:, None])
    assert (data.n_classes, data.mean.item(), data.std.item()) == (
        10,
        0.1307,
        0.3081,
    )  # although only three classes occur
    write_idx(tmp_path / "mnist", arrays[0], arrays[1] + 9, arrays[2], arrays[3])
    rejects("mnist", "n_classes", 10, mentions=["mnist", "label 11"], root=tmp_path)


def test_cinic10_by_name(tmp_path: Path) -> None:
    classes = [f"c{i}" for i in range(10)]
    made = image_folder(tmp_path / "cinic10", (4, 4, 3), parts=("train", "valid", "test"), classes=classes)
    save(tmp_path / "cinic10" / "train" / "c0" / "1.png", grey := pixels(4, 4))
    data = load("CINIC-10", root=tmp_path)
    assert data.x_train.shape == (20, 3, 4, 4)
    assert equal(data.x_train[0], np.repeat(grey[None], 3, 0))
    assert equal(data.x_test, made["test"].transpose(0, 3, 1, 2))
    assert data.mean.flatten().tolist() == [0.47889522, 0.47227842, 0.43047404]
    assert len(load("cinic10", root=tmp_path, merge_validation=True).y_train) == 40
    for path in (tmp_path / "cinic10").glob("*/c9"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    rejects("cinic10", tmp_path / "cinic10", 9, valid=[10], root=tmp_path)


def test_tiny_imagenet_by_name(tmp_path: Path) -> None:
    home = tmp_path / "tiny_imagenet" / "tiny-imagenet-200"
    names = [f"n{i:08d}" for i in range(200)]
    for i, name in enumerate(names):
        save(home / "train" / name / "images" / f"{name}_0.JPEG", np.full((2, 2, 3), i, np.uint8))
    for i in range(3):
        save(home / "val" / "images" / f"val_{i}.JPEG", np.full((2, 2), 10 * i, np.uint8))
    annotations = home / "val" / "val_annotations.txt"
    annotations.write_text("".join(f"val_{i}.JPEG\t{names[199 - i]}\t0\t0\t62\t62\n" for i in range(3)))
    data = load("tiny-imagenet", root=tmp_path)
    assert (data.x_train.shape, data.x_test.shape, data.n_classes) == ((200, 3, 2, 2), (3, 3, 2, 2), 200)
    assert np.abs(data.x_train.numpy()[:, 0, 0, 0].astype(int) - np.arange(200)).max() <= 2  # JPEG
    assert (data.y_train.tolist(), data.y_test.tolist()) == (list(range(200)), [199, 198, 197])
    assert torch.equal(load(home).x_train, data.x_train)
    annotations.write_text("val_0.JPEG\tn9\t0\n")
    rejects("tiny_imagenet", annotations, "n9", mentions=["line 1"], root=tmp_path)
    annotations.write_text(f"val_9.JPEG\t{names[0]}\t0\n")
    rejects("tiny_imagenet", home / "val" / "images" / "val_9.JPEG", mentions=["mkdir -p"], root=tmp_path)
    annotations.unlink()
    rejects("tiny_imagenet", annotations, mentions=["mkdir -p"], root=tmp_path)


# FEMNIST


def write_leaf(path: Path, writers: dict[str, tuple[np.ndarray, list[int]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {w: {"x": (x.reshape(len(x), 784) / 255).tolist(), "y": y} for w, (x, y) in writers.items()}
    content = {"users": list(writers), "num_samples": [len(y) for _, y in writers.values()], "user_data": data}
    path.write_text(json.dumps(content))


def test_femnist_from_the_files_of_leaf(tmp_path: Path) -> None:
    x, home = pixels(6, 1, 28, 28), tmp_path / "femnist" / "data"
    empty = (x[:0], [])
    write_leaf(home / "train" / "all_data_0_train_9.json", {"f2": (x[:2], [61, 3]), "f1": (x[2:3], [7]), "f0": empty})
    write_leaf(home / "train" / "all_data_1_train_9.json", {"f3_long": (x[3:4], [0])})
    write_leaf(home / "test" / "all_data_0_test_9.json", {"f2": (x[4:6], [1, 2])})
    data = load("FEMNIST", root=tmp_path)
    assert equal(data.x_train, x[:4])
    assert equal(data.x_test, x[4:])
    assert (data.y_train.tolist(), data.y_test.tolist(), data.n_classes) == ([61, 3, 7, 0], [1, 2], 62)
    assert data.ids.tolist() == ["f2", "f2", "f1", "f3_long"]
    assert [k.tolist() for k in partition.by_id(data.ids)] == [[2], [0, 1], [3]]
    rejects("femnist", "test", 0.2, root=tmp_path, test=0.2)
    rejects("femnist", "test_writers", True, root=tmp_path, test_writers=True)
    assert torch.equal(load(home, n_classes=62).x_train, data.x_train)


def writers_of(sizes: list[int]) -> dict[str, tuple[np.ndarray, list[int]]]:
    """All pixels of image j of writer i are i * 20 + j, and its class is j."""
    return {
        f"w{i}": (np.stack([np.full((28, 28), i * 20 + j) for j in range(n)]), list(range(n)))
        for i, n in enumerate(sizes)
    }


@pytest.mark.parametrize("where", ["all_data", ".", "leaf/data/femnist/data/sampled_data"])
def test_femnist_is_split_by_a_fraction_of_each_writer_as_in_leaf(tmp_path: Path, where) -> None:
    """LEAF trains on max(1, int(0.9 n)): 9 of 10, 4 of 5, 1 of 2. A writer with one example is left out."""
    write_leaf(tmp_path / "femnist" / where / "all_data_0.json", writers_of([10, 5, 2, 1]))
    (tmp_path / "femnist" / "about.json").write_text("{}")
    data = load("femnist", root=tmp_path)
    assert dict(zip(*np.unique(data.ids, return_counts=True), strict=True)) == {"w0": 9, "w1": 4, "w2": 1}
    assert len(data.y_test) == 3
    images = data.x_train[:, 0, 0, 0].tolist() + data.x_test[:, 0, 0, 0].tolist()
    assert sorted(images) == [*range(10), *range(20, 25), 40, 41]
    assert all(f"w{int(v) // 20}" == w for v, w in zip(data.x_train[:, 0, 0, 0], data.ids, strict=True))
    assert torch.equal(load("femnist", root=tmp_path, seed=9).x_test, data.x_test)
    assert len(load("femnist", root=tmp_path, test=0.5).y_test) == 5 + 3 + 1
    whole = load("femnist", root=tmp_path, test_writers=True, test=0.5)
    test_writers = set((whole.x_test[:, 0, 0, 0] // 20).tolist())
    assert len(test_writers) == 2
    assert not test_writers & set((whole.x_train[:, 0, 0, 0] // 20).tolist())
    assert len(whole.y_train) + len(whole.y_test) == 18


def test_femnist_from_parquet(tmp_path: Path, datasets) -> None:
    x, home = pixels(20, 28, 28), tmp_path / "femnist" / "data"
    home.mkdir(parents=True)
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "writer_id": datasets.Value("string"),
            "character": datasets.ClassLabel(names=[str(i) for i in range(62)]),
        }
    )
    rows = {"image": list(x), "writer_id": ["f1", "f0"] * 10, "character": list(range(20))}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(home / "train-00000-of-00001.parquet")
    data = load("femnist", root=tmp_path)
    assert (len(data.y_train), len(data.y_test), data.n_classes) == (18, 2, 62)
    assert equal(data.x_train, x[data.y_train.numpy()][:, None])
    assert data.ids.tolist() == [["f1", "f0"][c % 2] for c in data.y_train.tolist()]


@pytest.mark.parametrize(
    ("content", "key", "value", "mentions"),
    [
        ('{"users": [', "a.json", None, []),
        ("[]", "a.json", None, []),
        ('{"users": []}', "a.json", None, ["'user_data'"]),
        ('{"user_data": {}}', "", None, []),  # no examples in the whole folder
        ('{"user_data": {"w": {"x": []}}}', "a.json", "w", []),
        ('{"user_data": {"w": {"x": [[0, 1]], "y": [1]}}}', "a.json", None, ["784", "(2,)"]),
        (json.dumps({"user_data": {"w": {"x": [[0] * 784], "y": [1, 2]}}}), "a.json", "w", ["1 ", "2 "]),
        (json.dumps({"user_data": {"w": {"x": [[2] * 784], "y": [1]}}}), "a.json", None, ["0 and 1"]),
    ],
)
def test_damaged_files_of_leaf_raise(tmp_path: Path, content: str, key: str, value: Any, mentions: list[str]) -> None:
    folder = tmp_path / "femnist" / "train"
    write_leaf(tmp_path / "femnist" / "test" / "a.json", writers_of([2]))
    folder.mkdir()
    (folder / "a.json").write_text(content)
    rejects("femnist", folder / key, value, mentions=[str(folder / key), *mentions], root=tmp_path)


def test_a_class_that_femnist_does_not_have_raises(tmp_path: Path) -> None:
    write_leaf(tmp_path / "femnist" / "test" / "a.json", writers_of([2]))
    write_leaf(tmp_path / "femnist" / "train" / "a.json", {"w": (np.zeros((1, 784)), [62])})
    rejects("femnist", "n_classes", 62, mentions=["label 62"], root=tmp_path)


# real images, if available


def real(name: str) -> tuple[np.ndarray, ...]:
    folder = os.environ.get("FEDKEEP_TEST_DATA")
    path = Path(folder or ".") / name / "load.py"
    if not folder or not path.is_file():
        pytest.skip(f"FEDKEEP_TEST_DATA names no folder with {name}/load.py")
    spec = importlib.util.spec_from_file_location(f"real_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x, y, x_test, y_test = module.load()
    return x[::60], y[::60], x_test[::60], y_test[::60]


def test_real_mnist_is_read_exactly(tmp_path: Path) -> None:
    x, y, x_test, y_test = real("mnist")
    write_idx(tmp_path / "mnist", x, y, x_test, y_test, packed=True)
    data = load("mnist", root=tmp_path)
    assert equal(data.x_train, x[:, None])
    assert equal(data.x_test, x_test[:, None])
    assert np.array_equal(data.y_train, y)
    assert np.array_equal(data.y_test, y_test)
    assert abs(data.x_train.double().mean() / 255 - data.mean.item()) < 0.01


def test_real_cifar10_is_read_exactly(tmp_path: Path) -> None:
    x, y, x_test, y_test = real("cifar10")
    first, x_test = x.transpose(0, 3, 1, 2), x_test.transpose(0, 3, 1, 2)
    write_cifar10(tmp_path / "cifar10" / "cifar-10-batches-bin", first, y, x_test, y_test)
    data = load("cifar10", root=tmp_path)
    assert equal(data.x_train, first)
    assert equal(data.x_test, x_test)
    assert np.array_equal(data.y_train, y)
    assert np.array_equal(data.y_test, y_test)
    assert (data.x_train.double().mean((0, 2, 3)) / 255 - data.mean.flatten()).abs().max() < 0.02


# documentation


def test_docs_data_lists_every_command_option_and_normalisation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for name, known in named.NAMED.items():
        assert known.download.format(f"$FEDKEEP_DATA/{name}") in text
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        for value in (*(known.mean or ()), *(known.std or ())):
            assert f"{value}" in row
    assert [field.name for field in dataclasses.fields(Options) if f"`{field.name}" not in text] == []
    assert [name for name in (*choice.USUAL_X, *choice.USUAL_Y) if f"`{name}`" not in text] == []


def test_digits_equal_those_of_scikit_learn_with_and_without_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits

    from fedkeep.data.sources import arrays

    raw = load_digits()
    expected = np.column_stack([raw.data, raw.target])
    assert np.array_equal(arrays._read_digits_table(), expected)
    monkeypatch.setattr(arrays.Path, "is_file", lambda self: False)
    assert np.array_equal(arrays._read_digits_table(), expected)
