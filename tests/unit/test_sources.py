"""Where data sets come from: every format read from files made here, every error one clear line."""

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
from pathlib import Path

import numpy as np
import pytest
import torch

from fedkeep.data import from_arrays, load, partition
from fedkeep.data.sources import columns, named
from fedkeep.data.sources.common import Options
from fedkeep.errors import DataError

pa = pytest.importorskip("pyarrow", reason="needs the extra data")
Image = pytest.importorskip("PIL.Image", reason="needs the extra data")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra data")

RNG = np.random.default_rng(0)


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def refused(source, reason: str, **options) -> str:
    with pytest.raises(DataError, match=reason) as caught:
        load(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def equal(tensor: torch.Tensor, array: np.ndarray) -> bool:
    return tensor.dtype == torch.uint8 and np.array_equal(tensor.numpy(), array)


# what is asked for


@pytest.mark.parametrize("name", ["digits", "Digits", "DIGITS"])
def test_a_name_may_be_spelled_freely(name):
    assert load(name).name == "digits"


@pytest.mark.parametrize("name", ["CIFAR-10", "cifar_10", "cifar10"])
def test_dashes_and_case_are_forgiven(name, tmp_path):
    assert "cifar10 is expected in" in refused(name, str(tmp_path / "cifar10"), root=tmp_path)


def test_what_cannot_be_a_source_is_refused(tmp_path):
    refused("mnits", r"unknown data set 'mnits': did you mean mnist\?")
    refused("some/where", "there is no file or folder some/where")
    refused(tmp_path / "none", "there is no file or folder .*none")
    refused(Path("digits"), "there is no file or folder digits")
    refused(tmp_path / "none.parquet", r"there is no file .*none\.parquet")
    refused(np.zeros(3), "a source is a name, a path, or a pair of files, not ndarray: .*from_arrays")
    refused(("a.csv",), r"files come as a pair \(train, test\)")
    refused(("a.csv", "b.csv", "c.csv"), r"files come as a pair \(train, test\)")
    refused({"train": "a.csv", "tset": "b.csv"}, r"files come as a pair .* not as \['train', 'tset'\]")
    refused((np.zeros(3), np.zeros(3)), "a part is a file or a list of files")
    refused(([], "b.csv"), r"a part is a file or a list of files, not \[\]")
    refused(tmp_path, "holds nothing that is recognised: IDX files, CIFAR binary batches, .*")
    (tmp_path / "batch.bin").touch()
    refused(tmp_path / "batch.bin", r"batch\.bin is not a file that is read by itself .*its folder")
    refused(tmp_path / "a.pkl", r"a\.pkl is a pickle, .* never loaded; save arrays as \.npz")


def test_options_that_mean_nothing_are_refused():
    refused("digits", r"load has no option 'sise': did you mean size\?", sise=(8, 8))
    refused("digits", "the option size does not apply to digits: it takes none", size=(8, 8))
    assert load("digits", size=None, merge_validation=False).image == (8, 8)
    refused("digits", r"size must be \(height, width\) in pixels, not 8", size=8)
    refused("digits", r"size must be \(height, width\)", size=(0, 8))
    refused("digits", "test must be a share between 0 and 1, not 1.0", test=1.0)
    refused("digits", "first_label must be a whole number, not 'a'", first_label="a")


def test_the_number_of_classes_is_compared_with_what_is_found(tmp_path):
    assert load("digits", n_classes=10).n_classes == 10
    refused("digits", "n_classes = 9, but digits has 10 classes", n_classes=9)
    write_idx(tmp_path, *quick_images())
    assert load(tmp_path, n_classes=3).n_classes == 3
    for wrong in (2, 7):
        refused(tmp_path, f"n_classes = {wrong}, but .* has labels 0 to 2: 3 classes", n_classes=wrong)


def test_ids_go_with_their_examples():
    ids = [f"w{i // 4}" for i in range(12)]
    data = from_arrays(np.arange(12)[:, None], np.arange(12) % 3, np.zeros((3, 1), int), range(3), ids=ids)
    split = data.with_public(1)
    assert len(split.ids) == 9
    assert all(f"w{int(x) // 4}" == owner for x, owner in zip(split.x_train, split.ids, strict=True))
    assert [len(k) for k in partition.by_id(data.ids)] == [4, 4, 4]
    with pytest.raises(DataError, match="ids has 3 entries, y_train has 12"):
        from_arrays(np.zeros((12, 1)), np.arange(12) % 3, np.zeros((3, 1)), range(3), ids=ids[:3])


# IDX


def quick_images() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return pixels(6, 4, 5), np.arange(6) % 3, pixels(3, 4, 5), np.arange(3)


def idx_bytes(array: np.ndarray, code: int = 0x08) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, x, y, x_test, y_test, packed: bool = False, prefix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    for name, array in zip(names, (x, y, x_test, y_test), strict=True):
        data = idx_bytes(array.astype(np.uint8))
        path = folder / f"{prefix}{name}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(data, 1) if packed else data)


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read_packed_or_not(tmp_path, packed):
    arrays = quick_images()
    write_idx(tmp_path / "set", *arrays, packed=packed)
    data = load(tmp_path / "set")
    assert equal(data.x_train, arrays[0][:, None])
    assert equal(data.x_test, arrays[2][:, None])
    assert (data.y_train.tolist(), data.y_test.tolist()) == (arrays[1].tolist(), arrays[3].tolist())
    assert (data.name, data.n_classes, data.image, data.mean) == ("set", 3, (4, 5), None)


def test_a_packed_file_under_a_plain_name_and_both_side_by_side_are_read(tmp_path):
    arrays = quick_images()
    write_idx(tmp_path, *arrays)
    path = tmp_path / "train-images-idx3-ubyte"
    path.with_name(path.name + ".gz").write_bytes(b"left over")
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert equal(load(tmp_path).x_train, arrays[0][:, None])


@pytest.mark.parametrize(("code", "dtype"), [(0x09, "i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")])
def test_idx_numbers_of_every_type_are_read(tmp_path, code, dtype):
    write_idx(tmp_path, *quick_images())
    x = np.arange(120).astype(dtype).reshape(6, 4, 5)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx_bytes(x, code))
    assert np.array_equal(load(tmp_path).x_train.numpy(), x[:, None])


def test_idx_labels_from_1_need_to_be_said(tmp_path):
    x, y, x_test, y_test = quick_images()
    write_idx(tmp_path, x, y + 1, x_test, y_test + 1, prefix="emnist-letters-")
    refused(tmp_path, "the lowest label is 1, but classes count from 0: give first_label=1", seed=0)
    data = load(tmp_path, first_label=1)
    assert (data.n_classes, data.y_train.tolist()) == (3, y.tolist())
    assert load(tmp_path, n_classes=4).n_classes == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-3], r"train-images.* is damaged: its header promises 6x4x5 values, 120 bytes, but 117"),
        (lambda data: data + b"\0", "is damaged: its header promises 6x4x5 values, 120 bytes, but 121 follow"),
        (lambda data: b"", "is not an IDX file, or is damaged"),
        (lambda data: data[:9], "is not an IDX file, or is damaged"),
        (lambda data: b"\0\0\x07" + data[3:], "is not an IDX file, or is damaged"),
        (lambda data: b"PK" + data[2:], "is not an IDX file, or is damaged"),
        (lambda data: gzip.compress(data)[:-12], "train-images-idx3-ubyte cannot be read, it may be damaged: "),
        (lambda data: gzip.compress(data)[:9] + b"\xff" * 30, "cannot be read, it may be damaged"),
        (lambda data: idx_bytes(pixels(6)), "train-images.* holds numbers on 1 axes"),
        (lambda data: idx_bytes(pixels(5, 4, 5)), "holds 5 images, but train-labels-idx1-ubyte 6 labels"),
        (lambda data: idx_bytes(pixels(6, 4, 6)), "training and test examples differ in shape"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, change, reason):
    write_idx(tmp_path, *quick_images())
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    refused(tmp_path, reason)


def test_idx_folders_that_are_not_one_whole_set_are_refused(tmp_path):
    write_idx(tmp_path, *quick_images())
    (tmp_path / "t10k-labels-idx1-ubyte").rename(tmp_path / "other")
    refused(tmp_path, r"lacks t10k-labels-idx1-ubyte \(or \.gz\) \(it has t10k-images")
    (tmp_path / "other").rename(tmp_path / "test-labels-idx1-ubyte")
    load(tmp_path)
    (tmp_path / "test-labels-idx1-ubyte").write_bytes(idx_bytes(pixels(3, 1)))
    refused(tmp_path, "test-labels-idx1-ubyte holds numbers on 2 axes: labels have one")
    write_idx(tmp_path, *quick_images(), prefix="more-")
    refused(tmp_path, "holds several sets of IDX files, keep one: more-train-images")


def test_empty_idx_files_are_refused(tmp_path):
    x, y, x_test, y_test = quick_images()
    write_idx(tmp_path, x[:0], y[:0], x_test, y_test)
    refused(tmp_path, "y_train is empty: there is nothing to train on")


# CIFAR


def write_cifar10(folder: Path, x, y, x_test, y_test) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    batches = [*zip(np.array_split(x, 5), np.array_split(y, 5), strict=True), (x_test, y_test)]
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for name, (images, labels) in zip(names, batches, strict=True):
        records = np.concatenate([labels[:, None].astype(np.uint8), images.reshape(len(images), -1)], 1)
        (folder / name).write_bytes(records.tobytes())


def write_cifar100(folder: Path, x, coarse, fine, x_test) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, images in (("train.bin", x), ("test.bin", x_test)):
        n = len(images)
        labels = np.stack([coarse[:n], fine[:n]], 1).astype(np.uint8)
        (folder / name).write_bytes(np.concatenate([labels, images.reshape(n, -1)], 1).tobytes())


def cifar_arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return pixels(12, 3, 32, 32), np.arange(12) % 10, pixels(4, 3, 32, 32), np.array([9, 0, 3, 3])


@pytest.mark.parametrize("inside", ["cifar10/cifar-10-batches-bin", "cifar10"])
def test_cifar10_is_read_by_name_and_by_folder(tmp_path, monkeypatch, inside):
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


def test_cifar100_has_fine_and_coarse_labels(tmp_path):
    x, fine, coarse = pixels(5, 3, 32, 32), np.array([99, 3, 50, 7, 0]), np.array([19, 0, 4, 7, 1])
    write_cifar100(tmp_path / "cifar100" / "cifar-100-binary", x, coarse, fine, x[:2])
    data = load("cifar-100", root=tmp_path)
    assert equal(data.x_train, x)
    assert (data.n_classes, data.y_train.tolist(), data.y_test.tolist()) == (100, fine.tolist(), [99, 3])
    data = load("cifar100", root=str(tmp_path), y="coarse_label")
    assert (data.n_classes, data.y_train.tolist()) == (20, coarse.tolist())
    assert data.mean.flatten().tolist() == [0.5071, 0.4865, 0.4409]
    refused("cifar100", r"CIFAR-100 has no label 'label' \(valid: coarse_label, fine_label\)", root=tmp_path, y="label")


def test_damaged_cifar_files_are_named(tmp_path):
    arrays = cifar_arrays()
    write_cifar10(tmp_path, *arrays)
    path = tmp_path / "data_batch_2.bin"
    whole = path.read_bytes()
    for content in (whole[:-1], b"", whole[:100]):
        path.write_bytes(content)
        refused(tmp_path, r"data_batch_2\.bin is damaged: \d+ bytes are not a whole number of CIFAR-10 records of 3073")
    path.write_bytes(whole[:3073] + b"\x0b" + whole[3074:])
    refused(tmp_path, r"data_batch_2\.bin is damaged: record 1 has the label 11, but CIFAR-10 has 0 to 9")
    path.unlink()
    refused(tmp_path, r"lacks data_batch_2\.bin")


def test_pickled_cifar_is_refused_and_nothing_is_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    folder = tmp_path / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    (folder / "data_batch_1").write_bytes(pickle.dumps(Trap()))
    for source in (folder, folder.parent, "cifar10"):
        refused(source, "Python version of CIFAR-10, which is pickled, .* binary version, cifar-10-bin", root=tmp_path)
    (tmp_path / "cifar-100-python").mkdir()
    refused(tmp_path / "cifar-100-python", "Python version of CIFAR-100, .* binary version, cifar-100-binary")
    assert not (tmp_path / "sprung").exists()


# folders of images


def save(path: Path, image: np.ndarray, **how) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, **how)
    return image


def image_folder(root: Path, shape=(4, 5, 3), suffix="png", parts=("train", "test"), classes=("cat", "ant")) -> dict:
    """Two images of each class in each part; returns them in the order they must come back."""
    made = {}
    for part in parts:
        for name in sorted(classes):
            for i in (2, 1):
                made[part, name, i] = save(root / part / name / f"{i}.{suffix}", pixels(*shape))
    return {part: np.stack([made[key] for key in sorted(made) if key[0] == part]) for part in parts}


def test_colour_images_by_class_folder(tmp_path):
    made = image_folder(tmp_path)
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".cache").mkdir()
    data = load(tmp_path)
    assert equal(data.x_train, made["train"].transpose(0, 3, 1, 2))
    assert equal(data.x_test, made["test"].transpose(0, 3, 1, 2))
    assert (data.y_train.tolist(), data.n_classes, data.image) == ([0, 0, 1, 1], 2, (4, 5))  # ant before cat


def test_grey_images_keep_one_channel_until_one_has_colours(tmp_path):
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
def test_jpeg_is_read_as_it_decodes(tmp_path, shape):
    image_folder(tmp_path, shape, "JPG")
    data = load(tmp_path)
    with Image.open(tmp_path / "train" / "ant" / "1.JPG") as opened:
        decoded = np.asarray(opened)
    assert equal(data.x_train[0], decoded[None] if decoded.ndim == 2 else decoded.transpose(2, 0, 1))


def test_transparency_and_palettes_become_plain_colours(tmp_path):
    image_folder(tmp_path, (4, 4, 4))
    assert load(tmp_path).input_shape == (3, 4, 4)
    flat = Image.new("P", (4, 4), 1)
    flat.putpalette([0, 0, 0, 10, 20, 30])
    flat.save(tmp_path / "train" / "ant" / "1.png")
    assert load(tmp_path).x_train[0, :, 0, 0].tolist() == [10, 20, 30]


def test_sizes_that_differ_need_a_size(tmp_path):
    image_folder(tmp_path)
    save(tmp_path / "train" / "cat" / "1.png", pixels(8, 6, 3))
    refused(tmp_path, r"cat/1\.png is 8x6 \(height x width\), the images before it 4x5: give size=\(height, width\)")
    data = load(tmp_path, size=[2, 3])
    assert data.image == (2, 3)
    image_folder(tmp_path / "other", parts=("train",))
    image_folder(tmp_path / "other", (3, 3), parts=("test",))
    refused(tmp_path / "other", r"test/ant/1\.png is 3x3 \(height x width\), the images before it 4x5: give size")
    assert load(tmp_path / "other", size=(4, 5)).input_shape == (3, 4, 5)


def test_val_tests_where_there_is_no_test_and_may_be_merged_where_there_is(tmp_path):
    made = image_folder(tmp_path / "two", parts=("train", "val"))
    assert equal(load(tmp_path / "two").x_test, made["val"].transpose(0, 3, 1, 2))
    made = image_folder(tmp_path / "three", parts=("train", "valid", "test"))
    assert len(load(tmp_path / "three").y_train) == 4
    data = load(tmp_path / "three", merge_validation=True)
    assert equal(data.x_train, np.concatenate([made["train"], made["valid"]]).transpose(0, 3, 1, 2))
    assert equal(data.x_test, made["test"].transpose(0, 3, 1, 2))
    refused(tmp_path / "two", "two has no test part", merge_validation=True)
    image_folder(tmp_path / "none")
    refused(tmp_path / "none", "has no validation folder to merge", merge_validation=True)


def test_a_folder_without_test_is_split_only_if_that_is_asked_for(tmp_path):
    image_folder(tmp_path, parts=("train",))
    refused(tmp_path, r"has no test part: give one, or test=0\.2 to hold out that share of each class")
    data = load(tmp_path, test=0.5)
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([0, 1], [0, 1])
    assert torch.equal(load(tmp_path / "train", test=0.5, seed=3).x_test, data.x_test)
    image_folder(tmp_path)
    refused(tmp_path, "has a test part: test and test_writers are for data without one", test=0.5)


def test_wrong_image_folders_are_refused(tmp_path):
    image_folder(tmp_path)
    (tmp_path / "test" / "bee").mkdir()
    refused(tmp_path, r"test/bee is a class that training does not have \(it has ant, cat\)")
    (tmp_path / "train" / "bee").mkdir()
    refused(tmp_path, "train/bee is a class without images")
    save(tmp_path / "train" / "bee" / "1.png", pixels(4, 5, 3))
    assert load(tmp_path, n_classes=3).n_classes == 3
    refused(tmp_path, "n_classes = 2, but .* has 3 classes", n_classes=2)
    (tmp_path / "empty" / "train").mkdir(parents=True)
    refused(tmp_path / "empty", r"train holds no images: expected are .*train/<class>/\*\.png or jpg")


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_damaged_images_are_named(tmp_path, suffix):
    image_folder(tmp_path, (30, 30, 3), suffix)
    path = tmp_path / "train" / "cat" / f"1.{suffix}"
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"GIF89a nonsense"):
        path.write_bytes(content)
        refused(tmp_path, rf"cat/1\.{suffix} cannot be read as an image, it may be damaged")


def test_images_of_16_bits_are_refused(tmp_path):
    image_folder(tmp_path, (4, 4))
    Image.fromarray(np.full((4, 4), 60000, np.uint16)).save(tmp_path / "train" / "ant" / "1.png")
    refused(tmp_path, r"ant/1\.png has pixels of more than 8 bits: convert it")


# tables


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "png")
    return buffer.getvalue()


def struct_table(images: np.ndarray, labels, column: str = "image", **more) -> pa.Table:
    rows = [{"bytes": png(image), "path": None} for image in images]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    return pa.table({column: pa.array(rows, kind), "label": labels, **more})


@pytest.mark.parametrize(("column", "shape"), [("image", (5, 6)), ("img", (5, 6, 3))])
def test_parquet_with_image_structs(tmp_path, column, shape):
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


def test_shards_in_a_folder_are_put_together(tmp_path):
    x = pixels(6, 4, 4)
    (tmp_path / "data").mkdir()
    parquet.write_table(struct_table(x[:4], [0, 1, 0, 1]), tmp_path / "data" / "train-00000-of-00002.parquet")
    parquet.write_table(struct_table(x[4:], [0, 1]), tmp_path / "data" / "train-00001-of-00002.parquet")
    parquet.write_table(struct_table(x[:2], [0, 1]), tmp_path / "data" / "validation-00000-of-00001.parquet")
    data = load(tmp_path)
    assert equal(data.x_train, x[:, None])
    assert len(data.y_test) == 2
    parquet.write_table(pa.table({"img": [1.0], "label": [0]}), tmp_path / "data" / "train-00001-of-00002.parquet")
    refused(tmp_path, "have different columns: they are not shards of one table")


def test_tables_in_a_folder_that_are_not_shards_are_not_put_together(tmp_path):
    (tmp_path / "train.csv").write_text("f,label\n1,0\n2,1\n")
    (tmp_path / "test.csv").write_text("f,label\n1,0\n")
    assert len(load(tmp_path).y_train) == 2
    (tmp_path / "train_more.csv").write_text("f,label\n1,0\n2,1\n")
    refused(tmp_path, r"holds several tables that begin with train: train\.csv, train_more\.csv; name the files: load")
    parquet.write_table(pa.table({"f": [1.0, 2.0, 3.0], "label": [0, 1, 0]}), tmp_path / "train.parquet")
    assert len(load(tmp_path).y_train) == 3
    (tmp_path / "test.csv").unlink()
    refused(tmp_path, "has no test part")


def test_images_in_a_table_may_be_paths_or_plain_bytes(tmp_path):
    x = pixels(4, 4, 4)
    rows = [{"bytes": None, "path": f"{i}.png"} for i in range(4)]
    for i in range(4):
        save(tmp_path / f"{i}.png", x[i])
    parquet.write_table(pa.table({"image": rows, "label": [0, 1, 0, 1]}), tmp_path / "a.parquet")
    plain = pa.table({"image": [png(image) for image in x], "label": [0, 1, 0, 1]})
    parquet.write_table(plain, tmp_path / "b.parquet")
    data = load((tmp_path / "a.parquet", tmp_path / "b.parquet"))
    assert equal(data.x_train, x[:, None])
    assert equal(data.x_test, x[:, None])
    (tmp_path / "b.parquet").rename(tmp_path / "test.parquet")
    (tmp_path / "a.parquet").rename(tmp_path / "train.parquet")
    save(tmp_path / "more" / "4.png", x[0])  # a folder of images beside the tables is not a class
    assert equal(load(tmp_path).x_train, x[:, None])
    (tmp_path / "test.parquet").rename(tmp_path / "b.parquet")
    (tmp_path / "train.parquet").rename(tmp_path / "a.parquet")
    (tmp_path / "3.png").unlink()
    refused((tmp_path / "a.parquet", tmp_path / "b.parquet"), r"there is no file .*3\.png")
    table = pa.table({"image": [{"bytes": None, "path": None}], "label": [0]}, struct_table(x, [0] * 4).schema)
    parquet.write_table(table, tmp_path / "a.parquet")
    refused(tmp_path / "a.parquet", "row 0: the column 'image' holds neither bytes nor a path")
    parquet.write_table(pa.table({"image": [b"nonsense"], "label": [0]}), tmp_path / "a.parquet")
    refused(tmp_path / "a.parquet", r"a\.parquet, row 0 cannot be read as an image")


def test_a_single_table_is_split_always_alike(tmp_path):
    parquet.write_table(struct_table(pixels(20, 4, 4), [0, 1] * 10), tmp_path / "a.parquet")
    data = load(tmp_path / "a.parquet", seed=1)
    assert (len(data.y_train), data.y_test.bincount().tolist()) == (16, [2, 2])
    assert torch.equal(load(tmp_path / "a.parquet", seed=2).x_test, data.x_test)
    assert len(load(tmp_path / "a.parquet", test=0.5).y_test) == 10


def test_csv_of_numbers(tmp_path):
    (tmp_path / "a.csv").write_text("id,width,height,label\n1,0.5,2,0\n2,1.5,3,1\n3,2.5,4,1\n")
    with gzip.open(tmp_path / "b.csv.gz", "wt") as file:
        file.write("id,width,height,label\n7,9,8,1\n")
    data = load((tmp_path / "a.csv", tmp_path / "b.csv.gz"))
    assert data.x_train.tolist() == [[0.5, 2], [1.5, 3], [2.5, 4]]
    assert data.x_train.dtype == torch.float32
    assert (data.x_test.tolist(), data.y_test.tolist()) == ([[9, 8]], [1])
    data = load((tmp_path / "a.csv", tmp_path / "b.csv.gz"), x=["height"], y="label", ids="id")
    assert (data.x_train.tolist(), data.ids.tolist()) == ([[2], [3], [4]], [1, 2, 3])


def test_csv_of_pixels_becomes_images(tmp_path):
    x = pixels(4, 9)
    header = ",".join(["label", *(f"pixel{i}" for i in range(9))])
    rows = "\n".join(",".join(map(str, [i % 2, *x[i]])) for i in range(4))
    (tmp_path / "a.csv").write_text(f"{header}\n{rows}\n")
    pair = (tmp_path / "a.csv", tmp_path / "a.csv")
    assert equal(load(pair).x_train, x.reshape(4, 1, 3, 3))
    assert load(pair, size=(1, 3)).input_shape == (3, 1, 3)
    refused(pair, r"9 pixels an example are not a square image: size = \(2, 2\) does not divide them", size=(2, 2))
    (tmp_path / "b.csv").write_text("label,1x1,1x2\n0,1,2\n1,3,4\n")
    refused(tmp_path / "b.csv", r"2 pixels an example are not a square image: give size=\(height, width\)")


def test_words_as_labels_are_numbered_in_their_order(tmp_path):
    (tmp_path / "a.csv").write_text("f,label\n1,dog\n2,ant\n3,cat\n")
    (tmp_path / "b.csv").write_text("f,label\n1,cat\n")
    data = load((tmp_path / "a.csv", tmp_path / "b.csv"))
    assert (data.y_train.tolist(), data.y_test.tolist(), data.n_classes) == ([2, 0, 1], [1], 3)
    (tmp_path / "b.csv").write_text("f,label\n1,cat\n2,cow\n")
    refused((tmp_path / "a.csv", tmp_path / "b.csv"), r"b\.csv, row 1: the label 'cow' is none of .*\(ant, cat, dog\)")
    coded = pa.table({"f": [1.0, 2.0], "label": pa.array(["b", "a"]).dictionary_encode()})
    parquet.write_table(coded, tmp_path / "c.parquet")
    assert load((tmp_path / "c.parquet", tmp_path / "c.parquet")).y_train.tolist() == [1, 0]


def test_lists_of_numbers_become_arrays(tmp_path):
    x = pixels(4, 2, 3, 3)

    def made(values, kind=None, **options):
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
    refused(path, "the lists of the column 'x' differ in length: 1, 2")
    parquet.write_table(pa.table({"x": [["a"], ["b"]], "label": [0, 1]}), path)
    refused(path, "the column 'x' holds .*: not images, numbers or text")


def test_several_columns_of_lists_become_a_dict(tmp_path):
    table = pa.table({"input_ids": [[1, 2], [3, 4]], "mask": [[1, 1], [1, 0]], "label": [0, 1]})
    parquet.write_table(table, tmp_path / "a.parquet")
    data = load((tmp_path / "a.parquet", tmp_path / "a.parquet"), x=["input_ids", "mask"])
    assert {key: value.tolist() for key, value in data.x_train.items()} == {
        "input_ids": [[1, 2], [3, 4]],
        "mask": [[1, 1], [1, 0]],
    }


def test_text_needs_a_tokenizer(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\n"one, two",0\n"three\nlines",1\n')
    pair = (tmp_path / "a.csv", tmp_path / "a.csv")
    refused(pair, "the column 'text' holds text, which models cannot take: give tokenizer=, a function from a list")
    data = load(pair, tokenizer=lambda texts: torch.tensor([[len(text)] for text in texts]))
    assert data.x_train.tolist() == [[8], [11]]
    data = load(pair, tokenizer=lambda texts: {"n": torch.tensor([len(t) for t in texts]), "m": [[1], [2]]})
    assert {key: value.tolist() for key, value in data.x_train.items()} == {"m": [[1], [2]], "n": [8, 11]}
    (tmp_path / "b.csv").write_text("text,label\n" + "word,0\nword,1\n" * 5)
    alone = load(tmp_path / "b.csv", tokenizer=lambda texts: {"n": torch.arange(10)})
    assert (len(alone.x_train["n"]), len(alone.x_test["n"])) == (8, 2)
    refused(pair, "the tokenizer must return a tensor or a dict of tensors, not list", tokenizer=lambda texts: texts)


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("", {}, r"a\.csv cannot be read as csv: Empty CSV"),
        ("f,label\n", {}, r"a\.csv holds no rows"),
        ("f,label\n1,0\n2\n", {}, r"a\.csv cannot be read as csv: .*Expected 2 columns, got 1"),
        ("f,g\n1,0\n", {}, r"which column holds the classes\? give y= \(columns: f, g\)"),
        ("f,g,label\n1,a,0\n", {}, r"which columns hold the examples\? give x= \(columns: f, g, label\)"),
        ("label\n1\n", {}, r"which columns hold the examples\? give x= \(columns: label\)"),
        ("f,label\n1,0\n", {"y": "labels"}, r"has no column 'labels': did you mean label\?"),
        ("f,label\n1,0\n", {"x": "g"}, r"has no column 'g'"),
        ("f,label\n1,0\n", {"ids": "w"}, r"has no column 'w'"),
        ("f,f,label\n1,2,0\n", {}, "has 2 columns 'f'"),
        ("f,label\n1,0\n,1\n", {}, "the column 'f' has 1 empty cells, the first in row 1"),
        ("f,label\n1,0\n2,\n", {}, "the column 'label' has 1 empty cells, the first in row 1"),
        ("f,label\n1,0.5\n2,1.5\n", {}, "y_train must hold whole numbers from 0 on"),
        ("f,label\n1,2020-01-01\n2,2020-01-01\n", {}, "the column 'label' holds .*, not classes"),
        ("f,label\n1,-1\n2,1\n", {}, "y_train holds the label -1; classes count from 0"),
        ("f,label\n1,0\n2,3\n", {"n_classes": 3}, "n_classes = 3, but a has labels 0 to 3: 4 classes"),
        ("f,label\n1,0\ninf,1\n", {}, "x_train holds numbers that are not finite, first in example 1"),
        ("f,label\n1,0\n2,0\n", {}, "all labels are 0: at least two classes are needed"),
        ("f,label\n1,0\n", {"splits": ("a", "b")}, "the option splits does not apply to a table"),
    ],
)
def test_tables_that_cannot_be_a_data_set_are_refused(tmp_path, text, options, reason):
    (tmp_path / "a.csv").write_text(text)
    refused((tmp_path / "a.csv", tmp_path / "a.csv"), reason, **options)


def test_files_that_are_not_what_their_name_says_are_refused(tmp_path):
    table = struct_table(pixels(4, 4, 4), [0, 1, 0, 1])
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path)
    whole = path.read_bytes()
    for content in (b"", b"nonsense", whole[: len(whole) // 2]):
        path.write_bytes(content)
        refused(path, r"a\.parquet cannot be read as parquet")
    refused((path, tmp_path / "b.parquet"), r"a\.parquet cannot be read")
    path.write_bytes(whole)
    refused((path, tmp_path / "b.parquet"), r"there is no file .*b\.parquet")
    refused((path, tmp_path), "there is no file")
    (tmp_path / "c.txt").touch()
    refused((path, tmp_path / "c.txt"), r"c\.txt is not a table that can be read \(valid: \.parquet, \.csv")
    (tmp_path / "d.csv").write_bytes(b"f\xff,label\n1,0\n2,1\n")
    refused(tmp_path / "d.csv", r"d\.csv cannot be read as csv: 'utf-8' codec")
    table_of_text = pa.table({"f": [1, 2], "label": ["xyz", "uvw"]})
    parquet.write_table(table_of_text, path, use_dictionary=False, compression="none")
    path.write_bytes(path.read_bytes().replace(b"xyz", b"x\xffz"))
    refused(path, r"a\.parquet cannot be read as parquet: .*UTF")
    path.write_bytes(whole)
    parquet.write_table(table.drop_columns(["label"]), tmp_path / "b.parquet")
    refused((path, tmp_path / "b.parquet"), r"b\.parquet has no column 'label'")


# Hugging Face


@pytest.fixture
def datasets(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    module = pytest.importorskip("datasets", reason="needs the extra data")
    monkeypatch.setattr(module.config, "HF_HUB_OFFLINE", True)  # where it was imported before this
    return module


def hub_split(datasets, n: int, labels=None):
    images = pixels(n, 6, 6, 3)
    features = datasets.Features(
        {"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["a", "b", "c", "d"])}
    )
    classes = list(np.arange(n) % 3) if labels is None else labels
    return images, datasets.Dataset.from_dict({"img": list(images), "fine_label": classes}, features=features)


def test_a_data_set_saved_as_parquet_brings_its_classes(tmp_path, datasets):
    """Four classes are declared; three occur."""
    images, split = hub_split(datasets, 6)
    split.to_parquet(tmp_path / "a.parquet")
    pair = (tmp_path / "a.parquet", tmp_path / "a.parquet")
    data = load(pair, n_classes=4)
    assert equal(data.x_train, images.transpose(0, 3, 1, 2))
    assert (data.n_classes, data.y_train.tolist()) == (4, [0, 1, 2, 0, 1, 2])
    refused(pair, "n_classes = 3, but a has 4 classes", n_classes=3)


def test_arrays_of_hugging_face_are_images(tmp_path, datasets):
    x = pixels(3, 4, 4)
    features = datasets.Features({"image": datasets.Array2D((4, 4), "uint8"), "label": datasets.Value("int64")})
    made = datasets.Dataset.from_dict({"image": list(x), "label": [0, 1, 2]}, features=features)
    made.to_parquet(tmp_path / "a.parquet")
    assert equal(load((tmp_path / "a.parquet", tmp_path / "a.parquet")).x_train, x[:, None])


def test_a_data_set_by_name(datasets, monkeypatch):
    (images, train), (_, test) = hub_split(datasets, 9), hub_split(datasets, 3)
    calls = []

    def load_dataset(*name):
        calls.append(name)
        if len(name) == 1 and name[0] not in ("plain", "owner/plain"):
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name[0]}' doesn't exist on the Hub")
        return datasets.DatasetDict(train=train, unsupervised=test, validation=test)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load("hf:plain", n_classes=4)
    assert equal(data.x_train, images.transpose(0, 3, 1, 2))
    assert (data.y_test.tolist(), data.name) == ([0, 1, 2], "hf:plain")
    load("hf:owner/plain")
    load("hf:group/config")
    load("hf:owner/plain/config")
    assert calls == [
        ("plain",),
        ("owner/plain",),
        ("group/config",),
        ("group", "config"),
        ("owner/plain", "config"),
    ]
    assert equal(load("hf:plain", splits=("validation", "train")).x_test, images.transpose(0, 3, 1, 2))
    refused("hf:plain", "splits must name one or two of train, unsupervised, validation .*", splits=("train", "tset"))
    refused("hf:a/b/c/d", "a Hugging Face data set is hf:NAME, hf:OWNER/NAME")
    refused("hf:", "a Hugging Face data set is hf:NAME")
    refused("hf:none", "hf:none cannot be loaded: there is no such data set, or it is private")


def test_splits_of_a_data_set_by_name(datasets, monkeypatch):
    train, bare = hub_split(datasets, 9)[1], hub_split(datasets, 3, [-1, -1, -1])[1]
    found = {"train": train, "test": bare, "validation": train}
    monkeypatch.setattr(datasets, "load_dataset", lambda *name: datasets.DatasetDict(found))
    refused("hf:x", r"the split 'test' has no classes \(all are -1\): name .* splits=\('train', \.\.\.\)")
    assert len(load("hf:x", splits=("train", "validation")).y_test) == 9
    found = {"train": train.filter(lambda row: row["fine_label"] != 1)}  # an index over the table: it must be obeyed
    refused("hf:x", "hf:x has no test part")
    assert load("hf:x", test=0.34).y_test.bincount().tolist() == [1, 0, 1]
    found = {"all": train}
    refused("hf:x", r"hf:x has no split train: name one with splits=\(train, test\) \(it has all\)")
    monkeypatch.setattr(datasets, "load_dataset", lambda *name: train)
    assert len(load("hf:x", splits="train", test=0.34).y_test) == 3


def test_a_data_set_that_cannot_be_had_is_one_line(datasets, monkeypatch):
    assert "hub is out of reach" in refused("hf:fedkeep-none/none", "hf:fedkeep-none/none cannot be loaded")

    def no_config(*name):
        raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['a', 'b']")

    monkeypatch.setattr(datasets, "load_dataset", no_config)
    refused("hf:x", r"hf:x cannot be loaded: add /CONFIG to the name \(Config name is missing. Please pick one .*'a'")

    def broken(*name):
        raise RuntimeError("x" * 1000)

    monkeypatch.setattr(datasets, "load_dataset", broken)
    assert len(refused("hf:x", "hf:x cannot be loaded: xxx")) < 300


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("datasets", "hf:x", "loading hf:x needs datasets, which is not installed"),
        ("pyarrow", "a.parquet", "reading parquet and csv files needs pyarrow, which is not installed"),
        ("PIL", "images", "reading images needs pillow, which is not installed"),
    ],
)
def test_a_missing_extra_says_how_to_install_it(tmp_path, monkeypatch, module, source, reason):
    image_folder(tmp_path / "images")
    (tmp_path / "a.parquet").touch()
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.partition(".")[0] == module:
            raise ImportError(f"no {name}")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    where = source if source.startswith("hf:") else tmp_path / source
    assert refused(where, reason).endswith("pip install 'fedkeep[data]'")


# data sets by name


@pytest.mark.parametrize("name", named.NAMED)
def test_a_set_that_is_not_there_says_where_it_belongs_and_what_gets_it(name, tmp_path):
    root = tmp_path / "my data"
    line = refused(name, rf"{name} is expected in .*my data/{name}, which is not there; this gets it: ", root=root)
    assert f"'{root / name}'" in line  # quoted: it can be pasted into a shell
    assert "https://" in line or "http://cs231n" in line or "hf download" in line
    (root / name).mkdir(parents=True)
    refused(name, rf"{name} is expected in .*, which is empty; this gets it: ", root=root)
    (root / name / "half a file").touch()
    refused(name, rf"{name} is incomplete: .*; this gets it: ", root=root)


def test_named_sets_are_looked_for_in_the_usual_places(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert named.data_root(None) == tmp_path / ".cache" / "fedkeep"
    assert named.data_root("~/sets") == tmp_path / "sets"
    monkeypatch.setenv("FEDKEEP_DATA", "/elsewhere")
    assert named.data_root(None) == Path("/elsewhere")
    assert named.data_root("/here") == Path("/here")


def test_mnist_by_name(tmp_path):
    arrays = quick_images()
    write_idx(tmp_path / "mnist", *arrays, packed=True)
    data = load("MNIST", root=tmp_path)
    assert equal(data.x_train, arrays[0][:, None])
    assert (data.n_classes, data.mean.item(), data.std.item()) == (10, 0.1307, 0.3081)  # though three classes occur
    write_idx(tmp_path / "mnist", arrays[0], arrays[1] + 9, arrays[2], arrays[3])
    refused("mnist", "mnist: there is a label 11, but n_classes = 10 allows 0 to 9", root=tmp_path)


def test_cinic10_by_name(tmp_path):
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
    refused("cinic10", "cinic10 has 10 classes, but .*cinic10 holds 9", root=tmp_path)


def test_tiny_imagenet_by_name(tmp_path):
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
    refused("tiny_imagenet", r"val_annotations\.txt, line 1: 'n9' is no class that training has", root=tmp_path)
    annotations.write_text(f"val_9.JPEG\t{names[0]}\t0\n")
    refused("tiny_imagenet", r"incomplete: there is no file .*val_9\.JPEG; this gets it", root=tmp_path)
    annotations.unlink()
    refused("tiny_imagenet", r"incomplete: there is no file .*val_annotations\.txt; this gets it", root=tmp_path)


# FEMNIST


def leaf(path: Path, writers: dict[str, tuple[np.ndarray, list[int]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {w: {"x": (x.reshape(len(x), 784) / 255).tolist(), "y": y} for w, (x, y) in writers.items()}
    content = {"users": list(writers), "num_samples": [len(y) for _, y in writers.values()], "user_data": data}
    path.write_text(json.dumps(content))


def test_femnist_from_the_files_of_leaf(tmp_path):
    x, home = pixels(6, 1, 28, 28), tmp_path / "femnist" / "data"
    empty = (x[:0], [])
    leaf(home / "train" / "all_data_0_train_9.json", {"f2": (x[:2], [61, 3]), "f1": (x[2:3], [7]), "f0": empty})
    leaf(home / "train" / "all_data_1_train_9.json", {"f3_long": (x[3:4], [0])})
    leaf(home / "test" / "all_data_0_test_9.json", {"f2": (x[4:6], [1, 2])})
    data = load("FEMNIST", root=tmp_path)
    assert equal(data.x_train, x[:4])
    assert equal(data.x_test, x[4:])
    assert (data.y_train.tolist(), data.y_test.tolist(), data.n_classes) == ([61, 3, 7, 0], [1, 2], 62)
    assert data.ids.tolist() == ["f2", "f2", "f1", "f3_long"]
    assert [k.tolist() for k in partition.by_id(data.ids)] == [[2], [0, 1], [3]]
    refused("femnist", "femnist has a test part", root=tmp_path, test=0.2)
    assert torch.equal(load(home, n_classes=62).x_train, data.x_train)


def writers_of(sizes: list[int]) -> dict[str, tuple[np.ndarray, list[int]]]:
    """Image j of writer i is all i * 20 + j, of class j."""
    return {
        f"w{i}": (np.stack([np.full((28, 28), i * 20 + j) for j in range(n)]), list(range(n)))
        for i, n in enumerate(sizes)
    }


@pytest.mark.parametrize("where", ["all_data", ".", "leaf/data/femnist/data/sampled_data"])
def test_femnist_is_split_by_a_share_of_each_writer_as_in_leaf(tmp_path, where):
    """LEAF keeps max(1, int(0.9 n)) to train: of 10 nine, of 5 four, of 2 one; a writer of one is left out."""
    leaf(tmp_path / "femnist" / where / "all_data_0.json", writers_of([10, 5, 2, 1]))
    (tmp_path / "femnist" / "about.json").write_text("{}")
    data = load("femnist", root=tmp_path)
    assert dict(zip(*np.unique(data.ids, return_counts=True), strict=True)) == {"w0": 9, "w1": 4, "w2": 1}
    assert len(data.y_test) == 3
    seen = data.x_train[:, 0, 0, 0].tolist() + data.x_test[:, 0, 0, 0].tolist()
    assert sorted(seen) == [*range(10), *range(20, 25), 40, 41]
    assert all(f"w{int(v) // 20}" == w for v, w in zip(data.x_train[:, 0, 0, 0], data.ids, strict=True))
    assert torch.equal(load("femnist", root=tmp_path, seed=9).x_test, data.x_test)
    assert len(load("femnist", root=tmp_path, test=0.5).y_test) == 5 + 3 + 1
    whole = load("femnist", root=tmp_path, test_writers=True, test=0.5)
    test_writers = set((whole.x_test[:, 0, 0, 0] // 20).tolist())
    assert len(test_writers) == 2
    assert not test_writers & set((whole.x_train[:, 0, 0, 0] // 20).tolist())
    assert len(whole.y_train) + len(whole.y_test) == 18


def test_femnist_from_parquet(tmp_path, datasets):
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
    ("content", "reason"),
    [
        ('{"users": [', r"a\.json cannot be read as a json file of LEAF"),
        ("[]", r"a\.json cannot be read as a json file of LEAF"),
        ('{"users": []}', r"a\.json cannot be read as a json file of LEAF: 'user_data'"),
        ('{"user_data": {}}', "train holds no examples"),
        ('{"user_data": {"w": {"x": []}}}', "writer w lacks images x or labels y"),
        ('{"user_data": {"w": {"x": [[0, 1]], "y": [1]}}}', r"images are lists of 784 numbers, not of shape \(2,\)"),
        (json.dumps({"user_data": {"w": {"x": [[0] * 784], "y": [1, 2]}}}), "writer w has 1 images and 2 labels"),
        (json.dumps({"user_data": {"w": {"x": [[2] * 784], "y": [1]}}}), "pixels must lie between 0 and 1"),
        (json.dumps({"user_data": {"w": {"x": [[0] * 784], "y": [62]}}}), "there is a label 62, but n_classes = 62"),
    ],
)
def test_damaged_files_of_leaf_are_named(tmp_path, content, reason):
    leaf(tmp_path / "femnist" / "test" / "a.json", writers_of([2]))
    (tmp_path / "femnist" / "train").mkdir()
    (tmp_path / "femnist" / "train" / "a.json").write_text(content)
    refused("femnist", reason, root=tmp_path)


# real images, where they are


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


def test_real_mnist_comes_back_exactly(tmp_path):
    x, y, x_test, y_test = real("mnist")
    write_idx(tmp_path / "mnist", x, y, x_test, y_test, packed=True)
    data = load("mnist", root=tmp_path)
    assert equal(data.x_train, x[:, None])
    assert equal(data.x_test, x_test[:, None])
    assert np.array_equal(data.y_train, y)
    assert np.array_equal(data.y_test, y_test)
    assert abs(data.x_train.double().mean() / 255 - data.mean.item()) < 0.01


def test_real_cifar10_comes_back_exactly(tmp_path):
    x, y, x_test, y_test = real("cifar10")
    first, x_test = x.transpose(0, 3, 1, 2), x_test.transpose(0, 3, 1, 2)
    write_cifar10(tmp_path / "cifar10" / "cifar-10-batches-bin", first, y, x_test, y_test)
    data = load("cifar10", root=tmp_path)
    assert equal(data.x_train, first)
    assert equal(data.x_test, x_test)
    assert np.array_equal(data.y_train, y)
    assert np.array_equal(data.y_test, y_test)
    assert (data.x_train.double().mean((0, 2, 3)) / 255 - data.mean.flatten()).abs().max() < 0.02


# the page


def test_the_page_on_data_gives_every_command_option_and_normalisation():
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for name, known in named.NAMED.items():
        assert known.get.format(f"$FEDKEEP_DATA/{name}") in text
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        for value in (*(known.mean or ()), *(known.std or ())):
            assert f"{value}" in row
    assert [field.name for field in dataclasses.fields(Options) if f"`{field.name}" not in text] == []
    assert [guess for guess in (*columns._X, *columns._Y) if f"`{guess}`" not in text] == []


def test_digits_are_scikit_learns_with_and_without_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits

    from fedkeep.data.sources import arrays

    raw = load_digits()
    expected = np.column_stack([raw.data, raw.target])
    assert np.array_equal(arrays._digits(), expected)
    monkeypatch.setattr(arrays.Path, "is_file", lambda self: False)
    assert np.array_equal(arrays._digits(), expected)
